#include "linear.h"

#include "norm.h"
#include "vec.h"
#if OCTAVO_LEVEL == 3
#include "amx.h"
#endif

namespace octavo::OCTAVO_VARIANT {
namespace {

// ── inputs ────────────────────────────────────────────────────────────────────────────────────────────────────────────

// 32 inputs of a row as int8, with all that a product needs to know of them: one cache line.
struct alignas(64) QuantGroup {
  int8_t codes[GROUP];  // -127 … 127
  float scale;
  float sum;               // scale · sum of codes
  float half_sum[2];       // the same for either half
  int32_t offset;          // -128 · sum of codes: takes back the 128 that makes signed weights unsigned
  int32_t half_offset[2];
};

// A row's QuantGroups or bf16 values are this many groups apart: an odd number, so that rows spread over the cache's sets.
OCTAVO_INLINE size_t row_groups(size_t groups) { return groups | 1; }

#if OCTAVO_LEVEL == 3
using BF16 = uint16_t;
#else
using BF16 = float;  // rounded to bf16, kept as float
#endif

struct Inputs {
  QuantGroup* quantized;  // [rows][row_groups]; a fine row is followed by the row of its remainders
  BF16* rounded;          // [rows][row_groups][32]
  size_t stride;          // row_groups
};

void quantize(const float* x, size_t groups, QuantGroup* out) {
  for (size_t g = 0; g < groups; ++g, x += GROUP) {
    const f32x16 a = load(x), b = load(x + LANES);
    // As integers, magnitudes order like the floats they are and NaN is largest, so that it spoils the row's result.
    const float amax = largest_magnitude(max(bits(magnitude(a)), bits(magnitude(b))));
    const bool nothing = amax < 1e-30f;
    const f32x16 inverse = broadcast(nothing ? 0.0f : 127.0f / amax);
    const f32x16 qa = round(a * inverse), qb = round(b * inverse);
    const f32x16 ca = where_nan(qa, zero(), qa), cb = where_nan(qb, zero(), qb);
    store_low8(out[g].codes, to_int(ca));
    store_low8(out[g].codes + LANES, to_int(cb));
    const float sums[2] = {sum(ca), sum(cb)};
    const float scale = nothing ? 0.0f : amax / 127.0f;
    out[g].scale = scale;
    out[g].sum = scale * (sums[0] + sums[1]);
    for (int half = 0; half < 2; ++half) {
      out[g].half_sum[half] = scale * sums[half];
      out[g].half_offset[half] = -128 * static_cast<int32_t>(sums[half]);
    }
    out[g].offset = out[g].half_offset[0] + out[g].half_offset[1];
  }
}

// x minus what its codes stand for; may be in place.
void remainder(const float* x, size_t groups, const QuantGroup* in, float* out) {
  for (size_t g = 0; g < groups; ++g, x += GROUP, out += GROUP) {
    const f32x16 scale = broadcast(-in[g].scale);
    for (size_t half = 0; half < GROUP; half += LANES) {
      store(out + half, fma(to_float(load_i8(in[g].codes + half)), scale, load(x + half)));
    }
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

// ── integer products of one group: sums[row][half] += weights · codes, in every lane an output ─────────────────────────

template <int CODES>
constexpr int HALVES = CODES == Format::W8_GROUP16 ? 2 : 1;

template <int CODES>
constexpr size_t GROUP_BYTES = CODES == Format::W4 ? 256 : CODES == Format::BF16 ? 1024 : 512;

OCTAVO_INLINE int32_t run_of(const QuantGroup& group, int run) {
  int32_t four;
  memcpy(&four, group.codes + 4 * run, 4);
  return four;
}

#if OCTAVO_LEVEL >= 2

constexpr int MAX_ROWS = 8;

template <int CODES, int R>
OCTAVO_INLINE void dot(const uint8_t* weights, const QuantGroup* in, size_t stride, i32x16 (&sums)[R][HALVES<CODES>]) {
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
    const __m512i sign = _mm512_set1_epi8(-128);  // signed + 128 is unsigned; `offset` takes it back
    OCTAVO_UNROLL
    for (int j = 0; j < 8; ++j) {
      w[j] = _mm512_xor_si512(_mm512_loadu_si512(weights + 64 * j), sign);
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    const QuantGroup& group = in[r * stride];
    if constexpr (CODES == Format::W4) {
      sums[r][0].v = _mm512_setzero_si512();
    } else if constexpr (CODES == Format::W8) {
      sums[r][0].v = _mm512_set1_epi32(group.offset);
    } else {
      sums[r][0].v = _mm512_set1_epi32(group.half_offset[0]);
      sums[r][1].v = _mm512_set1_epi32(group.half_offset[1]);
    }
  }
  OCTAVO_UNROLL
  for (int j = 0; j < 8; ++j) {
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      __m512i& sum = sums[r][HALVES<CODES> == 2 ? j / 4 : 0].v;
      sum = _mm512_dpbusd_epi32(sum, w[j], _mm512_set1_epi32(run_of(in[r * stride], j)));
    }
  }
}

#elif OCTAVO_LEVEL == 1

constexpr int MAX_ROWS = 4;

template <int CODES, int R>
OCTAVO_INLINE void dot(const uint8_t* weights, const QuantGroup* in, size_t stride, i32x16 (&sums)[R][HALVES<CODES>]) {
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (CODES == Format::W4) {
    const __m256i low = _mm256_set1_epi8(15);
    // int16 sums of 16 products of at most 15 · 127: below 32768
    __m256i lo[R], hi[R];
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      lo[r] = hi[r] = _mm256_setzero_si256();
    }
    OCTAVO_UNROLL
    for (int j = 0; j < 4; ++j) {
      const i32x16 both = load_int(weights + 64 * j);
      const __m256i wl = _mm256_and_si256(both.lo, low), wh = _mm256_and_si256(both.hi, low);
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256i a = _mm256_set1_epi32(run_of(in[r * stride], j));
        lo[r] = _mm256_add_epi16(lo[r], _mm256_maddubs_epi16(wl, a));
        hi[r] = _mm256_add_epi16(hi[r], _mm256_maddubs_epi16(wh, a));
      }
      const __m256i ul = _mm256_and_si256(_mm256_srli_epi16(both.lo, 4), low);
      const __m256i uh = _mm256_and_si256(_mm256_srli_epi16(both.hi, 4), low);
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256i a = _mm256_set1_epi32(run_of(in[r * stride], j + 4));
        lo[r] = _mm256_add_epi16(lo[r], _mm256_maddubs_epi16(ul, a));
        hi[r] = _mm256_add_epi16(hi[r], _mm256_maddubs_epi16(uh, a));
      }
    }
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      sums[r][0] = {_mm256_madd_epi16(lo[r], ones), _mm256_madd_epi16(hi[r], ones)};
    }
  } else {
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      OCTAVO_UNROLL
      for (int half = 0; half < HALVES<CODES>; ++half) {
        sums[r][half] = broadcast_int(0);
      }
    }
    OCTAVO_UNROLL
    for (int j = 0; j < 8; ++j) {
      const i32x16 w = load_int(weights + 64 * j);
      const __m256i wl = _mm256_abs_epi8(w.lo), wh = _mm256_abs_epi8(w.hi);  // -128 becomes an unsigned 128
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256i a = _mm256_set1_epi32(run_of(in[r * stride], j));
        // pairs are at most 2 · 128 · 127: below 32768
        const __m256i pl = _mm256_maddubs_epi16(wl, _mm256_sign_epi8(a, w.lo));
        const __m256i ph = _mm256_maddubs_epi16(wh, _mm256_sign_epi8(a, w.hi));
        i32x16& sum = sums[r][HALVES<CODES> == 2 ? j / 4 : 0];
        sum = sum + i32x16{_mm256_madd_epi16(pl, ones), _mm256_madd_epi16(ph, ones)};
      }
    }
  }
}

#else

constexpr int MAX_ROWS = 4;

template <int CODES, int R>
OCTAVO_INLINE void dot(const uint8_t* weights, const QuantGroup* in, size_t stride, i32x16 (&sums)[R][HALVES<CODES>]) {
  for (int r = 0; r < R; ++r) {
    const QuantGroup& group = in[r * stride];
    for (int half = 0; half < HALVES<CODES>; ++half) {
      sums[r][half] = broadcast_int(0);
    }
    for (int run = 0; run < 8; ++run) {
      int32_t* sum = sums[r][HALVES<CODES> == 2 ? run / 4 : 0].v;
      const uint8_t* w = weights + (CODES == Format::W4 ? run % 4 : run) * 64;
      for (size_t lane = 0; lane < LANES; ++lane) {
        for (int i = 0; i < 4; ++i) {
          const uint8_t byte = w[4 * lane + i];
          const int code = CODES != Format::W4 ? static_cast<int8_t>(byte) : run < 4 ? byte & 15 : byte >> 4;
          sum[lane] += code * group.codes[4 * run + i];
        }
      }
    }
  }
}

#endif

// ── a block of weights times R rows: y[row][lane] ──────────────────────────────────────────────────────────────────────

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
// foresee. (bf16 blocks are one stream, and asking makes them slower.)
template <int CODES, bool MINIMUM, bool WIDE>
OCTAVO_INLINE void prefetch(const uint8_t* next_block, size_t group) {
  constexpr size_t BYTES = GROUP_BYTES<CODES> + HALVES<CODES> * (WIDE ? 64 : 32) * (MINIMUM ? 2 : 1);
  for (size_t i = 0; i < BYTES; i += 64) {
    __builtin_prefetch(next_block + group * BYTES + i);
  }
}

template <int CODES, bool MINIMUM, bool WIDE, int R>
OCTAVO_INLINE void quantized_rows(const Segment& segment, const uint8_t* block, const QuantGroup* in, size_t stride,
                                  float (*y)[LANES]) {
  f32x16 acc[R];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    acc[r] = zero();
  }
  for (size_t g = 0; g < segment.groups; ++g) {
    prefetch<CODES, MINIMUM, WIDE>(block + segment.block_bytes, g);
    i32x16 sums[R][HALVES<CODES>];
    dot<CODES, R>(block + g * GROUP_BYTES<CODES>, in + g, stride, sums);
    Scales<CODES, MINIMUM, WIDE> scales;
    scales.load_group(segment, block, g);
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      acc[r] = scales.add(acc[r], sums[r], in[r * stride + g]);
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

constexpr int TILE_ROWS = 16;
constexpr int WORTH_A_TILE = 9;  // rows; fewer go through byte dot products

template <int CODES, int T>
OCTAVO_INLINE void tile_product(const uint8_t* weights, const QuantGroup* in, size_t stride, int half,
                                int32_t (*sums)[LANES]) {
  constexpr int A = 4 + T % 2, B = 6 + T % 2;
  tile_zero<T>();
  tile_load<A>(in->codes + 16 * half, stride * sizeof(QuantGroup));
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

template <int CODES, bool MINIMUM, bool WIDE>
void quantized_tile(const Segment& segment, const uint8_t* block, const uint8_t* codes, const QuantGroup* in,
                    size_t stride, bool first, float (*y)[LANES]) {
  constexpr int N = 4 / HALVES<CODES>;  // groups under way at once
  constexpr size_t BYTES = 512;
  alignas(64) int32_t sums[4][TILE_ROWS][LANES];
  f32x16 acc[TILE_ROWS];
  OCTAVO_UNROLL
  for (int r = 0; r < TILE_ROWS; ++r) {
    acc[r] = zero();
  }
  for (size_t g = 0; g < segment.groups; g += N) {
    const size_t left = segment.groups - g;
    if constexpr (HALVES<CODES> == 2) {
      tile_product<CODES, 0>(codes + g * BYTES, in + g, stride, 0, sums[0]);
      tile_product<CODES, 1>(codes + g * BYTES, in + g, stride, 1, sums[1]);
      if (left > 1) {
        tile_product<CODES, 2>(codes + (g + 1) * BYTES, in + g + 1, stride, 0, sums[2]);
        tile_product<CODES, 3>(codes + (g + 1) * BYTES, in + g + 1, stride, 1, sums[3]);
      }
    } else {
      tile_product<CODES, 0>(codes + g * BYTES, in + g, stride, 0, sums[0]);
      if (left > 1) tile_product<CODES, 1>(codes + (g + 1) * BYTES, in + g + 1, stride, 0, sums[1]);
      if (left > 2) tile_product<CODES, 2>(codes + (g + 2) * BYTES, in + g + 2, stride, 0, sums[2]);
      if (left > 3) tile_product<CODES, 3>(codes + (g + 3) * BYTES, in + g + 3, stride, 0, sums[3]);
    }
    for (size_t n = 0; n < (left < N ? left : N); ++n) {
      if (first) {
        prefetch<CODES, MINIMUM, WIDE>(block + segment.block_bytes, g + n);
      }
      Scales<CODES, MINIMUM, WIDE> scales;
      scales.load_group(segment, block, g + n);
      OCTAVO_UNROLL
      for (int r = 0; r < TILE_ROWS; ++r) {
        i32x16 row[HALVES<CODES>];
        OCTAVO_UNROLL
        for (int half = 0; half < HALVES<CODES>; ++half) {
          row[half] = load_int(sums[n * HALVES<CODES> + static_cast<size_t>(half)][r]);
        }
        acc[r] = scales.add(acc[r], row, in[r * stride + g + n]);
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
constexpr int TILE_ROWS = MAX_ROWS;
#endif

// What a thread keeps while the rows pass by a block.
struct Work {
  Tiles& tiles;
  uint8_t* bytes;        // room for a block's 4-bit codes unpacked
  const uint8_t* block;  // the block that the last rows met
};

// Rows first … first + rows - 1 (at most TILE_ROWS) times a block. Inputs have room for TILE_ROWS rows from `first` on.
using BlockKernel = void (*)(const Segment&, const uint8_t* block, const Inputs&, size_t first, int rows, Work&,
                             float (*y)[LANES]);

template <int CODES, bool MINIMUM, bool WIDE>
void quantized_block(const Segment& segment, const uint8_t* block, const Inputs& inputs, size_t first, int rows,
                     [[maybe_unused]] Work& work, float (*y)[LANES]) {
  const QuantGroup* in = inputs.quantized + first * inputs.stride;
#if OCTAVO_LEVEL == 3
  if (rows >= WORTH_A_TILE) {
    const bool first = work.block != block;
    work.block = block;
    if (CODES == Format::W4 && first) {
      unpack(segment, block, work.bytes);
    }
    work.tiles.configure(GROUP / HALVES<CODES>, GROUP / HALVES<CODES>);
    quantized_tile<CODES, MINIMUM, WIDE>(segment, block, CODES == Format::W4 ? work.bytes : block, in, inputs.stride,
                                         first, y);
    return;
  }
#endif
#define OCTAVO_ROWS(R)                                                                            \
  for (; rows >= R; rows -= R, y += R, in += R * inputs.stride) {                                 \
    quantized_rows<CODES, MINIMUM, WIDE, R>(segment, block, in, inputs.stride, y);                \
  }
#if OCTAVO_LEVEL >= 2
  OCTAVO_ROWS(8)
#endif
  OCTAVO_ROWS(4)
  OCTAVO_ROWS(2)
  OCTAVO_ROWS(1)
#undef OCTAVO_ROWS
}

void bf16_block(const Segment& segment, const uint8_t* block, const Inputs& inputs, size_t first, int rows,
                [[maybe_unused]] Work& work, float (*y)[LANES]) {
  const BF16* in = inputs.rounded + first * inputs.stride * GROUP;
#if OCTAVO_LEVEL == 3
  static_cast<void>(rows);
  work.tiles.configure(2 * GROUP, 2 * GROUP);
  bf16_tile(segment, block, in, inputs.stride, y);
#else
#define OCTAVO_ROWS(R)                                                                 \
  for (; rows >= R; rows -= R, y += R, in += R * inputs.stride * GROUP) {              \
    bf16_rows<R>(segment, block, in, inputs.stride, y);                                \
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

constexpr BlockKernel BLOCK_KERNELS[Format::COUNT] = {
    quantized_block<Format::W4, false, false>,         quantized_block<Format::W4, false, true>,
    quantized_block<Format::W4, true, false>,          quantized_block<Format::W4, true, true>,
    quantized_block<Format::W8, false, false>,         quantized_block<Format::W8, false, true>,
    quantized_block<Format::W8, true, false>,          quantized_block<Format::W8, true, true>,
    quantized_block<Format::W8_GROUP16, false, false>, quantized_block<Format::W8_GROUP16, false, true>,
    quantized_block<Format::W8_GROUP16, true, false>,  quantized_block<Format::W8_GROUP16, true, true>,
    bf16_block,
};

// ── a whole linear ────────────────────────────────────────────────────────────────────────────────────────────────────

constexpr size_t PANEL_BYTES = 512 << 10;  // inputs that stay in a core's second-level cache while weights pass by

OCTAVO_INLINE size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

struct Layout {  // of the scratch memory
  size_t groups, stride, codes_a_row, padded_rows;
  bool quantized, rounded;
  size_t rounded_at, threads_at, thread_bytes, row_floats, bytes;

  Layout(const Linear& linear, size_t rows, int num_threads) {
    groups = up(linear.inputs, GROUP) / GROUP;
    stride = row_groups(groups);
    codes_a_row = linear.fine ? 2 : 1;
    padded_rows = up(rows * codes_a_row, TILE_ROWS);
    quantized = rounded = false;
    for (size_t i = 0; i < linear.num_segments; ++i) {
      (linear.segments[i].format.codes == Format::BF16 ? rounded : quantized) = true;
    }
    rounded_at = quantized ? padded_rows * stride * sizeof(QuantGroup) : 0;
    threads_at = rounded_at + (rounded ? padded_rows * stride * GROUP * sizeof(BF16) : 0);
    row_floats = groups * GROUP;
    thread_bytes = row_floats * sizeof(float) + 2 * groups * 512 + 4096;  // a row, two blocks unpacked, a gap
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
    QuantGroup* out = job.inputs.quantized + row * job.layout.codes_a_row * job.layout.stride;
    quantize(x, job.layout.groups, out);
    if (call.linear->fine) {
      remainder(x, job.layout.groups, out, padded);
      quantize(padded, job.layout.groups, out + job.layout.stride);
    }
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

// `rows` rows from `first` on times a block; fine inputs have two rows of codes each, whose results are added.
void multiply(const Job& job, const Place& place, size_t first, int rows, Work& work, float (*y)[LANES]) {
  const int format = place.segment->format.index();
  const size_t n = place.segment->format.codes == Format::BF16 ? 1 : job.layout.codes_a_row;
  BLOCK_KERNELS[format](*place.segment, place.block, job.inputs, first * n, rows * static_cast<int>(n), work, y);
  for (int r = 0; n == 2 && r < rows; ++r) {
    store(y[r], load(y[2 * r]) + load(y[2 * r + 1]));
  }
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
  const size_t row_bytes = job.layout.stride * sizeof(QuantGroup) * job.layout.codes_a_row;
  const size_t tile = TILE_ROWS / job.layout.codes_a_row;
  const size_t fit = PANEL_BYTES / row_bytes / TILE_ROWS * TILE_ROWS;
  const size_t panel = fit ? fit : TILE_ROWS;

  Tiles tiles;
  uint8_t* bytes = reinterpret_cast<uint8_t*>(job.own(thread) + job.layout.row_floats * sizeof(float));
  Work work{tiles, bytes, nullptr}, up_work{tiles, bytes + job.layout.groups * 512, nullptr};
  alignas(64) float y[TILE_ROWS][LANES], up_y[TILE_ROWS][LANES];

  for (size_t panel_start = 0; panel_start < call.rows; panel_start += panel) {
    const size_t panel_end = panel_start + panel < call.rows ? panel_start + panel : call.rows;
    for (size_t b = begin; b < end; ++b) {
      const Place place = place_of(linear, b);
      const Place up_place = place_of(linear, gate_up ? b + num_blocks : b);
      for (size_t row = panel_start; row < panel_end; row += tile) {
        const size_t left = panel_end - row;
        const int rows = static_cast<int>(left < tile ? left : tile);
        multiply(job, place, row, rows, work, y);
        if (gate_up) {
          multiply(job, up_place, row, rows, up_work, up_y);
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
                reinterpret_cast<BF16*>(job.scratch + job.layout.rounded_at), job.layout.stride};
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
