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

// Hadamard's transform of each half, in blocks as long as they can be; its own inverse. Level after level, of elements
// that lie 1, 2, 4, … apart, it puts a sum in the place of the first and a difference in that of the second.
#if OCTAVO_LEVEL >= 1
// A level within eight elements, `swapped` being x with partners exchanged; MINUS: the places of second ones.
template <int MINUS>
OCTAVO_INLINE __m256 add_partners(__m256 x, __m256 swapped) {
  return _mm256_blend_ps(_mm256_add_ps(x, swapped), _mm256_sub_ps(swapped, x), MINUS);
}

OCTAVO_INLINE void mix(float* head, size_t dim) {
  const size_t block = dim / 2 & (~(dim / 2) + 1);
  for (size_t d = 0; d < dim; d += 8) {
    __m256 x = _mm256_loadu_ps(head + d);
    x = add_partners<0xaa>(x, _mm256_permute_ps(x, 0xb1));
    x = add_partners<0xcc>(x, _mm256_permute_ps(x, 0x4e));
    x = add_partners<0xf0>(x, _mm256_permute2f128_ps(x, x, 1));
    _mm256_storeu_ps(head + d, x);
  }
  for (size_t step = 8; step < block; step *= 2) {
    for (size_t d = 0; d < dim; d += (d + 8) & step ? 8 + step : 8) {
      const __m256 a = _mm256_loadu_ps(head + d), b = _mm256_loadu_ps(head + d + step);
      _mm256_storeu_ps(head + d, _mm256_add_ps(a, b));
      _mm256_storeu_ps(head + d + step, _mm256_sub_ps(a, b));
    }
  }
#else
OCTAVO_INLINE void mix(float* head, size_t dim) {
  const size_t block = dim / 2 & (~(dim / 2) + 1);
  for (size_t step = 1; step < block; step *= 2) {
    for (size_t d = 0; d < dim; d += (d + 1) & step ? 1 + step : 1) {
      const float a = head[d], b = head[d + step];
      head[d] = a + b;
      head[d + step] = a - b;
    }
  }
#endif
  const f32x16 scale = broadcast(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(block))));
  for (size_t d = 0; d < dim; d += LANES) {
    store(head + d, load(head + d) * scale);
  }
}

template <size_t N>
OCTAVO_INLINE void swap_quarters(float* head, size_t dim) {
  float kept[N];
  for (size_t i = dim / 4; i < dim / 2; i += N) {
    memcpy(kept, head + i, sizeof kept);
    memcpy(head + i, head + i + dim / 4, sizeof kept);
    memcpy(head + i + dim / 4, kept, sizeof kept);
  }
}

// Quarters 0, 2, 1, 3: the pairs that turn fast before those that turn slowly, and back again. In pieces as large as
// those that `mix` reads, if they fit: else it would have to wait until they are written.
OCTAVO_INLINE void swap_quarters(float* head, size_t dim) {
  dim % 32 ? swap_quarters<4>(head, dim) : swap_quarters<8>(head, dim);
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
