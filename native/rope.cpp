#include "rope.h"

#include "norm.h"
#include "vec.h"

namespace octavo::OCTAVO_VARIANT {
namespace {

constexpr size_t MAX_HEAD_DIM = 256;

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

// Writes one token's K and V of one head. A token is a column of K, and half of the words of a row of V for bf16.
void write(const LayerPages& layer, uint32_t* k_head, uint32_t* v_head, size_t slot, const float* k, const float* v) {
  const size_t dim = layer.head_dim;
  uint32_t* column = k_head + slot;
  if (!layer.bf16) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(k);
    for (size_t d = 0; d < dim; ++d) {
      memcpy(column + d * layer.block_size, words + d, sizeof(float));
    }
    memcpy(v_head + slot * dim, v, dim * sizeof(float));
    return;
  }
  uint16_t k_bf16[MAX_HEAD_DIM], v_bf16[MAX_HEAD_DIM];
  for (size_t d = 0; d < dim; d += LANES) {
    store_bf16(k_bf16 + d, load(k + d));
    store_bf16(v_bf16 + d, load(v + d));
  }
  for (size_t d = 0; d < dim; d += 2) {
    memcpy(column + d / 2 * layer.block_size, k_bf16 + d, sizeof(uint32_t));
  }
  uint16_t* row = reinterpret_cast<uint16_t*>(v_head + slot / 2 * dim) + slot % 2;
  for (size_t d = 0; d < dim; ++d) {
    row[2 * d] = v_bf16[d];
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
      write(layer, k_words(layer, page, head), v_words(layer, page, head), position % layer.block_size,
            k + head * dim, v + head * dim);
    }
  }
}

}  // namespace

const RopeKernels rope_kernels = {rope_write};

}  // namespace octavo::OCTAVO_VARIANT
