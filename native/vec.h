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
OCTAVO_INLINE i32x16 to_int(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
OCTAVO_INLINE f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
OCTAVO_INLINE i32x16 bits(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
OCTAVO_INLINE f32x16 from_bits(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
OCTAVO_INLINE i32x16 broadcast_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
OCTAVO_INLINE i32x16 load_int(const void* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE void store_int(void* p, i32x16 a) { _mm512_storeu_si512(p, a.v); }
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
// The low 16 (or 8) bits of each lane, stored one after another.
OCTAVO_INLINE void store_low16(void* p, i32x16 a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
OCTAVO_INLINE void store_low8(void* p, i32x16 a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
OCTAVO_INLINE i32x16 load_u16(const void* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
OCTAVO_INLINE i32x16 load_i8(const void* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
OCTAVO_INLINE f32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Sixteen float16 in 32-byte registers.
OCTAVO_INLINE f32x16 of_f16(__m256i halves) { return {_mm512_cvtph_ps(halves)}; }
OCTAVO_INLINE f32x16 of_i8(__m128i codes) { return to_float({_mm512_cvtepi8_epi32(codes)}); }
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
OCTAVO_INLINE i32x16 to_int(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
OCTAVO_INLINE f32x16 to_float(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
OCTAVO_INLINE i32x16 bits(f32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
OCTAVO_INLINE f32x16 from_bits(i32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
OCTAVO_INLINE i32x16 broadcast_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
OCTAVO_INLINE i32x16 load_int(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
OCTAVO_INLINE void store_int(void* p, i32x16 a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, a.hi);
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
// The low 16 (or 8) bits of each lane, stored one after another.
OCTAVO_INLINE void store_low16(void* p, i32x16 a) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0b11'01'10'00));
}
OCTAVO_INLINE void store_low8(void* p, i32x16 a) {
  const __m256i mask = _mm256_set1_epi32(0xff);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask));
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0b11'01'10'00);
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
OCTAVO_INLINE i32x16 load_u16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
OCTAVO_INLINE i32x16 load_i8(const void* p) {
  const __m128i codes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(codes), _mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8))};
}
OCTAVO_INLINE f32x16 load_f16(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
OCTAVO_INLINE f32x16 of_f16(__m256i halves) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
OCTAVO_INLINE f32x16 of_i8(__m128i codes) {
  return to_float({_mm256_cvtepi8_epi32(codes), _mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8))});
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
OCTAVO_INLINE void store_int(void* p, i32x16 a) { memcpy(p, a.v, sizeof a.v); }
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
// The low 16 (or 8) bits of each lane, stored one after another.
OCTAVO_INLINE void store_low16(void* p, i32x16 a) {
  for (size_t i = 0; i < LANES; ++i) {
    const uint16_t half = static_cast<uint16_t>(a.v[i]);
    memcpy(static_cast<char*>(p) + 2 * i, &half, 2);
  }
}
OCTAVO_INLINE void store_low8(void* p, i32x16 a) {
  for (size_t i = 0; i < LANES; ++i) {
    static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(a.v[i]);
  }
}
OCTAVO_INLINE i32x16 load_u16(const void* p) {
  uint16_t half[LANES];
  memcpy(half, p, sizeof half);
  OCTAVO_LANEWISE(i32x16, half[i]);
}
OCTAVO_INLINE i32x16 load_i8(const void* p) { OCTAVO_LANEWISE(i32x16, static_cast<const int8_t*>(p)[i]); }
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
#if OCTAVO_LEVEL >= 2
OCTAVO_INLINE f32x16 load_codes(const void* p) { return of_i8(load_bytes(p)); }
#else
OCTAVO_INLINE f32x16 load_codes(const void* p) {  // two loads that widen, where one would take a shift more
  const __m128i* q = static_cast<const __m128i*>(p);
  const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const char*>(p) + 8));
  return to_float({_mm256_cvtepi8_epi32(_mm_loadl_epi64(q)), _mm256_cvtepi8_epi32(high)});
}
#endif
OCTAVO_INLINE f32x16 load_e5m2(const void* p) { return of_f16(_mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(p)), 8)); }
OCTAVO_INLINE f32x16 load_e4m3(const void* p) {  // times 2^-8: the sign, a zero, and the other bits
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(p)), 7);
  return of_f16(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0xbfff))));
}
OCTAVO_INLINE __m128i low_nibbles(__m128i bytes) { return _mm_and_si128(bytes, _mm_set1_epi8(15)); }
OCTAVO_INLINE __m128i high_nibbles(__m128i bytes) { return low_nibbles(_mm_srli_epi16(bytes, 4)); }
// table[nibble] of the low (or high) halves of sixteen bytes.
OCTAVO_INLINE f32x16 load_low_nibbles(const void* p, const int8_t* table) {
  return of_i8(_mm_shuffle_epi8(load_bytes(table), low_nibbles(load_bytes(p))));
}
OCTAVO_INLINE f32x16 load_high_nibbles(const void* p, const int8_t* table) {
  return of_i8(_mm_shuffle_epi8(load_bytes(table), high_nibbles(load_bytes(p))));
}
// Negative where this bit of sixteen other bytes is set.
OCTAVO_INLINE __m128i with_signs(__m128i sizes, const void* signs, int bit) {
  const __m128i at = _mm_set1_epi8(static_cast<char>(1 << bit));
  const __m128i minus = _mm_cmpeq_epi8(_mm_and_si128(load_bytes(signs), at), at);
  return _mm_sub_epi8(_mm_xor_si128(sizes, minus), minus);
}
OCTAVO_INLINE f32x16 load_low_nibbles(const void* p, const int8_t* table, const void* signs, int bit) {
  return of_i8(with_signs(_mm_shuffle_epi8(load_bytes(table), low_nibbles(load_bytes(p))), signs, bit));
}
OCTAVO_INLINE f32x16 load_high_nibbles(const void* p, const int8_t* table, const void* signs, int bit) {
  return of_i8(with_signs(_mm_shuffle_epi8(load_bytes(table), high_nibbles(load_bytes(p))), signs, bit));
}
// table[nibble] of the low halves of eight bytes, then of the high halves.
OCTAVO_INLINE f32x16 load_nibbles(const void* p, const int8_t* table) {
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(p));
  return of_i8(_mm_shuffle_epi8(load_bytes(table), _mm_unpacklo_epi64(low_nibbles(bytes), high_nibbles(bytes))));
}
#else
OCTAVO_INLINE uint8_t byte_at(const void* p, size_t i) { return static_cast<const uint8_t*>(p)[i]; }
OCTAVO_INLINE f32x16 load_codes(const void* p) { return to_float(load_i8(p)); }
OCTAVO_INLINE f32x16 load_e5m2(const void* p) { OCTAVO_LANEWISE(f32x16, float_of_f16(byte_at(p, i) << 8)); }
OCTAVO_INLINE f32x16 load_e4m3(const void* p) {
  OCTAVO_LANEWISE(f32x16, float_of_f16((byte_at(p, i) & 0x80u) << 8 | (byte_at(p, i) & 0x7fu) << 7));
}
OCTAVO_INLINE f32x16 load_low_nibbles(const void* p, const int8_t* table) {
  OCTAVO_LANEWISE(f32x16, table[byte_at(p, i) & 15]);
}
OCTAVO_INLINE f32x16 load_high_nibbles(const void* p, const int8_t* table) {
  OCTAVO_LANEWISE(f32x16, table[byte_at(p, i) >> 4]);
}
OCTAVO_INLINE int with_sign(int size, const void* signs, size_t i, int bit) {
  return byte_at(signs, i) >> bit & 1 ? -size : size;
}
OCTAVO_INLINE f32x16 load_low_nibbles(const void* p, const int8_t* table, const void* signs, int bit) {
  OCTAVO_LANEWISE(f32x16, static_cast<float>(with_sign(table[byte_at(p, i) & 15], signs, i, bit)));
}
OCTAVO_INLINE f32x16 load_high_nibbles(const void* p, const int8_t* table, const void* signs, int bit) {
  OCTAVO_LANEWISE(f32x16, static_cast<float>(with_sign(table[byte_at(p, i) >> 4], signs, i, bit)));
}
OCTAVO_INLINE f32x16 load_nibbles(const void* p, const int8_t* table) {
  OCTAVO_LANEWISE(f32x16, table[byte_at(p, i % 8) >> (i < 8 ? 0 : 4) & 15]);
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
