#include "linear.h"

#include "norm.h"
#include "vec.h"
#if OCTAVO_LEVEL == 3
#include "amx.h"
#endif

namespace octavo::OCTAVO_VARIANT {
namespace {

// ── inputs ────────────────────────────────────────────────────────────────────────────────────────────────────────────

// 32 inputs of a row as int8, with all that a product needs to know of them: one cache line. Code i of half h stands for
// codes[i] · factor[h] · scale.
struct alignas(64) QuantGroup {
  int8_t codes[GROUP];  // -127 … 127
  float scale;
  float sum;               // scale · sum of codes · factor
  float half_sum[2];       // the same for either half
  int32_t offset;          // -128 · sum of codes: takes back the 128 that makes signed weights unsigned
  int32_t half_offset[2];  // the same for either half
  int16_t factor[2];       // 1 unless the inputs are fine
};

// A row's bf16 values are this many groups apart: an odd number, so that rows spread over the cache's sets.
OCTAVO_INLINE size_t row_groups(size_t groups) { return groups | 1; }

#if OCTAVO_LEVEL == 3
using BF16 = uint16_t;
#else
using BF16 = float;  // rounded to bf16, kept as float
#endif

struct Inputs {
  QuantGroup* quantized;  // [rows / TILE_ROWS][groups][TILE_ROWS]
  BF16* rounded;          // [rows][row_groups][32]
  size_t groups;
};

// Rows that meet a block of weights together. Their QuantGroups lie together too, so that a panel of rows is one stream.
#if OCTAVO_LEVEL == 3
constexpr int TILE_ROWS = 16;
#elif OCTAVO_LEVEL == 2
constexpr int TILE_ROWS = 8;
#else
constexpr int TILE_ROWS = 4;
#endif

// How often a half's largest magnitude can be doubled, up to 7 times, before it exceeds the group's: as integers, floats are
// their logarithms, in steps of 2^-23 and straight between powers of two.
int doublings(float half, float group) {
  int32_t a, b;
  memcpy(&a, &group, 4);
  memcpy(&b, &half, 4);
  const int n = (a - b) >> 23;
  return n < 7 ? n : 7;
}

// 2^-n
OCTAVO_INLINE float halved(int n) {
  const int32_t word = (127 - n) << 23;
  float value;
  memcpy(&value, &word, 4);
  return value;
}

template <bool FINE>
void quantize(const float* x, size_t groups, QuantGroup* out) {
  for (size_t g = 0; g < groups; ++g, x += GROUP, out += TILE_ROWS) {
    const f32x16 half[2] = {load(x), load(x + LANES)};
    const i32x16 size[2] = {bits(magnitude(half[0])), bits(magnitude(half[1]))};
    // As integers, magnitudes order like the floats they are and NaN is largest, so that it spoils the row's result.
    const float amax = largest_magnitude(max(size[0], size[1]));
    const bool nothing = amax < 1e-30f;
    const float inverse = nothing ? 0.0f : 127.0f / amax;
    int finer[2] = {0, 0};
    if (FINE && !nothing) {
      finer[0] = doublings(largest_magnitude(size[0]), amax);
      finer[1] = doublings(largest_magnitude(size[1]), amax);
    }
    const int finest = finer[0] > finer[1] ? finer[0] : finer[1];
    const float scale = nothing ? 0.0f : amax / 127.0f * halved(finest);
    float sums[2];
    for (int h = 0; h < 2; ++h) {
      const f32x16 q = round(half[h] * broadcast(inverse * static_cast<float>(1 << finer[h])));
      const f32x16 codes = where_nan(q, zero(), q);
      store(out->codes + static_cast<size_t>(h) * LANES, low8(to_int(codes)));
      const float sum_of_codes = sum(codes);
      const int factor = 1 << (finest - finer[h]);
      sums[h] = sum_of_codes * static_cast<float>(factor);
      out->factor[h] = static_cast<int16_t>(factor);
      out->half_sum[h] = scale * sums[h];
      out->half_offset[h] = -128 * static_cast<int32_t>(sum_of_codes);
    }
    out->scale = scale;
    out->sum = scale * (sums[0] + sums[1]);
    out->offset = out->half_offset[0] + out->half_offset[1];
  }
}

void round_to_bf16(const float* x, size_t groups, BF16* out) {
  for (size_t i = 0; i < groups * GROUP; i += LANES) {
    const i32x16 half = to_bf16(load(x + i));
#if OCTAVO_LEVEL == 3
    store_low16(out + i, half);
#else
    store(out + i, from_bits(shift_left<16>(half)));
#endif
  }
}

// ── integer products of one group: sums[row][half] = weights · codes · factor, in every lane an output ─────────────────

template <int CODES>
constexpr int HALVES = CODES == Format::W8_GROUP16 ? 2 : 1;

// Sums that a kernel keeps apart: fine inputs have a factor for each half.
template <int CODES, bool FINE>
constexpr int PARTS = FINE ? 2 : HALVES<CODES>;

template <int CODES>
constexpr size_t GROUP_BYTES = CODES == Format::W4 ? 256 : CODES == Format::BF16 ? 1024 : 512;

// What a part's sum begins with where signed weights are taken as unsigned.
template <int CODES, bool FINE>
OCTAVO_INLINE i32x16 first_sum(const QuantGroup& group, int part) {
  return broadcast_int(CODES == Format::W4 ? 0 : PARTS<CODES, FINE> == 2 ? group.half_offset[part] : group.offset);
}

// Sums of codes' products, times their factors.
template <int CODES, bool FINE>
OCTAVO_INLINE void scale_parts(const i32x16 (&parts)[PARTS<CODES, FINE>], const QuantGroup& group,
                               i32x16 (&sums)[HALVES<CODES>]) {
  if constexpr (!FINE) {
    OCTAVO_UNROLL
    for (int half = 0; half < HALVES<CODES>; ++half) {
      sums[half] = parts[half];
    }
  } else {
    const i32x16 first = parts[0] * broadcast_int(group.factor[0]);
    const i32x16 second = parts[1] * broadcast_int(group.factor[1]);
    if constexpr (HALVES<CODES> == 2) {
      sums[0] = first;
      sums[1] = second;
    } else {
      sums[0] = first + second;
    }
  }
}

template <bool WIDE>
OCTAVO_INLINE f32x16 load_scales(const uint8_t* at, size_t group) {
  if constexpr (WIDE) {
    return load(reinterpret_cast<const float*>(at) + group * LANES);
  } else {
    return load_f16(reinterpret_cast<const uint16_t*>(at) + group * LANES);
  }
}

// One group's part of a row's result, the same expression wherever the integer sums come from.
template <int CODES, bool MINIMUM, bool WIDE>
struct Scales {
  f32x16 scale[HALVES<CODES>], minimum[HALVES<CODES>];

  OCTAVO_INLINE void load_group(const Segment& segment, const uint8_t* block, size_t g) {
    OCTAVO_UNROLL
    for (int half = 0; half < HALVES<CODES>; ++half) {
      const size_t index = g * HALVES<CODES> + static_cast<size_t>(half);
      scale[half] = load_scales<WIDE>(block + segment.scales_at, index);
      if constexpr (MINIMUM) {
        minimum[half] = load_scales<WIDE>(block + segment.minimums_at, index);
      }
    }
  }

  OCTAVO_INLINE f32x16 add(f32x16 acc, const i32x16 (&sums)[HALVES<CODES>], const QuantGroup& in) const {
    OCTAVO_UNROLL
    for (int half = 0; half < HALVES<CODES>; ++half) {
      acc = fma(to_float(sums[half]), scale[half] * broadcast(in.scale), acc);
      if constexpr (MINIMUM) {
        acc = fma(minimum[half], broadcast(HALVES<CODES> == 2 ? in.half_sum[half] : in.sum), acc);
      }
    }
    return acc;
  }
};

// Asks for a group's share of the next block: codes, scales and minimums are streams too short for the processor to
// foresee. (bf16 blocks are one stream, and asking makes them slower.) What is read ONCE takes no other's place in the
// caches below the first.
template <int CODES, bool MINIMUM, bool WIDE, bool ONCE>
OCTAVO_INLINE void prefetch(const uint8_t* next_block, size_t group) {
  constexpr size_t BYTES = GROUP_BYTES<CODES> + HALVES<CODES> * (WIDE ? 64 : 32) * (MINIMUM ? 2 : 1);
  for (size_t i = 0; i < BYTES; i += 64) {
    __builtin_prefetch(next_block + group * BYTES + i, 0, ONCE ? 0 : 3);
  }
}

OCTAVO_INLINE int32_t run_of(const QuantGroup& group, int run) {
  int32_t four;
  memcpy(&four, group.codes + 4 * run, 4);
  return four;
}

#if OCTAVO_LEVEL >= 2

template <int CODES, bool FINE, int R>
OCTAVO_INLINE void dot(const uint8_t* weights, const QuantGroup* in, i32x16 (&sums)[R][HALVES<CODES>]) {
  __m512i w[8];
  if constexpr (CODES == Format::W4) {
    const __m512i low = _mm512_set1_epi8(15);
    OCTAVO_UNROLL
    for (int j = 0; j < 4; ++j) {
      const __m512i both = _mm512_loadu_si512(weights + 64 * j);
      w[j] = _mm512_and_si512(both, low);
      w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
  } else {
    const __m512i sign = _mm512_set1_epi8(-128);  // signed + 128 is unsigned; the offset takes it back
    OCTAVO_UNROLL
    for (int j = 0; j < 8; ++j) {
      w[j] = _mm512_xor_si512(_mm512_loadu_si512(weights + 64 * j), sign);
    }
  }
  i32x16 parts[R][PARTS<CODES, FINE>];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    OCTAVO_UNROLL
    for (int part = 0; part < PARTS<CODES, FINE>; ++part) {
      parts[r][part] = first_sum<CODES, FINE>(in[r], part);
    }
  }
  OCTAVO_UNROLL
  for (int j = 0; j < 8; ++j) {
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      __m512i& sum = parts[r][PARTS<CODES, FINE> == 2 ? j / 4 : 0].v;
      sum = _mm512_dpbusd_epi32(sum, w[j], _mm512_set1_epi32(run_of(in[r], j)));
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    scale_parts<CODES, FINE>(parts[r], in[r], sums[r]);
  }
}

#elif OCTAVO_LEVEL == 1

// 1 for all inputs, or the factor of a row's half, to multiply pairs of 16-bit sums with.
template <bool FINE>
OCTAVO_INLINE __m256i factors(const QuantGroup& group, int half, int times = 1) {
  return _mm256_set1_epi16(static_cast<int16_t>(FINE ? group.factor[half] * times : times));
}

template <int CODES, bool FINE, int R>
OCTAVO_INLINE void dot(const uint8_t* weights, const QuantGroup* in, i32x16 (&sums)[R][HALVES<CODES>]) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i lo[R], hi[R];
  OCTAVO_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int to = HALVES<CODES> == 2 ? half : 0;
    OCTAVO_UNROLL
    for (int r = 0; r < R && half == to; ++r) {
      sums[r][to] = broadcast_int(0);
    }
    OCTAVO_UNROLL
    for (int r = 0; r < R && (FINE || half == 0); ++r) {
      lo[r] = hi[r] = _mm256_setzero_si256();
    }
    OCTAVO_UNROLL
    for (int j = 0; j < 4; ++j) {
      if constexpr (CODES == Format::W4) {
        const i32x16 both = load_int(weights + 64 * j);
        const __m256i wl = _mm256_and_si256(half ? _mm256_srli_epi16(both.lo, 4) : both.lo, low);
        const __m256i wh = _mm256_and_si256(half ? _mm256_srli_epi16(both.hi, 4) : both.hi, low);
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
          const __m256i a = _mm256_set1_epi32(run_of(in[r], 4 * half + j));
          lo[r] = _mm256_add_epi16(lo[r], _mm256_maddubs_epi16(wl, a));  // 16 products of at most 15 · 127: below 32768
          hi[r] = _mm256_add_epi16(hi[r], _mm256_maddubs_epi16(wh, a));
        }
      } else {
        const i32x16 w = load_int(weights + 64 * (4 * half + j));
        const __m256i wl = _mm256_abs_epi8(w.lo), wh = _mm256_abs_epi8(w.hi);  // -128 becomes an unsigned 128
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
          const __m256i a = _mm256_set1_epi32(run_of(in[r], 4 * half + j));
          const __m256i factor = factors<FINE>(in[r], half);
          // pairs are at most 2 · 128 · 127: below 32768
          const __m256i pl = _mm256_maddubs_epi16(wl, _mm256_sign_epi8(a, w.lo));
          const __m256i ph = _mm256_maddubs_epi16(wh, _mm256_sign_epi8(a, w.hi));
          sums[r][to] = sums[r][to] + i32x16{_mm256_madd_epi16(pl, factor), _mm256_madd_epi16(ph, factor)};
        }
      }
    }
    OCTAVO_UNROLL
    for (int r = 0; r < R && CODES == Format::W4 && (FINE || half == 1); ++r) {
      const __m256i factor = factors<FINE>(in[r], half);
      sums[r][0] = sums[r][0] + i32x16{_mm256_madd_epi16(lo[r], factor), _mm256_madd_epi16(hi[r], factor)};
    }
  }
}

// ── the same from a block unpacked for many rows: its codes as planes of 4 bits, its scales as float32 ────────────────

template <int CODES>
constexpr size_t WORTH_UNPACKING = CODES == Format::W4 ? 48 : 16;  // rows

template <int CODES>
constexpr size_t PLANES = CODES == Format::W4 ? 1 : 2;

template <int CODES, bool MINIMUM, bool WIDE>
Segment unpack(const Segment& segment, const uint8_t* block, uint8_t* out) {
  const __m256i low = _mm256_set1_epi8(15), sign = _mm256_set1_epi8(-128);
  Segment unpacked = segment;
  unpacked.scales_at = segment.groups * PLANES<CODES> * 512;
  unpacked.minimums_at = unpacked.scales_at + segment.groups * HALVES<CODES> * LANES * sizeof(float);
  for (size_t g = 0; g < segment.groups; ++g) {
    const uint8_t* in = block + g * GROUP_BYTES<CODES>;
    uint8_t* first = out + g * PLANES<CODES> * 512;
    for (size_t i = 0; i < GROUP_BYTES<CODES>; i += 32) {
      __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
      both = CODES == Format::W4 ? both : _mm256_xor_si256(both, sign);
      const size_t high = CODES == Format::W4 ? 256 : 512;  // the other half of the group, or the other plane
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(first + i), _mm256_and_si256(both, low));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(first + i + high), _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
    }
    Scales<CODES, MINIMUM, WIDE> scales;
    scales.load_group(segment, block, g);
    for (int half = 0; half < HALVES<CODES>; ++half) {
      const size_t at = (g * HALVES<CODES> + static_cast<size_t>(half)) * LANES * sizeof(float);
      store(reinterpret_cast<float*>(out + unpacked.scales_at + at), scales.scale[half]);
      if constexpr (MINIMUM) {
        store(reinterpret_cast<float*>(out + unpacked.minimums_at + at), scales.minimum[half]);
      }
    }
  }
  return unpacked;
}

template <int CODES, bool FINE, int R>
OCTAVO_INLINE void dot_planes(const uint8_t* planes, const QuantGroup* in,
                              i32x16 (&sums)[R][HALVES<CODES>]) {
  constexpr int RUNS = 8 / PARTS<CODES, FINE>;
  OCTAVO_UNROLL
  for (int part = 0; part < PARTS<CODES, FINE>; ++part) {
    const int to = HALVES<CODES> == 2 ? part : 0;
    OCTAVO_UNROLL
    for (int plane = 0; plane < static_cast<int>(PLANES<CODES>); ++plane) {
      asm("" : "+r"(in));  // else the inputs of a plane are kept, in memory, for the next
      __m256i lo[R], hi[R];
      OCTAVO_UNROLL
      for (int j = 0; j < RUNS; ++j) {
        const i32x16 w = load_int(planes + 512 * plane + 64 * (RUNS * part + j));
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
          const __m256i a = _mm256_set1_epi32(run_of(in[r], RUNS * part + j));
          const __m256i pl = _mm256_maddubs_epi16(w.lo, a), ph = _mm256_maddubs_epi16(w.hi, a);
          lo[r] = j ? _mm256_add_epi16(lo[r], pl) : pl;  // 16 products of at most 15 · 127: below 32768
          hi[r] = j ? _mm256_add_epi16(hi[r], ph) : ph;
        }
      }
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256i factor = factors<FINE>(in[r], part, plane ? 16 : 1);
        const i32x16 sum = {_mm256_madd_epi16(lo[r], factor), _mm256_madd_epi16(hi[r], factor)};
        sums[r][to] = plane || part != to ? sums[r][to] + sum : sum;
      }
    }
    OCTAVO_UNROLL
    for (int r = 0; r < R && CODES != Format::W4; ++r) {
      const QuantGroup& group = in[r];
      const int32_t offset = PARTS<CODES, FINE> == 1 ? group.offset : group.half_offset[part] * group.factor[part];
      sums[r][to] = sums[r][to] + broadcast_int(offset);
    }
  }
}

#else

template <int CODES, bool FINE, int R>
OCTAVO_INLINE void dot(const uint8_t* weights, const QuantGroup* in, i32x16 (&sums)[R][HALVES<CODES>]) {
  for (int r = 0; r < R; ++r) {
    const QuantGroup& group = in[r];
    i32x16 parts[PARTS<CODES, FINE>] = {};
    for (int run = 0; run < 8; ++run) {
      int32_t* sum = parts[PARTS<CODES, FINE> == 2 ? run / 4 : 0].v;
      const uint8_t* w = weights + (CODES == Format::W4 ? run % 4 : run) * 64;
      for (size_t lane = 0; lane < LANES; ++lane) {
        for (int i = 0; i < 4; ++i) {
          const uint8_t byte = w[4 * lane + i];
          const int code = CODES != Format::W4 ? static_cast<int8_t>(byte) : run < 4 ? byte & 15 : byte >> 4;
          sum[lane] += code * group.codes[4 * run + i];
        }
      }
    }
    scale_parts<CODES, FINE>(parts, group, sums[r]);
  }
}

#endif

// ── a block of weights times R rows: y[row][lane] ──────────────────────────────────────────────────────────────────────

template <int CODES, bool MINIMUM, bool WIDE, bool FINE, bool UNPACKED, int R>
OCTAVO_INLINE void quantized_rows(const Segment& segment, const uint8_t* block, const uint8_t* next, bool once,
                                  const QuantGroup* in, float (*y)[LANES]) {
  f32x16 acc[R];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    acc[r] = zero();
  }
  for (size_t g = 0; g < segment.groups; ++g) {
    i32x16 sums[R][HALVES<CODES>];
    if (R == 1 && next && once) {
      prefetch<CODES, MINIMUM, WIDE, true>(next, g);
    } else if (next) {
      prefetch<CODES, MINIMUM, WIDE, false>(next, g);
    }
#if OCTAVO_LEVEL == 1
    if constexpr (UNPACKED) {
      dot_planes<CODES, FINE, R>(block + g * PLANES<CODES> * 512, in + g * TILE_ROWS, sums);
    }
#endif
    if constexpr (!UNPACKED) {
      dot<CODES, FINE, R>(block + g * GROUP_BYTES<CODES>, in + g * TILE_ROWS, sums);
    }
    Scales<CODES, MINIMUM, WIDE || UNPACKED> scales;
    scales.load_group(segment, block, g);
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      acc[r] = scales.add(acc[r], sums[r], in[g * TILE_ROWS + r]);
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    store(y[r], acc[r]);
  }
}

#if OCTAVO_LEVEL < 3

template <int R>
OCTAVO_INLINE void bf16_rows(const Segment& segment, const uint8_t* block, const float* in, size_t stride,
                             float (*y)[LANES]) {
  f32x16 acc[R];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    acc[r] = zero();
  }
  for (size_t g = 0; g < segment.groups; ++g) {
    f32x16 even[R], odd[R];
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      even[r] = odd[r] = zero();
    }
    const uint8_t* weights = block + g * GROUP_BYTES<Format::BF16>;
    for (size_t pair = 0; pair < GROUP / 2; ++pair) {
      const i32x16 both = load_int(weights + 64 * pair);
      const f32x16 first = first_of_pairs(both), second = second_of_pairs(both);
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) {
        const float* x = in + (r * stride + g) * GROUP + 2 * pair;
        even[r] = fma(broadcast(x[0]), first, even[r]);
        odd[r] = fma(broadcast(x[1]), second, odd[r]);
      }
    }
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      acc[r] = acc[r] + (even[r] + odd[r]);
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    store(y[r], acc[r]);
  }
}

#endif

#if OCTAVO_LEVEL == 3  // ── the same for sixteen rows, in tiles ─────────────────────────────────────────────────────────

// Tiles 0-3 take products, 4 and 5 inputs (16 rows), 6 and 7 weights, whose rows are runs of 4 bytes for 16 outputs.
struct Tiles {
  int inputs = 0;  // of one product, as configured: 16 or 32 bytes, 32 bf16

  void configure(int wanted, size_t row_bytes) {
    if (inputs == wanted) {
      return;
    }
    inputs = wanted;
    TileShapes shapes{};
    shapes.palette = 1;
    for (int t = 0; t < 8; ++t) {
      shapes.rows[t] = t < 6 ? 16 : static_cast<uint8_t>(row_bytes / 4);
      shapes.row_bytes[t] = t < 4 || t >= 6 ? 64 : static_cast<uint16_t>(row_bytes);
    }
    tile_configure(shapes);
  }
};

constexpr int WORTH_A_TILE = 9;  // rows; fewer go through byte dot products

template <int CODES, int T>
OCTAVO_INLINE void tile_product(const uint8_t* weights, const QuantGroup* in, int half, int32_t (*sums)[LANES]) {
  constexpr int A = 4 + T % 2, B = 6 + T % 2;
  tile_zero<T>();
  tile_load<A>(in->codes + 16 * half, sizeof(QuantGroup));
  tile_load<B>(weights + 256 * half, 64);
  if constexpr (CODES == Format::W4) {
    tile_dpbsud<T, A, B>();
  } else {
    tile_dpbssd<T, A, B>();
  }
  tile_store<T>(sums, 64);
}

// 4-bit codes of a block as bytes, which tiles can load.
void unpack(const Segment& segment, const uint8_t* block, uint8_t* out) {
  const __m512i low = _mm512_set1_epi8(15);
  for (size_t g = 0; g < segment.groups; ++g, block += 256, out += 512) {
    for (int j = 0; j < 4; ++j) {
      const __m512i both = _mm512_loadu_si512(block + 64 * j);
      _mm512_storeu_si512(out + 64 * j, _mm512_and_si512(both, low));
      _mm512_storeu_si512(out + 64 * j + 256, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
    }
  }
}

template <int CODES, bool MINIMUM, bool WIDE, bool FINE>
void quantized_tile(const Segment& segment, const uint8_t* block, const uint8_t* codes, const QuantGroup* in,
                    const uint8_t* next, float (*y)[LANES]) {
  constexpr int P = PARTS<CODES, FINE>, N = 4 / P;  // groups under way at once
  constexpr size_t BYTES = 512;
  alignas(64) int32_t sums[4][TILE_ROWS][LANES];
  f32x16 acc[TILE_ROWS];
  OCTAVO_UNROLL
  for (int r = 0; r < TILE_ROWS; ++r) {
    acc[r] = zero();
  }
  for (size_t g = 0; g < segment.groups; g += N) {
    const size_t left = segment.groups - g;
    if constexpr (P == 2) {
      tile_product<CODES, 0>(codes + g * BYTES, in + g * TILE_ROWS, 0, sums[0]);
      tile_product<CODES, 1>(codes + g * BYTES, in + g * TILE_ROWS, 1, sums[1]);
      if (left > 1) {
        tile_product<CODES, 2>(codes + (g + 1) * BYTES, in + (g + 1) * TILE_ROWS, 0, sums[2]);
        tile_product<CODES, 3>(codes + (g + 1) * BYTES, in + (g + 1) * TILE_ROWS, 1, sums[3]);
      }
    } else {
      tile_product<CODES, 0>(codes + g * BYTES, in + g * TILE_ROWS, 0, sums[0]);
      if (left > 1) tile_product<CODES, 1>(codes + (g + 1) * BYTES, in + (g + 1) * TILE_ROWS, 0, sums[1]);
      if (left > 2) tile_product<CODES, 2>(codes + (g + 2) * BYTES, in + (g + 2) * TILE_ROWS, 0, sums[2]);
      if (left > 3) tile_product<CODES, 3>(codes + (g + 3) * BYTES, in + (g + 3) * TILE_ROWS, 0, sums[3]);
    }
    for (size_t n = 0; n < (left < N ? left : N); ++n) {
      if (next) {
        prefetch<CODES, MINIMUM, WIDE, false>(next, g + n);
      }
      Scales<CODES, MINIMUM, WIDE> scales;
      scales.load_group(segment, block, g + n);
      OCTAVO_UNROLL
      for (int r = 0; r < TILE_ROWS; ++r) {
        const QuantGroup& group = in[(g + n) * TILE_ROWS + static_cast<size_t>(r)];
        i32x16 parts[P], row[HALVES<CODES>];
        OCTAVO_UNROLL
        for (int part = 0; part < P; ++part) {
          parts[part] = load_int(sums[n * P + static_cast<size_t>(part)][r]);
        }
        scale_parts<CODES, FINE>(parts, group, row);
        acc[r] = scales.add(acc[r], row, group);
      }
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < TILE_ROWS; ++r) {
    store(y[r], acc[r]);
  }
}

void bf16_tile(const Segment& segment, const uint8_t* block, const uint16_t* in, size_t stride, float (*y)[LANES]) {
  tile_zero<0>();
  for (size_t g = 0; g < segment.groups; g += 2) {
    tile_load<4>(in + g * GROUP, stride * GROUP * sizeof(uint16_t));
    tile_load<6>(block + g * GROUP_BYTES<Format::BF16>, 64);
    tile_dpbf16ps<0, 4, 6>();
    if (g + 1 < segment.groups) {
      tile_load<5>(in + (g + 1) * GROUP, stride * GROUP * sizeof(uint16_t));
      tile_load<7>(block + (g + 1) * GROUP_BYTES<Format::BF16>, 64);
      tile_dpbf16ps<0, 5, 7>();
    }
  }
  tile_store<0>(y, 64);
}

#else
struct Tiles {};
#endif

// What a thread keeps while the rows pass by a block.
struct Work {
  Tiles& tiles;
  uint8_t* bytes;        // room for a block unpacked
  size_t rows;           // that will meet each block
  bool once;             // see LinearCall
  const uint8_t* block;  // the one that rows met last
  Segment unpacked;      // where its parts lie in `bytes`, on AVX2
};

// Rows first … first + rows - 1 (at most TILE_ROWS) times a block. Inputs have room for TILE_ROWS rows from `first` on.
using BlockKernel = void (*)(const Segment&, const uint8_t* block, const Inputs&, size_t first, int rows, Work&,
                             float (*y)[LANES]);

template <int CODES, bool MINIMUM, bool WIDE, bool FINE>
void quantized_block(const Segment& segment, const uint8_t* block, const Inputs& inputs, size_t first, int rows,
                     Work& work, float (*y)[LANES]) {
  const QuantGroup* in = inputs.quantized + first * inputs.groups;  // first is a multiple of TILE_ROWS
  const uint8_t* next = work.block == block ? nullptr : block + segment.block_bytes;  // to be asked for meanwhile
  work.block = block;
#define OCTAVO_ROWS(R, UNPACKED, segment, block)                                                    \
  for (; rows >= R; rows -= R, y += R, in += R) {                                                   \
    quantized_rows<CODES, MINIMUM, WIDE, FINE, UNPACKED, R>(segment, block, next, work.once, in, y); \
    next = nullptr;                                                                                 \
  }
#if OCTAVO_LEVEL == 3
  if (rows >= WORTH_A_TILE) {
    if (CODES == Format::W4 && next) {
      unpack(segment, block, work.bytes);
    }
    constexpr int BYTES = GROUP / PARTS<CODES, FINE>;
    work.tiles.configure(BYTES, BYTES);
    quantized_tile<CODES, MINIMUM, WIDE, FINE>(segment, block, CODES == Format::W4 ? work.bytes : block, in, next, y);
    return;
  }
#elif OCTAVO_LEVEL == 1
  if (work.rows >= WORTH_UNPACKING<CODES>) {
    if (next) {
      work.unpacked = unpack<CODES, MINIMUM, WIDE>(segment, block, work.bytes);
    }
    OCTAVO_ROWS(4, true, work.unpacked, work.bytes)
    OCTAVO_ROWS(2, true, work.unpacked, work.bytes)
    OCTAVO_ROWS(1, true, work.unpacked, work.bytes)
    return;
  }
#endif
#if OCTAVO_LEVEL >= 2
  OCTAVO_ROWS(8, false, segment, block)
#endif
  OCTAVO_ROWS(4, false, segment, block)
  OCTAVO_ROWS(2, false, segment, block)
  OCTAVO_ROWS(1, false, segment, block)
#undef OCTAVO_ROWS
}

void bf16_block(const Segment& segment, const uint8_t* block, const Inputs& inputs, size_t first, int rows,
                [[maybe_unused]] Work& work, float (*y)[LANES]) {
  const size_t stride = row_groups(inputs.groups);
  const BF16* in = inputs.rounded + first * stride * GROUP;
#if OCTAVO_LEVEL == 3
  static_cast<void>(rows);
  work.tiles.configure(2 * GROUP, 2 * GROUP);
  bf16_tile(segment, block, in, stride, y);
#else
#define OCTAVO_ROWS(R)                                                                 \
  for (; rows >= R; rows -= R, y += R, in += R * stride * GROUP) {                     \
    bf16_rows<R>(segment, block, in, stride, y);                                       \
  }
#if OCTAVO_LEVEL == 2
  OCTAVO_ROWS(8)
  OCTAVO_ROWS(4)
#endif
  OCTAVO_ROWS(2)
  OCTAVO_ROWS(1)
#undef OCTAVO_ROWS
#endif
}

template <bool FINE>
constexpr BlockKernel BLOCK_KERNELS[Format::COUNT] = {
    quantized_block<Format::W4, false, false, FINE>,         quantized_block<Format::W4, false, true, FINE>,
    quantized_block<Format::W4, true, false, FINE>,          quantized_block<Format::W4, true, true, FINE>,
    quantized_block<Format::W8, false, false, FINE>,         quantized_block<Format::W8, false, true, FINE>,
    quantized_block<Format::W8, true, false, FINE>,          quantized_block<Format::W8, true, true, FINE>,
    quantized_block<Format::W8_GROUP16, false, false, FINE>, quantized_block<Format::W8_GROUP16, false, true, FINE>,
    quantized_block<Format::W8_GROUP16, true, false, FINE>,  quantized_block<Format::W8_GROUP16, true, true, FINE>,
    bf16_block,
};

// ── a whole linear ────────────────────────────────────────────────────────────────────────────────────────────────────

// A block unpacked: at most two bytes for each code, and two scales and minimums for each group and output.
constexpr size_t UNPACKED_GROUP = 2 * 512 + 4 * LANES * sizeof(float);

constexpr size_t PANEL_BYTES = 512 << 10;  // inputs that stay in a core's second-level cache while weights pass by

OCTAVO_INLINE size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

struct Layout {  // of the scratch memory
  size_t groups, stride, padded_rows;
  bool quantized, rounded;
  size_t rounded_at, threads_at, thread_bytes, row_floats, bytes;

  Layout(const Linear& linear, size_t rows, int num_threads) {
    groups = up(linear.inputs, GROUP) / GROUP;
    stride = row_groups(groups);
    padded_rows = up(rows, TILE_ROWS);
    quantized = rounded = false;
    for (size_t i = 0; i < linear.num_segments; ++i) {
      (linear.segments[i].format.codes == Format::BF16 ? rounded : quantized) = true;
    }
    rounded_at = quantized ? padded_rows * groups * sizeof(QuantGroup) : 0;
    threads_at = rounded_at + (rounded ? padded_rows * stride * GROUP * sizeof(BF16) : 0);
    row_floats = groups * GROUP;
    thread_bytes = row_floats * sizeof(float) + 2 * groups * UNPACKED_GROUP + 4096;  // a row, two blocks, a gap
    bytes = threads_at + static_cast<size_t>(num_threads) * thread_bytes;
  }
};

size_t scratch_bytes(const Linear& linear, size_t rows, int num_threads) {
  return Layout(linear, rows, num_threads).bytes;
}

struct Job {
  const LinearCall& call;
  char* scratch;
  Layout layout;
  Inputs inputs;

  char* own(int thread) const { return scratch + layout.threads_at + static_cast<size_t>(thread) * layout.thread_bytes; }
};

void prepare_row(const Job& job, size_t row, float* padded) {
  const LinearCall& call = job.call;
  const size_t n = call.linear->inputs;
  const size_t source = call.gather ? static_cast<size_t>(call.gather[row]) : row;
  const float* x = call.x + source * n;
  if (call.norm || n % GROUP) {
    if (call.norm) {
      rms_norm(x, call.norm, call.eps, n, padded);
    } else {
      memcpy(padded, x, n * sizeof(float));
    }
    memset(padded + n, 0, (job.layout.row_floats - n) * sizeof(float));
    x = padded;
  }
  if (job.layout.rounded) {
    round_to_bf16(x, job.layout.groups, job.inputs.rounded + row * job.layout.stride * GROUP);
  }
  if (job.layout.quantized) {
    const auto round = call.linear->fine ? quantize<true> : quantize<false>;
    const size_t tile = row / TILE_ROWS * TILE_ROWS;
    round(x, job.layout.groups, job.inputs.quantized + tile * job.layout.groups + row % TILE_ROWS);
  }
}

struct Place {  // of a block among a linear's segments
  const Segment* segment;
  const uint8_t* block;
  size_t column, count;
};

Place place_of(const Linear& linear, size_t index) {
  const Segment* segment = linear.segments;
  while (index >= segment->num_blocks) {
    index -= segment->num_blocks;
    ++segment;
  }
  const size_t left = segment->outputs - index * BLOCK;
  return {segment, segment->data + index * segment->block_bytes, segment->column + index * BLOCK,
          left < BLOCK ? left : BLOCK};
}

OCTAVO_INLINE f32x16 result(const Linear& linear, const float* y, size_t column) {
  return linear.bias ? load(y) + load(linear.bias + column) : load(y);
}

// Blocks begin … end-1 (pairs of them for gate and up) times all rows.
void product(const Job& job, size_t begin, size_t end, int thread) {
  const LinearCall& call = job.call;
  const Linear& linear = *call.linear;
  const bool gate_up = call.epilogue == LinearCall::GATE_UP;
  const size_t out_columns = gate_up ? linear.outputs / 2 : linear.outputs;
  const size_t num_blocks = gate_up ? linear.num_blocks / 2 : linear.num_blocks;
  const BlockKernel* kernels = linear.fine ? BLOCK_KERNELS<true> : BLOCK_KERNELS<false>;
  const size_t row_bytes = job.layout.groups * sizeof(QuantGroup);
  const size_t fit = PANEL_BYTES / row_bytes / TILE_ROWS * TILE_ROWS;
  const size_t panel = fit ? fit : TILE_ROWS;

  Tiles tiles;
  uint8_t* bytes = reinterpret_cast<uint8_t*>(job.own(thread) + job.layout.row_floats * sizeof(float));
  Work work{tiles, bytes, call.rows, call.once, nullptr, {}};
  Work up_work{tiles, bytes + job.layout.groups * UNPACKED_GROUP, call.rows, call.once, nullptr, {}};
  alignas(64) float y[TILE_ROWS][LANES], up_y[TILE_ROWS][LANES];

  for (size_t panel_start = 0; panel_start < call.rows; panel_start += panel) {
    const size_t panel_end = panel_start + panel < call.rows ? panel_start + panel : call.rows;
    for (size_t b = begin; b < end; ++b) {
      const Place place = place_of(linear, b);
      const Place up_place = place_of(linear, gate_up ? b + num_blocks : b);
      const BlockKernel kernel = kernels[place.segment->format.index()];
      const BlockKernel up_kernel = kernels[up_place.segment->format.index()];
      for (size_t row = panel_start; row < panel_end; row += TILE_ROWS) {
        const size_t left = panel_end - row;
        const int rows = static_cast<int>(left < TILE_ROWS ? left : TILE_ROWS);
        kernel(*place.segment, place.block, job.inputs, row, rows, work, y);
        if (gate_up) {
          up_kernel(*up_place.segment, up_place.block, job.inputs, row, rows, up_work, up_y);
        }
        for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
          float* out = call.out + (row + r) * out_columns + place.column;
          f32x16 value = result(linear, y[r], place.column);
          if (gate_up) {
            value = silu(value) * result(linear, up_y[r], up_place.column);
          } else if (call.epilogue == LinearCall::ADD) {
            value = (place.count == BLOCK ? load(out) : load_first(out, place.count)) + value;
          }
          store_first(out, place.count, value);
        }
      }
    }
  }
#if OCTAVO_LEVEL == 3
  if (tiles.inputs) {
    tile_release();
  }
#endif
}

void run(const LinearCall& call, void* scratch, Pool& pool) {
  Job job{call, static_cast<char*>(scratch), Layout(*call.linear, call.rows, pool.size()), {}};
  job.inputs = {reinterpret_cast<QuantGroup*>(job.scratch),
                reinterpret_cast<BF16*>(job.scratch + job.layout.rounded_at), job.layout.groups};
  pool.run(
      call.rows,
      [](void* context, size_t begin, size_t end, int thread) {
        const Job& job = *static_cast<const Job*>(context);
        for (size_t row = begin; row < end; ++row) {
          prepare_row(job, row, reinterpret_cast<float*>(job.own(thread)));
        }
      },
      &job);
  pool.run(
      call.linear->num_blocks / (call.epilogue == LinearCall::GATE_UP ? 2 : 1),
      [](void* context, size_t begin, size_t end, int thread) {
        product(*static_cast<const Job*>(context), begin, end, thread);
      },
      &job);
}

// ── rows of a matrix ──────────────────────────────────────────────────────────────────────────────────────────────────

float scale_at(const Segment& segment, const uint8_t* at, size_t index) {
  float lanes[LANES];
  const size_t first = index / LANES * LANES;
  store(lanes, segment.format.wide ? load(reinterpret_cast<const float*>(at) + first)
                                   : load_f16(reinterpret_cast<const uint16_t*>(at) + first));
  return lanes[index % LANES];
}

void decode_row(const Segment& segment, size_t output, float* out) {
  const uint8_t* block = segment.data + output / BLOCK * segment.block_bytes;
  const size_t lane = output % BLOCK;
  if (segment.format.codes == Format::BF16) {
    for (size_t i = 0; i < segment.inputs; ++i) {
      uint16_t half;
      memcpy(&half, block + i / 2 * 64 + lane * 4 + i % 2 * 2, 2);
      const uint32_t word = static_cast<uint32_t>(half) << 16;
      memcpy(out + i, &word, 4);
    }
    return;
  }
  const size_t group = segment.format.codes == Format::W8_GROUP16 ? 16 : GROUP;
  for (size_t g = 0; g * group < segment.inputs; ++g) {
    const float scale = scale_at(segment, block + segment.scales_at, g * BLOCK + lane);
    const float minimum =
        segment.format.minimum ? scale_at(segment, block + segment.minimums_at, g * BLOCK + lane) : 0.0f;
    for (size_t i = g * group; i < (g + 1) * group; ++i) {
      const size_t run = i / 4;
      int code;
      if (segment.format.codes == Format::W4) {
        const uint8_t byte = block[run / 8 * 256 + run % 4 * 64 + lane * 4 + i % 4];
        code = run % 8 < 4 ? byte & 15 : byte >> 4;
      } else {
        code = static_cast<int8_t>(block[run / 8 * 512 + run % 8 * 64 + lane * 4 + i % 4]);
      }
      const float scaled = scale * static_cast<float>(code);
      out[i] = segment.format.minimum ? scaled + minimum : scaled;
    }
  }
}

struct Embed {
  const Linear& table;
  const int32_t* ids;
  float* out;
};

void embed(const Linear& table, const int32_t* ids, size_t rows, float* out, Pool& pool) {
  Embed job{table, ids, out};
  pool.run(
      rows,
      [](void* context, size_t begin, size_t end, int) {
        const Embed& job = *static_cast<const Embed*>(context);
        for (size_t row = begin; row < end; ++row) {
          size_t id = static_cast<size_t>(job.ids[row]);
          const Segment* segment = job.table.segments;
          for (; id >= segment->outputs; ++segment) {
            id -= segment->outputs;
          }
          decode_row(*segment, id, job.out + row * job.table.inputs);
        }
      },
      &job);
}

}  // namespace

const LinearKernels linear_kernels = {scratch_bytes, run, embed};

}  // namespace octavo::OCTAVO_VARIANT
