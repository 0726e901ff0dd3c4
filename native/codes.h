// Numbers of a byte or less: what codes stand for, and how heads are rotated. The specification is ops/codes.py.
#pragma once

#include "pages.h"
#include "vec.h"

namespace octavo::OCTAVO_VARIANT {
namespace {

constexpr size_t MAX_HEAD_DIM = 256;

// Magnitudes that codes of 4 bits stand for; bit 3 is the sign. Of 5 bits, the sign lies apart.
constexpr int8_t V_LEVELS[16] = {6, 18, 31, 44, 58, 75, 96, 127, -6, -18, -31, -44, -58, -75, -96, -127};
constexpr int8_t FAST_LEVELS[16] = {4, 11, 18, 26, 35, 45, 58, 76, -4, -11, -18, -26, -35, -45, -58, -76};
constexpr int8_t SLOW_LEVELS[16] = {3, 8, 14, 19, 25, 31, 37, 43, 50, 57, 64, 73, 82, 93, 107, 127};

// ── rotation ──────────────────────────────────────────────────────────────────────────────────────────────────────

// One level of Hadamard's transform of blocks: sums of neighbours, then their differences. As often as a block has bits,
// it is the whole transform, in order.
OCTAVO_INLINE void add_neighbours(const float* __restrict from, float* __restrict to, size_t dim, size_t block) {
  for (size_t start = 0; start < dim; start += block) {
    for (size_t i = 0; i < block / 2; ++i) {
      const float a = from[start + 2 * i], b = from[start + 2 * i + 1];
      to[start + i] = a + b;
      to[start + block / 2 + i] = a - b;
    }
  }
}

// Hadamard's transform of each half, in blocks as long as they can be; its own inverse.
OCTAVO_INLINE void mix(float* head, size_t dim) {
  const size_t block = dim / 2 & (~(dim / 2) + 1);
  float other[MAX_HEAD_DIM];
  float *from = head, *to = other;
  for (size_t step = 1; step < block; step *= 2) {
    add_neighbours(from, to, dim, block);
    to = from;
    from = from == head ? other : head;
  }
  const f32x16 scale = broadcast(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(block))));
  for (size_t d = 0; d < dim; d += LANES) {
    store(head + d, load(from + d) * scale);
  }
}

// Quarters 0, 2, 1, 3: the pairs that turn fast before those that turn slowly, and back again.
OCTAVO_INLINE void swap_quarters(float* head, size_t dim) {
  for (size_t i = dim / 4; i < dim / 2; ++i) {
    const float kept = head[i];
    head[i] = head[i + dim / 4];
    head[i + dim / 4] = kept;
  }
}

OCTAVO_INLINE void turn(float* head, size_t dim) {
  swap_quarters(head, dim);
  mix(head, dim);
}

OCTAVO_INLINE void turn_back(float* head, size_t dim) {
  mix(head, dim);
  swap_quarters(head, dim);
}

}  // namespace
}  // namespace octavo::OCTAVO_VARIANT
