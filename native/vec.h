// Sixteen float lanes, the one vector type of every kernel, in each instruction set.
//
// Owns all float arithmetic of the kernels. Every operation gives the same bits in every variant: it is either exactly
// rounded by IEEE 754 or built here from such operations in a fixed order. Lanes never mix except in `sum` and `largest`.
// Everything is in an anonymous namespace, so no two variants can share a copy.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(OCTAVO_EMULATED) && OCTAVO_LEVEL >= 2
#include "emulated.h"
#elif OCTAVO_LEVEL >= 1
#include <immintrin.h>
#endif

#define OCTAVO_INLINE inline __attribute__((always_inline))
#define OCTAVO_UNROLL _Pragma("GCC unroll 16")  // loops over rows and runs, so that arrays live in registers

namespace octavo::OCTAVO_VARIANT {
namespace {

constexpr size_t LANES = 16;

#if OCTAVO_LEVEL >= 1
struct u8x16 {
  __m128i v;
};
#else
struct u8x16 {
  uint8_t v[LANES];
};
#endif

#if OCTAVO_LEVEL >= 2  // ── AVX-512: one register ──────────────────────────────────────────────────────────────────

struct f32x16 {
  __m512 v;
};
struct i32x16 {
  __m512i v;
};

OCTAVO_INLINE f32x16 zero() { return {_mm512_setzero_ps()}; }
OCTAVO_INLINE f32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
OCTAVO_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
OCTAVO_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
OCTAVO_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
OCTAVO_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
OCTAVO_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
OCTAVO_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
OCTAVO_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
OCTAVO_INLINE f32x16 where_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
OCTAVO_INLINE f32x16 where_first(size_t n, f32x16 yes, f32x16 no) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << n) - 1), no.v, yes.v)};
}
OCTAVO_INLINE f32x16 round(f32x16 a) { return {_mm512_roundscale_ps(a.v, 0)}; }
OCTAVO_INLINE f32x16 ceil(f32x16 a) { return {_mm512_roundscale_ps(a.v, 2)}; }
OCTAVO_INLINE i32x16 to_int(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
OCTAVO_INLINE f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
OCTAVO_INLINE i32x16 bits(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
OCTAVO_INLINE f32x16 from_bits(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
OCTAVO_INLINE i32x16 broadcast_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
OCTAVO_INLINE i32x16 load_int(const void* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE i32x16 operator+(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
OCTAVO_INLINE i32x16 operator*(i32x16 a, i32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
OCTAVO_INLINE i32x16 operator&(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
OCTAVO_INLINE i32x16 max(i32x16 a, i32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int N>
OCTAVO_INLINE i32x16 shift_left(i32x16 a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
OCTAVO_INLINE i32x16 shift_right(i32x16 a) {  // logical
  return {_mm512_srli_epi32(a.v, N)};
}
// The low 16 bits of each lane, stored one after another; the low 8 as bytes.
OCTAVO_INLINE void store_low16(void* p, i32x16 a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
OCTAVO_INLINE u8x16 low8(i32x16 a) { return {_mm512_cvtepi32_epi8(a.v)}; }
OCTAVO_INLINE i32x16 load_u16(const void* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
// Thirty-two bytes as int16, two in a lane; and sums of a lane's two products with two others.
OCTAVO_INLINE i32x16 load_pairs(const void* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
OCTAVO_INLINE i32x16 add_products(i32x16 sums, i32x16 a, i32x16 b) { return {_mm512_dpwssd_epi32(sums.v, a.v, b.v)}; }
OCTAVO_INLINE f32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Sixteen float16 in 32-byte registers.
OCTAVO_INLINE f32x16 of_f16(__m256i halves) { return {_mm512_cvtph_ps(halves)}; }
OCTAVO_INLINE f32x16 where_nan(f32x16 a, f32x16 yes, f32x16 no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), no.v, yes.v)};
}

#elif OCTAVO_LEVEL == 1  // ── AVX2: two registers ────────────────────────────────────────────────────────────────────

struct f32x16 {
  __m256 lo, hi;
};
struct i32x16 {
  __m256i lo, hi;
};

OCTAVO_INLINE f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
OCTAVO_INLINE f32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OCTAVO_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OCTAVO_INLINE void store(float* p, f32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
OCTAVO_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
OCTAVO_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
OCTAVO_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
OCTAVO_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
OCTAVO_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
OCTAVO_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
OCTAVO_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
OCTAVO_INLINE f32x16 where_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
OCTAVO_INLINE f32x16 where_first(size_t n, f32x16 yes, f32x16 no) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i count = _mm256_set1_epi32(static_cast<int>(n));
  const __m256i high = _mm256_set1_epi32(static_cast<int>(n) - 8);
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lanes))),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_castsi256_ps(_mm256_cmpgt_epi32(high, lanes)))};
}
OCTAVO_INLINE f32x16 round(f32x16 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
OCTAVO_INLINE f32x16 ceil(f32x16 a) { return {_mm256_ceil_ps(a.lo), _mm256_ceil_ps(a.hi)}; }
OCTAVO_INLINE i32x16 to_int(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
OCTAVO_INLINE f32x16 to_float(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
OCTAVO_INLINE i32x16 bits(f32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
OCTAVO_INLINE f32x16 from_bits(i32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
OCTAVO_INLINE i32x16 broadcast_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
OCTAVO_INLINE i32x16 load_int(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
OCTAVO_INLINE i32x16 operator+(i32x16 a, i32x16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
OCTAVO_INLINE i32x16 operator*(i32x16 a, i32x16 b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
OCTAVO_INLINE i32x16 operator&(i32x16 a, i32x16 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
OCTAVO_INLINE i32x16 max(i32x16 a, i32x16 b) {
  return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
}
template <int N>
OCTAVO_INLINE i32x16 shift_left(i32x16 a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N>
OCTAVO_INLINE i32x16 shift_right(i32x16 a) {  // logical
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
// The low 16 bits of each lane, stored one after another; the low 8 as bytes.
OCTAVO_INLINE void store_low16(void* p, i32x16 a) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0b11'01'10'00));
}
OCTAVO_INLINE u8x16 low8(i32x16 a) {
  const __m256i mask = _mm256_set1_epi32(0xff);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask));
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0b11'01'10'00);
  return {_mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1))};
}
OCTAVO_INLINE i32x16 load_u16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
OCTAVO_INLINE i32x16 load_pairs(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(q)), _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1))};
}
OCTAVO_INLINE i32x16 add_products(i32x16 sums, i32x16 a, i32x16 b) {
  return {_mm256_add_epi32(sums.lo, _mm256_madd_epi16(a.lo, b.lo)),
          _mm256_add_epi32(sums.hi, _mm256_madd_epi16(a.hi, b.hi))};
}
OCTAVO_INLINE f32x16 load_f16(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
OCTAVO_INLINE f32x16 of_f16(__m256i halves) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
OCTAVO_INLINE f32x16 where_nan(f32x16 a, f32x16 yes, f32x16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))};
}

#else  // ── any machine: arrays ────────────────────────────────────────────────────────────────────────────────────────

struct f32x16 {
  float v[LANES];
};
struct i32x16 {
  int32_t v[LANES];
};

#define OCTAVO_LANEWISE(type, expression) \
  type out;                               \
  for (size_t i = 0; i < LANES; ++i) {    \
    out.v[i] = expression;                \
  }                                       \
  return out

OCTAVO_INLINE f32x16 zero() { return {}; }
OCTAVO_INLINE f32x16 broadcast(float x) { OCTAVO_LANEWISE(f32x16, x); }
OCTAVO_INLINE f32x16 load(const float* p) { OCTAVO_LANEWISE(f32x16, p[i]); }
OCTAVO_INLINE void store(float* p, f32x16 a) { memcpy(p, a.v, sizeof a.v); }
OCTAVO_INLINE f32x16 operator+(f32x16 a, f32x16 b) { OCTAVO_LANEWISE(f32x16, a.v[i] + b.v[i]); }
OCTAVO_INLINE f32x16 operator-(f32x16 a, f32x16 b) { OCTAVO_LANEWISE(f32x16, a.v[i] - b.v[i]); }
OCTAVO_INLINE f32x16 operator*(f32x16 a, f32x16 b) { OCTAVO_LANEWISE(f32x16, a.v[i] * b.v[i]); }
OCTAVO_INLINE f32x16 operator/(f32x16 a, f32x16 b) { OCTAVO_LANEWISE(f32x16, a.v[i] / b.v[i]); }
OCTAVO_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  OCTAVO_LANEWISE(f32x16, __builtin_fmaf(a.v[i], b.v[i], c.v[i]));
}
OCTAVO_INLINE f32x16 max(f32x16 a, f32x16 b) { OCTAVO_LANEWISE(f32x16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
OCTAVO_INLINE f32x16 min(f32x16 a, f32x16 b) { OCTAVO_LANEWISE(f32x16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
OCTAVO_INLINE f32x16 where_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
  OCTAVO_LANEWISE(f32x16, a.v[i] < b.v[i] ? yes.v[i] : no.v[i]);
}
OCTAVO_INLINE f32x16 where_first(size_t n, f32x16 yes, f32x16 no) {
  OCTAVO_LANEWISE(f32x16, i < n ? yes.v[i] : no.v[i]);
}
OCTAVO_INLINE f32x16 round(f32x16 a) { OCTAVO_LANEWISE(f32x16, __builtin_nearbyintf(a.v[i])); }
OCTAVO_INLINE f32x16 ceil(f32x16 a) { OCTAVO_LANEWISE(f32x16, __builtin_ceilf(a.v[i])); }
OCTAVO_INLINE i32x16 to_int(f32x16 a) { OCTAVO_LANEWISE(i32x16, static_cast<int32_t>(__builtin_lrintf(a.v[i]))); }
OCTAVO_INLINE f32x16 to_float(i32x16 a) { OCTAVO_LANEWISE(f32x16, static_cast<float>(a.v[i])); }
OCTAVO_INLINE i32x16 bits(f32x16 a) {
  i32x16 out;
  memcpy(out.v, a.v, sizeof out.v);
  return out;
}
OCTAVO_INLINE f32x16 from_bits(i32x16 a) {
  f32x16 out;
  memcpy(out.v, a.v, sizeof out.v);
  return out;
}
OCTAVO_INLINE i32x16 broadcast_int(int32_t x) { OCTAVO_LANEWISE(i32x16, x); }
OCTAVO_INLINE i32x16 load_int(const void* p) {
  i32x16 out;
  memcpy(out.v, p, sizeof out.v);
  return out;
}
OCTAVO_INLINE i32x16 operator+(i32x16 a, i32x16 b) {
  OCTAVO_LANEWISE(i32x16, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i])));
}
OCTAVO_INLINE i32x16 operator*(i32x16 a, i32x16 b) {  // the low halves of the products
  OCTAVO_LANEWISE(i32x16, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) * static_cast<uint32_t>(b.v[i])));
}
OCTAVO_INLINE i32x16 operator&(i32x16 a, i32x16 b) { OCTAVO_LANEWISE(i32x16, a.v[i] & b.v[i]); }
OCTAVO_INLINE i32x16 max(i32x16 a, i32x16 b) { OCTAVO_LANEWISE(i32x16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
template <int N>
OCTAVO_INLINE i32x16 shift_left(i32x16 a) {
  OCTAVO_LANEWISE(i32x16, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N));
}
template <int N>
OCTAVO_INLINE i32x16 shift_right(i32x16 a) {  // logical
  OCTAVO_LANEWISE(i32x16, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> N));
}
// The low 16 bits of each lane, stored one after another; the low 8 as bytes.
OCTAVO_INLINE void store_low16(void* p, i32x16 a) {
  for (size_t i = 0; i < LANES; ++i) {
    const uint16_t half = static_cast<uint16_t>(a.v[i]);
    memcpy(static_cast<char*>(p) + 2 * i, &half, 2);
  }
}
OCTAVO_INLINE u8x16 low8(i32x16 a) { OCTAVO_LANEWISE(u8x16, static_cast<uint8_t>(a.v[i])); }
OCTAVO_INLINE i32x16 load_u16(const void* p) {
  uint16_t half[LANES];
  memcpy(half, p, sizeof half);
  OCTAVO_LANEWISE(i32x16, half[i]);
}
OCTAVO_INLINE i32x16 load_pairs(const void* p) {
  const int8_t* q = static_cast<const int8_t*>(p);
  OCTAVO_LANEWISE(i32x16, static_cast<int32_t>(static_cast<uint16_t>(q[2 * i]) | static_cast<uint32_t>(q[2 * i + 1]) << 16));
}
OCTAVO_INLINE i32x16 add_products(i32x16 sums, i32x16 a, i32x16 b) {
  OCTAVO_LANEWISE(i32x16, sums.v[i] + static_cast<int16_t>(a.v[i]) * static_cast<int16_t>(b.v[i]) +
                              (a.v[i] >> 16) * (b.v[i] >> 16));
}
OCTAVO_INLINE f32x16 where_nan(f32x16 a, f32x16 yes, f32x16 no) {
  OCTAVO_LANEWISE(f32x16, a.v[i] != a.v[i] ? yes.v[i] : no.v[i]);
}
OCTAVO_INLINE float float_of_f16(uint32_t half) {
  // Exponent and mantissa moved into place are the value times 2^-112, exactly, except for infinities and NaN.
  uint32_t word = (half & 0x7fff) << 13;
  if ((half & 0x7c00) == 0x7c00) {
    word |= 0x7f800000;
  } else {
    float magnitude;
    if ((half & 0x7c00) == 0) {  // subnormal, computed without a subnormal float: units of 2^-24
      magnitude = static_cast<float>(half & 0x3ff) * 0x1p-24f;
    } else {
      memcpy(&magnitude, &word, 4);
      magnitude *= 0x1p112f;
    }
    memcpy(&word, &magnitude, 4);
  }
  word |= (half & 0x8000) << 16;
  float out;
  memcpy(&out, &word, 4);
  return out;
}
OCTAVO_INLINE f32x16 load_f16(const uint16_t* p) { OCTAVO_LANEWISE(f32x16, float_of_f16(p[i])); }

#endif

// ── numbers of a byte or less: see kv_format.py ───────────────────────────────────────────────────────────────────────

#if OCTAVO_LEVEL >= 1
OCTAVO_INLINE __m128i load_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
OCTAVO_INLINE f32x16 load_e5m2(const void* p) { return of_f16(_mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(p)), 8)); }
OCTAVO_INLINE f32x16 load_e4m3(const void* p) {  // times 2^-8: the sign, a zero, and the other bits
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(p)), 7);
  return of_f16(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0xbfff))));
}
OCTAVO_INLINE __m256i side_by_side(__m128i a, __m128i b) { return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1); }
OCTAVO_INLINE __m256i low_nibbles(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
OCTAVO_INLINE __m256i levels_of(__m256i nibbles, const int8_t* table) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_bytes(table)), nibbles);
}
OCTAVO_INLINE void store_bytes(void* p, __m256i bytes) { _mm256_storeu_si256(static_cast<__m256i*>(p), bytes); }
// Added one by one. How many of some bounds each byte is above, both with a sign. table[nibble].
OCTAVO_INLINE u8x16 operator+(u8x16 a, u8x16 b) { return {_mm_add_epi8(a.v, b.v)}; }
template <size_t COUNT>
OCTAVO_INLINE u8x16 count_above(u8x16 bytes, const int8_t (*bounds)[LANES]) {
  __m128i sum = _mm_setzero_si128();
  OCTAVO_UNROLL
  for (size_t k = 0; k < COUNT; ++k) {
    sum = _mm_sub_epi8(sum, _mm_cmpgt_epi8(bytes.v, load_bytes(bounds[k])));
  }
  return {sum};
}
OCTAVO_INLINE u8x16 look_up(u8x16 nibbles, const int8_t* table) { return {_mm_shuffle_epi8(load_bytes(table), nibbles.v)}; }
OCTAVO_INLINE void store(void* p, u8x16 a) { _mm_storeu_si128(static_cast<__m128i*>(p), a.v); }
#if OCTAVO_LEVEL >= 2
OCTAVO_INLINE f32x16 signed_float(u8x16 a) { return to_float({_mm512_cvtepi8_epi32(a.v)}); }
#else
OCTAVO_INLINE f32x16 signed_float(u8x16 a) {
  return to_float({_mm256_cvtepi8_epi32(a.v), _mm256_cvtepi8_epi32(_mm_srli_si128(a.v, 8))});
}
#endif
// Negative where a byte of `signs` is.
OCTAVO_INLINE __m256i with_signs(__m256i sizes, __m256i signs) {
  return _mm256_sign_epi8(sizes, _mm256_or_si256(signs, _mm256_set1_epi8(1)));
}
// table[nibble] of four rows of sixteen bytes, as rows of pairs, low halves first. With SIGNED, a bit of sixteen other
// bytes says which are negative: bits 0 and 1 those of the first row.
template <bool SIGNED>
OCTAVO_INLINE void spread_keys(const uint8_t* items, size_t row, const uint8_t* signs, const int8_t* table, uint8_t* to) {
  const auto spread = [&](size_t first, __m256i low_signs, __m256i high_signs) {
    // Halves of both rows lie together, so that interleaved bytes are one row's.
    const __m256i bytes = _mm256_permute4x64_epi64(
        side_by_side(load_bytes(items + first * row), load_bytes(items + (first + 1) * row)), 0b11'01'10'00);
    __m256i low = levels_of(low_nibbles(bytes), table);
    __m256i high = levels_of(low_nibbles(_mm256_srli_epi16(bytes, 4)), table);
    if constexpr (SIGNED) {
      low = with_signs(low, low_signs);
      high = with_signs(high, high_signs);
    }
    store_bytes(to + first * 32, _mm256_unpacklo_epi8(low, high));
    store_bytes(to + (first + 1) * 32, _mm256_unpackhi_epi8(low, high));
  };
  __m256i at = _mm256_setzero_si256();
  if constexpr (SIGNED) {  // the bits of rows 0 and 1, or of 2 and 3, lie two apart
    at = _mm256_permute4x64_epi64(_mm256_castsi128_si256(load_bytes(signs)), 0b01'01'00'00);
    at = _mm256_sllv_epi64(at, _mm256_setr_epi64x(2, 0, 2, 0));
  }
  spread(0, _mm256_slli_epi16(at, 5), _mm256_slli_epi16(at, 4));
  spread(2, _mm256_slli_epi16(at, 1), at);
}
// table[nibble] of eight bytes of two tokens, low halves first, as pairs.
OCTAVO_INLINE void spread_values(const uint8_t* first, const uint8_t* second, const int8_t* table, uint8_t* to) {
  const __m128i bytes = _mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first)),
                                          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second)));
  store_bytes(to, levels_of(low_nibbles(side_by_side(bytes, _mm_srli_epi16(bytes, 4))), table));
}
#else
OCTAVO_INLINE u8x16 operator+(u8x16 a, u8x16 b) { OCTAVO_LANEWISE(u8x16, static_cast<uint8_t>(a.v[i] + b.v[i])); }
template <size_t COUNT>
OCTAVO_INLINE u8x16 count_above(u8x16 bytes, const int8_t (*bounds)[LANES]) {
  u8x16 sum = {};
  for (size_t k = 0; k < COUNT; ++k) {
    for (size_t i = 0; i < LANES; ++i) {
      sum.v[i] = static_cast<uint8_t>(sum.v[i] + (static_cast<int8_t>(bytes.v[i]) > bounds[k][i]));
    }
  }
  return sum;
}
OCTAVO_INLINE u8x16 look_up(u8x16 nibbles, const int8_t* table) {
  OCTAVO_LANEWISE(u8x16, static_cast<uint8_t>(table[nibbles.v[i]]));
}
OCTAVO_INLINE void store(void* p, u8x16 a) { memcpy(p, a.v, sizeof a.v); }
OCTAVO_INLINE f32x16 signed_float(u8x16 a) { OCTAVO_LANEWISE(f32x16, static_cast<int8_t>(a.v[i])); }
OCTAVO_INLINE uint8_t byte_at(const void* p, size_t i) { return static_cast<const uint8_t*>(p)[i]; }
OCTAVO_INLINE f32x16 load_e5m2(const void* p) { OCTAVO_LANEWISE(f32x16, float_of_f16(byte_at(p, i) << 8)); }
OCTAVO_INLINE f32x16 load_e4m3(const void* p) {
  OCTAVO_LANEWISE(f32x16, float_of_f16((byte_at(p, i) & 0x80u) << 8 | (byte_at(p, i) & 0x7fu) << 7));
}
template <bool SIGNED>
OCTAVO_INLINE void spread_keys(const uint8_t* items, size_t row, const uint8_t* signs, const int8_t* table, uint8_t* to) {
  for (size_t i = 0; i < 4 * LANES; ++i) {
    const size_t word = i / LANES, token = i % LANES;
    for (size_t half = 0; half < 2; ++half) {
      const int level = table[items[word * row + token] >> (4 * half) & 15];
      to[2 * i + half] = static_cast<uint8_t>(SIGNED && signs[token] >> (2 * word + half) & 1 ? -level : level);
    }
  }
}
OCTAVO_INLINE void spread_values(const uint8_t* first, const uint8_t* second, const int8_t* table, uint8_t* to) {
  for (size_t i = 0; i < LANES; ++i) {
    to[2 * i] = static_cast<uint8_t>(table[first[i % 8] >> (i / 8 * 4) & 15]);
    to[2 * i + 1] = static_cast<uint8_t>(table[second[i % 8] >> (i / 8 * 4) & 15]);
  }
}
#endif

// ── the same for all ──────────────────────────────────────────────────────────────────────────────────────────────────
//
// max(a, b) is a > b ? a : b and min(a, b) is a < b ? a : b: where either is NaN the result is b.

// The first n lanes of memory, `fill` in the others; memory past them is not touched.
OCTAVO_INLINE f32x16 load_first(const float* p, size_t n, float fill = 0.0f) {
  float lanes[LANES];
  for (size_t i = 0; i < LANES; ++i) {
    lanes[i] = i < n ? p[i] : fill;
  }
  return load(lanes);
}

OCTAVO_INLINE void store_first(float* p, size_t n, f32x16 a) {
  if (n >= LANES) {
    store(p, a);
    return;
  }
  float lanes[LANES];
  store(lanes, a);
  memcpy(p, lanes, n * sizeof(float));
}

// Two int16 in every lane.
OCTAVO_INLINE i32x16 broadcast_pair(const int16_t* p) {
  int32_t pair;
  memcpy(&pair, p, sizeof pair);
  return broadcast_int(pair);
}

OCTAVO_INLINE f32x16 load_bf16(const uint16_t* p) { return from_bits(shift_left<16>(load_u16(p))); }

// Sixteen pairs of bf16, first and second of each: the operand order of bf16 dot products.
OCTAVO_INLINE f32x16 first_of_pairs(i32x16 pairs) { return from_bits(shift_left<16>(pairs)); }
OCTAVO_INLINE f32x16 second_of_pairs(i32x16 pairs) {
  return from_bits(pairs & broadcast_int(static_cast<int32_t>(0xffff0000)));
}

// Rounded to bf16, to nearest even, in the low half of each lane; NaN stays NaN.
OCTAVO_INLINE i32x16 to_bf16(f32x16 a) {
  const i32x16 word = bits(a);
  const i32x16 odd = shift_right<16>(word) & broadcast_int(1);
  const i32x16 rounded = shift_right<16>(word + odd + broadcast_int(0x7fff));
  return bits(where_nan(a, from_bits(broadcast_int(0x7fc0)), from_bits(rounded)));
}
OCTAVO_INLINE void store_bf16(uint16_t* p, f32x16 a) { store_low16(p, to_bf16(a)); }

OCTAVO_INLINE f32x16 magnitude(f32x16 a) { return from_bits(bits(a) & broadcast_int(0x7fffffff)); }

// Lane i + lane i+8, then +4, +2, +1.
OCTAVO_INLINE float sum(f32x16 a) {
#if OCTAVO_LEVEL >= 2
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v),
                                     _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
#elif OCTAVO_LEVEL == 1
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
#endif
#if OCTAVO_LEVEL >= 1
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  for (size_t n = LANES / 2; n; n /= 2) {
    for (size_t i = 0; i < n; ++i) {
      a.v[i] = a.v[i] + a.v[i + n];
    }
  }
  return a.v[0];
#endif
}

// The largest lane (exact, so in any order; NaN is not propagated).
OCTAVO_INLINE float largest(f32x16 a) {
#if OCTAVO_LEVEL >= 2
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v),
                                     _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
#elif OCTAVO_LEVEL == 1
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
#endif
#if OCTAVO_LEVEL >= 1
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  for (size_t n = LANES / 2; n; n /= 2) {
    for (size_t i = 0; i < n; ++i) {
      a.v[i] = a.v[i] > a.v[i + n] ? a.v[i] : a.v[i + n];
    }
  }
  return a.v[0];
#endif
}

// The largest lane of non-negative floats given as their bits, NaN included: it counts as larger than infinity.
OCTAVO_INLINE float largest_magnitude(i32x16 a) {
#if OCTAVO_LEVEL >= 2
  const __m256i eight = _mm256_max_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti64x4_epi64(a.v, 1));
#elif OCTAVO_LEVEL == 1
  const __m256i eight = _mm256_max_epi32(a.lo, a.hi);
#endif
  int32_t word;
#if OCTAVO_LEVEL >= 1
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b01'00'11'10));
  word = _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
#else
  word = a.v[0];
  for (size_t i = 1; i < LANES; ++i) {
    word = word > a.v[i] ? word : a.v[i];
  }
#endif
  float out;
  memcpy(&out, &word, 4);
  return out;
}

// e^x within 2 ulp: 0 below -87.3, capped above 88.37, NaN stays NaN. x = n·ln 2 + r; a polynomial in r, times 2^n.
OCTAVO_INLINE f32x16 exp(f32x16 x) {
  const f32x16 lowest = broadcast(-87.3f);
  const f32x16 inside = max(lowest, min(broadcast(88.37f), x));
  const f32x16 n = round(inside * broadcast(1.44269504f));
  f32x16 r = fma(n, broadcast(-0.693359375f), inside);  // exact: the constant has few bits
  r = fma(n, broadcast(2.12194440e-4f), r);
  f32x16 p = broadcast(1.9875691500e-4f);  // Cephes expf
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r + broadcast(1.0f));
  const f32x16 scaled = from_bits(bits(p) + shift_left<23>(to_int(n)));
  return where_less(x, lowest, zero(), scaled);
}

// x / (1 + e^-x)
OCTAVO_INLINE f32x16 silu(f32x16 x) { return x / (broadcast(1.0f) + exp(zero() - x)); }

}  // namespace
}  // namespace octavo::OCTAVO_VARIANT
