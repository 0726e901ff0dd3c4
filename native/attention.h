// Causal attention over paged keys and values.
#pragma once

#include <stddef.h>

#include "dispatch.h"
#include "pages.h"

namespace octavo {

struct Attention {
  const float* qkv;  // [num_rows][(num_heads + 2 · num_kv_heads) · head_dim], rotated
  float* out;        // [num_rows][num_heads · head_dim]
  size_t num_heads;
  LayerPages layer;  // block_size 4, 8 or a multiple of 16; head_dim a multiple of 16
  StepRows step;
  size_t window;     // tokens that a row sees, its own included; 0: all
  size_t num_threads;
  float* scratch;    // scratch_floats, aligned to 64 bytes
};

struct AttentionKernels {
  // What the threads need together. Little of it is touched unless a very long context is divided between them.
  size_t (*scratch_floats)(const Attention& args);
  // The share of one thread.
  void (*attend)(const Attention& args, size_t thread);
  // To be called once, when all threads have done their shares.
  void (*finish)(const Attention& args);
};

OCTAVO_KERNELS(AttentionKernels, attention)

}  // namespace octavo
