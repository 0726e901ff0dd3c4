// Rotary positions, and the writing of keys and values into their pages.
#pragma once

#include <stddef.h>

#include "dispatch.h"
#include "pages.h"

namespace octavo {

struct RopeWrite {
  float* qkv;            // [num_rows][(num_heads + 2 · num_kv_heads) · head_dim]: Q and K are rotated in place
  size_t num_heads;
  LayerPages layer;
  StepRows step;
  const float* cos;      // [num_positions][head_dim / 2]
  const float* sin;
  const float* q_norm;   // [head_dim], or null: each head of Q is normalised first
  const float* k_norm;
  float eps;
};

struct RopeKernels {
  // Rows begin … end-1.
  void (*rope_write)(const RopeWrite& args, size_t begin, size_t end);
};

OCTAVO_KERNELS(RopeKernels, rope)

}  // namespace octavo
