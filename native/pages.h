// Where keys and values lie in the pages, as kv_format.py says: the only KV arithmetic of the kernels.
//
// Everything is counted in words of four bytes: an fp32 element, or a pair of bf16 that follow each other along the
// reduction dimension. In words, K of a head is [head_dim / pair][block_size] and V is [block_size / pair][head_dim].
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

// One layer of every page of a pool.
struct LayerPages {
  uint32_t* data;       // K of head 0 in page 0
  size_t page_words;    // from a page to the next
  size_t head_words;    // K (or V) of one head
  size_t num_kv_heads;
  size_t head_dim;
  size_t block_size;
  bool bf16;
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

inline uint32_t* k_words(const LayerPages& layer, int32_t page, size_t head) {
  return layer.data + static_cast<size_t>(page) * layer.page_words + head * layer.head_words;
}

inline uint32_t* v_words(const LayerPages& layer, int32_t page, size_t head) {
  return k_words(layer, page, layer.num_kv_heads + head);
}

}  // namespace
}  // namespace octavo
