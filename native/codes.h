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
// that lie 1, 2, 4, … apart, it puts a sum in the place of the first and a difference in that of the second. Quarters are
// put in the order 0, 2, 1, 3 besides, so that the pairs that turn fast come before those that turn slowly.
#if OCTAVO_LEVEL >= 1
// A level within eight elements, `swapped` being x with partners exchanged; MINUS: the places of second ones.
template <int MINUS>
OCTAVO_INLINE __m256 add_partners(__m256 x, __m256 swapped) {
  return _mm256_blend_ps(_mm256_add_ps(x, swapped), _mm256_sub_ps(swapped, x), MINUS);
}

// Where the number at d is, if quarters of this size change places. Of size 0: d.
OCTAVO_INLINE size_t swapped(size_t d, size_t quarter) {
  return d >= quarter && d < 2 * quarter ? d + quarter : d >= 2 * quarter && d < 3 * quarter ? d - quarter : d;
}

// In blocks of W · 8, each in registers, from and to places that are swapped or not.
template <size_t W>
void mix(const float* from, size_t from_quarter, float* to, size_t to_quarter, size_t dim) {
  const __m256 scale = _mm256_set1_ps(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(8 * W))));
  for (size_t d = 0; d < dim; d += 8 * W) {
    __m256 x[W];
    OCTAVO_UNROLL
    for (size_t i = 0; i < W; ++i) {
      const __m256 a = _mm256_loadu_ps(from + swapped(d + 8 * i, from_quarter));
      const __m256 b = add_partners<0xaa>(a, _mm256_permute_ps(a, 0xb1));
      const __m256 c = add_partners<0xcc>(b, _mm256_permute_ps(b, 0x4e));
      x[i] = add_partners<0xf0>(c, _mm256_permute2f128_ps(c, c, 1));
    }
    OCTAVO_UNROLL
    for (size_t step = 1; step < W; step *= 2) {
      OCTAVO_UNROLL
      for (size_t i = 0; i < W; ++i) {
        if (!(i & step)) {
          const __m256 a = x[i], b = x[i + step];
          x[i] = _mm256_add_ps(a, b);
          x[i + step] = _mm256_sub_ps(a, b);
        }
      }
    }
    OCTAVO_UNROLL
    for (size_t i = 0; i < W; ++i) {
      _mm256_storeu_ps(to + swapped(d + 8 * i, to_quarter), _mm256_mul_ps(x[i], scale));
    }
  }
}

inline void mix(const float* from, size_t from_quarter, float* to, size_t to_quarter, size_t dim) {
  switch (dim / 2 & (~(dim / 2) + 1)) {
    case 8: return mix<1>(from, from_quarter, to, to_quarter, dim);
    case 16: return mix<2>(from, from_quarter, to, to_quarter, dim);
    case 32: return mix<4>(from, from_quarter, to, to_quarter, dim);
    case 64: return mix<8>(from, from_quarter, to, to_quarter, dim);
    default: return mix<16>(from, from_quarter, to, to_quarter, dim);
  }
}

constexpr size_t PIECE = 8;  // that `mix` reads
#else
inline void mix(const float* from, size_t, float* to, size_t, size_t dim) {
  const size_t block = dim / 2 & (~(dim / 2) + 1);
  memmove(to, from, dim * sizeof(float));
  for (size_t step = 1; step < block; step *= 2) {
    for (size_t d = 0; d < dim; d += (d + 1) & step ? 1 + step : 1) {
      const float a = to[d], b = to[d + step];
      to[d] = a + b;
      to[d + step] = a - b;
    }
  }
  const f32x16 scale = broadcast(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(block))));
  for (size_t d = 0; d < dim; d += LANES) {
    store(to + d, load(to + d) * scale);
  }
}

constexpr size_t PIECE = MAX_HEAD_DIM;  // it knows of no quarters
#endif

inline void copy_swapped(const float* from, float* to, size_t dim) {
  const size_t quarter = dim / 4, bytes = quarter * sizeof(float);
  memcpy(to, from, bytes);
  memcpy(to + quarter, from + 2 * quarter, bytes);
  memcpy(to + 2 * quarter, from + quarter, bytes);
  memcpy(to + 3 * quarter, from + 3 * quarter, bytes);
}

// A head as its codes have it, and back again. `from` is another place than `to`.
inline void turn(const float* from, float* to, size_t dim) {
  if (dim / 4 % PIECE == 0) {
    return mix(from, dim / 4, to, 0, dim);
  }
  copy_swapped(from, to, dim);
  mix(to, 0, to, 0, dim);
}

inline void turn_back(const float* from, float* to, size_t dim) {
  if (dim / 4 % PIECE == 0) {
    return mix(from, 0, to, dim / 4, dim);
  }
  float mixed[MAX_HEAD_DIM];
  mix(from, 0, mixed, 0, dim);
  copy_swapped(mixed, to, dim);
}

// ── whole numbers ─────────────────────────────────────────────────────────────────────────────────────────────────

// Rounds numbers to int16, the largest to 32,767, and returns the unit: 0 where all are so small that they do not count,
// NaN where any is not finite. Sums of products with bytes are whole numbers then, exact in any order.
OCTAVO_INLINE float round16(const float* numbers, size_t count, int16_t* rounded) {
  i32x16 most = broadcast_int(0);
  for (size_t i = 0; i < count; i += LANES) {
    most = max(most, bits(magnitude(load(numbers + i))));
  }
  const float largest = largest_magnitude(most);
  if (!(largest < __builtin_inff())) {
    memset(rounded, 0, count * sizeof(int16_t));
    return __builtin_nanf("");
  }
  const bool counts = largest > 0x1p-100f;
  const f32x16 inverse = broadcast(counts ? 32767.0f / largest : 0.0f);
  for (size_t i = 0; i < count; i += LANES) {
    store_low16(rounded + i, to_int(load(numbers + i) * inverse));
  }
  return counts ? largest * (1.0f / 32767.0f) : 0.0f;
}

}  // namespace
}  // namespace octavo::OCTAVO_VARIANT
