// Where keys and values lie in the pages, as kv_format.py says: the only KV arithmetic of the kernels.
//
// K of a head is rows of items, a row for each item of a token, V rows of elements, a row for each token or pair of tokens:
//
//     items  bytes of K, V  K                                             V
//     FP32   4, 4           [head_dim][block_size]                        [block_size][head_dim]
//     BF16   4, 4           [head_dim / 2][block_size], pairs             [block_size / 2][head_dim], pairs
//     INT8   2, 2           [head_dim / 2][block_size], pairs             [block_size / 2][head_dim], pairs
//     fp8    2, 1           as INT8                                       [block_size][head_dim]
//     INT4   1, ½           [head_dim / 2][block_size], pairs of nibbles  [block_size][head_dim / 16][8], nibbles i and i + 8
//                           + [head_dim / 16][block_size] of signs
//
// The first of a pair lies in the low half.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

enum class Items { FP32, BF16, INT8, E4M3, E5M2, INT4 };

// Whether these are codes of rotated heads, with a scale for each token and head.
constexpr bool scaled(Items items) { return items != Items::FP32 && items != Items::BF16; }
// Elements of K in an item and bytes of one; tokens of V in a row, and bytes of sixteen columns.
constexpr size_t k_elements(Items items) { return items == Items::FP32 ? 1 : 2; }
constexpr size_t k_item(Items items) { return items == Items::INT4 ? 1 : scaled(items) ? 2 : 4; }
constexpr size_t v_tokens(Items items) { return items == Items::BF16 || items == Items::INT8 ? 2 : 1; }
constexpr size_t lane_bytes(Items items) {
  return items == Items::INT4 ? 8 : items == Items::INT8 ? 32 : scaled(items) ? 16 : 64;
}

// One layer of every page of a pool.
struct LayerPages {
  uint8_t* data;      // K of head 0 in page 0
  size_t page_bytes;  // from a page to the next
  size_t num_kv_heads;
  size_t head_dim;
  size_t block_size;
  Items items;

  // Rows of K, and bytes of a row of V.
  size_t k_rows() const { return head_dim / k_elements(items) + (items == Items::INT4 ? head_dim / 16 : 0); }
  size_t v_row() const { return head_dim / 16 * lane_bytes(items); }
  // Bytes of a head.
  size_t k_bytes() const { return k_rows() * block_size * k_item(items); }
  size_t v_bytes() const { return block_size / v_tokens(items) * v_row(); }
  size_t layer_bytes() const {
    return num_kv_heads * (k_bytes() + v_bytes() + (scaled(items) ? 2 * block_size * sizeof(uint16_t) : 0));
  }
};

// The rows of a step; see StepInputs in ops/api.py.
struct StepRows {
  const int32_t* positions;    // [num_rows]
  const int32_t* row_start;    // [num_slices + 1]
  const int32_t* write_start;  // [num_slices]
  const int32_t* page_start;   // [num_slices + 1]
  const int32_t* pages;
  size_t num_slices;

  size_t num_rows() const { return static_cast<size_t>(row_start[num_slices]); }
};

namespace {

inline uint8_t* page_of(const LayerPages& layer, int32_t page) {
  return layer.data + static_cast<size_t>(page) * layer.page_bytes;
}

inline uint8_t* k_of(const LayerPages& layer, int32_t page, size_t head) {
  return page_of(layer, page) + head * layer.k_bytes();
}

inline uint8_t* v_of(const LayerPages& layer, int32_t page, size_t head) {
  return page_of(layer, page) + layer.num_kv_heads * layer.k_bytes() + head * layer.v_bytes();
}

// The scales of a head's tokens, bf16 [block_size].
inline uint16_t* k_scales(const LayerPages& layer, int32_t page, size_t head) {
  return reinterpret_cast<uint16_t*>(v_of(layer, page, layer.num_kv_heads)) + head * layer.block_size;
}

inline uint16_t* v_scales(const LayerPages& layer, int32_t page, size_t head) {
  return k_scales(layer, page, layer.num_kv_heads + head);
}

}  // namespace
}  // namespace octavo
