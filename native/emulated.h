// AVX-512 and AMX on a machine that has only AVX2, for tests: each instruction that the kernels use, as Intel's manual
// defines it. Never part of a normal build; see OCTAVO_EMULATE in CMakeLists.txt.
//
// The functions bear the intrinsics' names and, being in an inner namespace, hide them.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__OPTIMIZE__)
#error "without optimisation the header's intrinsics are macros, which cannot be hidden"
#endif

namespace octavo::OCTAVO_VARIANT {
namespace {

#define OCTAVO_EMULATE inline __attribute__((always_inline))

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(64)));
typedef int16_t I16x16 __attribute__((vector_size(32)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef int8_t I8x16 __attribute__((vector_size(16)));

template <typename To, typename From>
OCTAVO_EMULATE To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <typename Half, typename Whole>
OCTAVO_EMULATE Half half(const Whole& whole, int index) {
  static_assert(2 * sizeof(Half) == sizeof(Whole));
  Half out;
  memcpy(&out, reinterpret_cast<const char*>(&whole) + static_cast<size_t>(index) * sizeof out, sizeof out);
  return out;
}

template <typename Whole, typename Half>
OCTAVO_EMULATE Whole joined(Half low, Half high) {
  const Half halves[2] = {low, high};
  return same_bits<Whole>(halves);
}

// ── float ──

OCTAVO_EMULATE __m512 _mm512_setzero_ps() { return F32{}; }
OCTAVO_EMULATE __m512 _mm512_set1_ps(float x) { return F32{} + x; }
OCTAVO_EMULATE __m512 _mm512_loadu_ps(const void* p) {
  __m512 out;
  memcpy(&out, p, sizeof out);
  return out;
}
OCTAVO_EMULATE void _mm512_storeu_ps(void* p, __m512 a) { memcpy(p, &a, sizeof a); }
OCTAVO_EMULATE __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
OCTAVO_EMULATE __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
OCTAVO_EMULATE __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
OCTAVO_EMULATE __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }

#define OCTAVO_HALVES(type, part, ...)                                                  \
  const auto low = [&](int h) { return __VA_ARGS__; }(0);                               \
  const auto high = [&](int h) { return __VA_ARGS__; }(1);                              \
  return joined<type>(static_cast<part>(low), static_cast<part>(high))

OCTAVO_EMULATE __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  OCTAVO_HALVES(__m512, __m256, _mm256_fmadd_ps(half<__m256>(a, h), half<__m256>(b, h), half<__m256>(c, h)));
}
OCTAVO_EMULATE __m512 _mm512_max_ps(__m512 a, __m512 b) {
  OCTAVO_HALVES(__m512, __m256, _mm256_max_ps(half<__m256>(a, h), half<__m256>(b, h)));
}
OCTAVO_EMULATE __m512 _mm512_min_ps(__m512 a, __m512 b) {
  OCTAVO_HALVES(__m512, __m256, _mm256_min_ps(half<__m256>(a, h), half<__m256>(b, h)));
}
OCTAVO_EMULATE __m512 _mm512_roundscale_ps(__m512 a, int mode) {
  if (mode != 0 && mode != 2) {
    __builtin_trap();
  }
  OCTAVO_HALVES(__m512, __m256,
                mode ? _mm256_ceil_ps(half<__m256>(a, h)) : _mm256_round_ps(half<__m256>(a, h), _MM_FROUND_TO_NEAREST_INT));
}
[[gnu::noinline, maybe_unused]] __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) {
    const bool unordered = __builtin_isunordered(a[i], b[i]);
    const bool yes = predicate == _CMP_LT_OQ ? !unordered && a[i] < b[i]
                     : predicate == _CMP_UNORD_Q ? unordered
                                                 : (__builtin_trap(), false);
    mask |= static_cast<unsigned>(yes) << i;
  }
  return static_cast<__mmask16>(mask);
}
[[gnu::noinline, maybe_unused]] __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
  __m512 out;
  for (int i = 0; i < 16; ++i) {
    out[i] = mask >> i & 1 ? b[i] : a[i];
  }
  return out;
}
OCTAVO_EMULATE __m512 _mm512_cvtph_ps(__m256i a) {
  OCTAVO_HALVES(__m512, __m256, _mm256_cvtph_ps(half<__m128i>(a, h)));
}
OCTAVO_EMULATE __m512i _mm512_cvtps_epi32(__m512 a) {
  OCTAVO_HALVES(__m512i, __m256i, _mm256_cvtps_epi32(half<__m256>(a, h)));
}
OCTAVO_EMULATE __m512 _mm512_cvtepi32_ps(__m512i a) { return __builtin_convertvector(same_bits<I32>(a), F32); }
OCTAVO_EMULATE __m512i _mm512_castps_si512(__m512 a) { return same_bits<__m512i>(a); }
OCTAVO_EMULATE __m512 _mm512_castsi512_ps(__m512i a) { return same_bits<__m512>(a); }
OCTAVO_EMULATE __m512d _mm512_castps_pd(__m512 a) { return same_bits<__m512d>(a); }
OCTAVO_EMULATE __m256 _mm512_castps512_ps256(__m512 a) { return half<__m256>(a, 0); }
OCTAVO_EMULATE __m256i _mm512_castsi512_si256(__m512i a) { return half<__m256i>(a, 0); }
OCTAVO_EMULATE __m256d _mm512_extractf64x4_pd(__m512d a, int index) { return half<__m256d>(a, index); }
OCTAVO_EMULATE __m256i _mm512_extracti64x4_epi64(__m512i a, int index) { return half<__m256i>(a, index); }

// ── integers ──

OCTAVO_EMULATE __m512i _mm512_setzero_si512() { return __m512i{}; }
OCTAVO_EMULATE __m512i _mm512_set1_epi32(int x) { return same_bits<__m512i>(I32{} + x); }
OCTAVO_EMULATE __m512i _mm512_set1_epi8(char x) { return _mm512_set1_epi32(0x01010101 * static_cast<uint8_t>(x)); }
OCTAVO_EMULATE __m512i _mm512_loadu_si512(const void* p) {
  __m512i out;
  memcpy(&out, p, sizeof out);
  return out;
}
OCTAVO_EMULATE void _mm512_storeu_si512(void* p, __m512i a) { memcpy(p, &a, sizeof a); }
OCTAVO_EMULATE __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
OCTAVO_EMULATE __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
OCTAVO_EMULATE __m512i _mm512_mullo_epi32(__m512i a, __m512i b) {
  return same_bits<__m512i>(same_bits<U32>(a) * same_bits<U32>(b));
}
OCTAVO_EMULATE __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return same_bits<__m512i>(same_bits<U32>(a) + same_bits<U32>(b));
}
OCTAVO_EMULATE __m512i _mm512_max_epi32(__m512i a, __m512i b) {
  OCTAVO_HALVES(__m512i, __m256i, _mm256_max_epi32(half<__m256i>(a, h), half<__m256i>(b, h)));
}
OCTAVO_EMULATE __m512i _mm512_slli_epi32(__m512i a, unsigned n) { return same_bits<__m512i>(same_bits<U32>(a) << n); }
OCTAVO_EMULATE __m512i _mm512_srli_epi32(__m512i a, unsigned n) { return same_bits<__m512i>(same_bits<U32>(a) >> n); }
OCTAVO_EMULATE __m512i _mm512_srli_epi16(__m512i a, unsigned n) {
  return same_bits<__m512i>(same_bits<U16>(a) >> static_cast<uint16_t>(n));
}
OCTAVO_EMULATE __m256i _mm512_cvtepi32_epi16(__m512i a) {
  return same_bits<__m256i>(__builtin_convertvector(same_bits<I32>(a), I16x16));
}
OCTAVO_EMULATE __m128i _mm512_cvtepi32_epi8(__m512i a) {
  return same_bits<__m128i>(__builtin_convertvector(same_bits<I32>(a), I8x16));
}
OCTAVO_EMULATE __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return same_bits<__m512i>(__builtin_convertvector(same_bits<U16x16>(a), I32));
}
OCTAVO_EMULATE __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return same_bits<__m512i>(__builtin_convertvector(same_bits<I8x16>(a), I32));
}
OCTAVO_EMULATE __m512i _mm512_cvtepi8_epi16(__m256i a) {
  OCTAVO_HALVES(__m512i, __m256i, _mm256_cvtepi8_epi16(half<__m128i>(a, h)));
}
OCTAVO_EMULATE __m512i _mm512_dpwssd_epi32(__m512i c, __m512i a, __m512i b) {
  OCTAVO_HALVES(__m512i, __m256i, _mm256_add_epi32(half<__m256i>(c, h), _mm256_madd_epi16(half<__m256i>(a, h), half<__m256i>(b, h))));
}
[[gnu::noinline, maybe_unused]] __m512i _mm512_dpbusd_epi32(__m512i c, __m512i a, __m512i b) {
  I32 sums = same_bits<I32>(c);
  uint8_t u[64];
  int8_t s[64];
  memcpy(u, &a, 64);
  memcpy(s, &b, 64);
  for (int i = 0; i < 64; ++i) {
    sums[i / 4] += u[i] * s[i];
  }
  return same_bits<__m512i>(sums);
}

// ── tiles: see amx.h ──

#if OCTAVO_LEVEL == 3

struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct TileFile {
  TileShapes shapes;
  uint8_t tile[8][16][64];
};

thread_local TileFile tiles;

inline void must(bool legal) {
  if (!legal) {
    __builtin_trap();  // where the processor would raise #UD
  }
}

inline void tile_configure(const TileShapes& shapes) {
  must(shapes.palette == 1);
  memset(&tiles, 0, sizeof tiles);
  tiles.shapes = shapes;
  for (int t = 0; t < 16; ++t) {
    must(t < 8 ? shapes.rows[t] <= 16 && shapes.row_bytes[t] <= 64 : !shapes.rows[t] && !shapes.row_bytes[t]);
  }
}
inline void tile_release() { memset(&tiles, 0, sizeof tiles); }

template <int T>
inline void tile_zero() {
  must(tiles.shapes.palette == 1 && tiles.shapes.rows[T]);
  memset(tiles.tile[T], 0, sizeof tiles.tile[T]);
}
template <int T>
inline void tile_load(const void* from, size_t stride) {
  tile_zero<T>();
  for (size_t row = 0; row < tiles.shapes.rows[T]; ++row) {
    memcpy(tiles.tile[T][row], static_cast<const char*>(from) + row * stride, tiles.shapes.row_bytes[T]);
  }
}
template <int T>
inline void tile_store(void* to, size_t stride) {
  must(tiles.shapes.palette == 1 && tiles.shapes.rows[T]);
  for (size_t row = 0; row < tiles.shapes.rows[T]; ++row) {
    memcpy(static_cast<char*>(to) + row * stride, tiles.tile[T][row], tiles.shapes.row_bytes[T]);
  }
}

template <int C, int A, int B>
inline void check_product() {
  const TileShapes& s = tiles.shapes;
  must(C != A && A != B && C != B && s.palette == 1);
  must(s.rows[C] == s.rows[A] && s.row_bytes[A] / 4 == s.rows[B] && s.row_bytes[C] == s.row_bytes[B]);
  must(s.row_bytes[A] % 4 == 0 && s.row_bytes[C] % 4 == 0);
}

template <int C, int A, int B, typename OfA, typename OfB>
inline void tile_bytes() {
  check_product<C, A, B>();
  for (size_t m = 0; m < tiles.shapes.rows[C]; ++m) {
    for (size_t n = 0; n < tiles.shapes.row_bytes[C] / 4u; ++n) {
      int32_t sum;
      memcpy(&sum, &tiles.tile[C][m][4 * n], 4);
      for (size_t k = 0; k < tiles.shapes.row_bytes[A]; ++k) {
        sum += static_cast<OfA>(tiles.tile[A][m][k]) * static_cast<OfB>(tiles.tile[B][k / 4][4 * n + k % 4]);
      }
      memcpy(&tiles.tile[C][m][4 * n], &sum, 4);
    }
  }
}
template <int C, int A, int B>
inline void tile_dpbsud() {
  tile_bytes<C, A, B, int8_t, uint8_t>();
}
template <int C, int A, int B>
inline void tile_dpbssd() {
  tile_bytes<C, A, B, int8_t, int8_t>();
}

inline float float_at(const uint8_t* bf16) {
  const uint32_t word = static_cast<uint32_t>(bf16[0] | bf16[1] << 8) << 16;
  return same_bits<float>(word);
}

// Two chains of fma from zero, over the even and the odd elements; their sum is added to C. Subnormals are zero, which
// the pool's threads have set for themselves.
template <int C, int A, int B>
inline void tile_dpbf16ps() {
  check_product<C, A, B>();
  for (size_t m = 0; m < tiles.shapes.rows[C]; ++m) {
    for (size_t n = 0; n < tiles.shapes.row_bytes[C] / 4u; ++n) {
      float chains[2] = {0.0f, 0.0f};
      for (size_t k = 0; k < tiles.shapes.row_bytes[A] / 4u; ++k) {
        for (size_t i = 0; i < 2; ++i) {
          const float a = float_at(&tiles.tile[A][m][4 * k + 2 * i]), b = float_at(&tiles.tile[B][k][4 * n + 2 * i]);
          chains[i] = __builtin_fmaf(a, b, chains[i]);
        }
      }
      float c;
      memcpy(&c, &tiles.tile[C][m][4 * n], 4);
      c += chains[0] + chains[1];
      memcpy(&tiles.tile[C][m][4 * n], &c, 4);
    }
  }
}

#endif

}  // namespace
}  // namespace octavo::OCTAVO_VARIANT
