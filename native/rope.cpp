#include "rope.h"

#include "encode.h"
#include "norm.h"
#include "vec.h"

namespace octavo::OCTAVO_VARIANT {
namespace {

// Turns the pairs (head[i], head[i + half]) by their angles.
OCTAVO_INLINE void rotate(float* head, size_t half, const float* cos, const float* sin) {
  for (size_t i = 0; i < half; i += LANES) {
    const size_t n = half - i < LANES ? half - i : LANES;
    const bool whole = n == LANES;
    float* low = head + i;
    float* high = head + half + i;
    const f32x16 a = whole ? load(low) : load_first(low, n);
    const f32x16 b = whole ? load(high) : load_first(high, n);
    const f32x16 c = whole ? load(cos + i) : load_first(cos + i, n);
    const f32x16 s = whole ? load(sin + i) : load_first(sin + i, n);
    store_first(low, n, fma(a, c, zero() - b * s));
    store_first(high, n, fma(b, c, a * s));
  }
}

// Writes an element of each row of K in a token's column.
template <class Item>
void write_column(uint8_t* k_head, size_t block_size, size_t slot, const Item* items, size_t count) {
  uint8_t* column = k_head + slot * sizeof(Item);
  for (size_t i = 0; i < count; ++i) {
    memcpy(column + i * block_size * sizeof(Item), items + i, sizeof(Item));
  }
}

// Writes a token's row of V: the first or the second of each pair.
template <class Element>
void write_paired(uint8_t* row, size_t slot, const Element* elements, size_t count) {
  Element* to = reinterpret_cast<Element*>(row) + slot % 2;
  for (size_t i = 0; i < count; ++i) {
    to[2 * i] = elements[i];
  }
}

void write_bf16(const LayerPages& layer, uint8_t* k_head, uint8_t* v_head, size_t slot, const float* k, const float* v) {
  const size_t dim = layer.head_dim;
  uint16_t k_bf16[MAX_HEAD_DIM], v_bf16[MAX_HEAD_DIM];
  uint32_t pairs[MAX_HEAD_DIM / 2];
  for (size_t d = 0; d < dim; d += LANES) {
    store_bf16(k_bf16 + d, load(k + d));
    store_bf16(v_bf16 + d, load(v + d));
  }
  memcpy(pairs, k_bf16, dim * sizeof(uint16_t));
  write_column(k_head, layer.block_size, slot, pairs, dim / 2);
  write_paired(v_head + slot / 2 * layer.v_row(), slot, v_bf16, dim);
}

// Codes of four and five bits as rows of K: pairs of nibbles, then the fifth bits.
void write_k_nibbles(const LayerPages& layer, uint8_t* k_head, size_t slot, const uint8_t* codes) {
  const size_t dim = layer.head_dim;
  uint8_t items[MAX_HEAD_DIM];
  for (size_t d = 0; d < dim; d += 2) {
    items[d / 2] = static_cast<uint8_t>((codes[d] & 15) | codes[d + 1] << 4);
  }
  for (size_t row = 0; row < dim / 16; ++row) {
    unsigned signs = 0;
    for (size_t bit = 0; bit < 8; ++bit) {
      signs |= static_cast<unsigned>(codes[dim / 2 + 8 * row + bit] >> 4) << bit;
    }
    items[dim / 2 + row] = static_cast<uint8_t>(signs);
  }
  write_column(k_head, layer.block_size, slot, items, layer.k_rows());
}

void write_v_nibbles(uint8_t* row, size_t dim, const uint8_t* codes) {
  for (size_t d = 0; d < dim; d += 16, row += 8) {
    for (size_t i = 0; i < 8; ++i) {
      row[i] = static_cast<uint8_t>(codes[d + i] | codes[d + 8 + i] << 4);
    }
  }
}

// Writes one token's K and V of one head.
void write(const LayerPages& layer, int32_t page, size_t head, size_t slot, const float* k, const float* v) {
  const size_t dim = layer.head_dim;
  uint8_t *k_head = k_of(layer, page, head), *v_head = v_of(layer, page, head);
  if (layer.items == Items::BF16) {
    write_bf16(layer, k_head, v_head, slot, k, v);
    return;
  }
  uint8_t* v_row = v_head + slot / v_tokens(layer.items) * layer.v_row();
  if (layer.items == Items::FP32) {
    write_column(k_head, layer.block_size, slot, k, dim);
    memcpy(v_row, v, dim * sizeof(float));
    return;
  }
  float turned[MAX_HEAD_DIM];
  uint8_t codes[MAX_HEAD_DIM];
  const bool small = layer.items == Items::INT4;
  turn(k, turned, dim);
  k_scales(layer, page, head)[slot] =
      small ? encode4(turned, dim, K_CODES, codes) : encode8(Items::INT8, turned, dim, codes);
  if (small) {
    write_k_nibbles(layer, k_head, slot, codes);
  } else {
    uint16_t pairs[MAX_HEAD_DIM / 2];
    memcpy(pairs, codes, dim);
    write_column(k_head, layer.block_size, slot, pairs, dim / 2);
  }
  turn(v, turned, dim);
  v_scales(layer, page, head)[slot] =
      small ? encode4(turned, dim, V_CODES, codes) : encode8(layer.items, turned, dim, codes);
  if (small) {
    write_v_nibbles(v_row, dim, codes);
  } else if (layer.items == Items::INT8) {
    write_paired(v_row, slot, codes, dim);
  } else {
    memcpy(v_row, codes, dim);
  }
}

void rope_write(const RopeWrite& args, size_t begin, size_t end) {
  const LayerPages& layer = args.layer;
  const StepRows& step = args.step;
  const size_t dim = layer.head_dim, half = dim / 2;
  const size_t row_floats = (args.num_heads + 2 * layer.num_kv_heads) * dim;
  size_t slice = 0;
  for (size_t row = begin; row < end; ++row) {
    while (static_cast<size_t>(step.row_start[slice + 1]) <= row) {
      ++slice;
    }
    const size_t position = static_cast<size_t>(step.positions[row]);
    const float* cos = args.cos + position * half;
    const float* sin = args.sin + position * half;
    float* heads = args.qkv + row * row_floats;
    for (size_t head = 0; head < args.num_heads + layer.num_kv_heads; ++head) {
      const float* norm = head < args.num_heads ? args.q_norm : args.k_norm;
      if (norm) {
        rms_norm(heads + head * dim, norm, args.eps, dim, heads + head * dim);
      }
      rotate(heads + head * dim, half, cos, sin);
    }
    if (step.positions[row] < step.write_start[slice]) {
      continue;
    }
    const int32_t page = step.pages[static_cast<size_t>(step.page_start[slice]) + position / layer.block_size];
    const float* k = heads + args.num_heads * dim;
    const float* v = k + layer.num_kv_heads * dim;
    for (size_t head = 0; head < layer.num_kv_heads; ++head) {
      write(layer, page, head, position % layer.block_size, k + head * dim, v + head * dim);
    }
  }
}

}  // namespace

const RopeKernels rope_kernels = {rope_write};

}  // namespace octavo::OCTAVO_VARIANT
