// Products of float32 rows with packed weight matrices, and the rows of such a matrix as float32 (embeddings).
//
// The arithmetic, the same bits in every variant and for every number of rows and threads:
//
//   4- and 8-bit weights   Inputs are rounded to int8 in groups of 32: scale = largest / 127, code = round(x · 127 / largest).
//                          For each group, ascending: acc = fma(sum of codes · codes, weight scale · input scale, acc), then,
//                          where the weights have minimums, acc = fma(minimum, input scale · sum of input codes, acc).
//                          Sums of codes are exact integers. Weight groups of 16 split a group's sums in two.
//                          Fine inputs have a scale for each half of 16: the larger is the group's, the other a half, a
//                          quarter … a 128th of it. Codes count as code · factor in units of the finer of the two, so that a
//                          group's sum stays one integer.
//   bf16 weights           Inputs are rounded to bf16. For every 32 inputs the even-numbered and the odd-numbered products
//                          are chains of fma from 0; acc += even + odd. (This is what AMX does: TDPBF16PS in Intel's manual.)
//
// Then bias is added, and after it the residual.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "dispatch.h"
#include "parallel.h"

namespace octavo {

constexpr size_t BLOCK = 16;  // outputs of a block of weights: the lanes of a vector
constexpr size_t GROUP = 32;  // inputs of a group of activations

// How a matrix is packed: blocks of 16 outputs, one after another; missing outputs and inputs are zero. A block is
//
//   codes     for each group of 32 inputs, 4-byte runs of inputs, output by output, which is the operand order of byte dot
//             products and of AMX tiles: 8 bits [group][8 runs][16 outputs][4 inputs]
//             4 bits [group][4 runs][16][4], run j in the low and run j + 4 in the high halves of the bytes
//             bf16 [group][16 pairs][16][2]
//   scales    [group (of the weights)][16], f16 where that holds every value of the matrix, else f32
//   minimums  likewise
struct Format {
  enum Codes { W4, W8, W8_GROUP16, BF16 };
  int codes;
  bool minimum, wide;  // whether there are minimums, and whether scales are f32

  static constexpr int COUNT = 13;
  constexpr int index() const { return codes == BF16 ? 12 : codes * 4 + minimum * 2 + wide; }
};

struct Segment {
  Format format;
  size_t outputs, inputs, groups;  // groups of 32, the last one padded
  size_t num_blocks, block_bytes, scales_at, minimums_at;
  size_t column;  // of its first output among those of the linear
  uint8_t* data;
};

// Matrices joined along their outputs.
struct Linear {
  size_t inputs, outputs, num_blocks;
  bool fine;  // whether inputs of its 4- and 8-bit weights are fine
  size_t num_segments;
  const Segment* segments;
  const float* bias;  // [outputs + 15] or null
};

struct LinearCall {
  enum Epilogue {
    STORE,    // out = product
    ADD,      // out += product
    GATE_UP,  // out = SiLU(first half of the outputs) · second half
  };
  const Linear* linear;
  const float* x;         // [.., inputs]
  const int32_t* gather;  // which rows of x, or null for the first `rows`
  size_t rows;
  const float* norm;  // RMS norm's weight, or null for none
  float eps;
  int epilogue;
  float* out;  // [rows, outputs or outputs / 2]
  bool once = false;  // whether the weights are gone from every cache when they are read again
};

struct LinearKernels {
  size_t (*scratch_bytes)(const Linear& linear, size_t rows, int num_threads);
  void (*run)(const LinearCall& call, void* scratch, Pool& pool);
  // out[i] = row ids[i] of the matrix as stored: scale · code + minimum, rounded twice as the file formats define it.
  void (*embed)(const Linear& table, const int32_t* ids, size_t rows, float* out, Pool& pool);
};

OCTAVO_KERNELS(LinearKernels, linear)

}  // namespace octavo
