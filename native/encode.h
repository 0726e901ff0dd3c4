// From heads to codes of a byte or less. The specification is ops/codes.py, bit for bit.
#pragma once

#include "codes.h"

namespace octavo::OCTAVO_VARIANT {
namespace {

constexpr float LEAST = 0x1p-40f, MOST = 0x1p60f;  // heads of smaller numbers are zero, larger numbers saturate

// The next of `left` numbers, then zeros.
OCTAVO_INLINE f32x16 load_next(const float* p, size_t left) { return left < LANES ? load_first(p, left) : load(p); }

float magnitude_of(const float* values, size_t count) {
  i32x16 most = broadcast_int(0);
  for (size_t i = 0; i < count; i += LANES) {
    most = max(most, bits(magnitude(load_next(values + i, count - i))));
  }
  return largest_magnitude(most);
}

// A scale in bf16, and what numbers are multiplied by to be codes: 0 where all are to be zero, or none is finite.
struct Scale {
  uint16_t bf16;
  float value, inverse;
};

Scale scale_of(float magnitude, float factor) {
  if (magnitude < LEAST) {
    return {0, 0.0f, 0.0f};
  }
  if (!(magnitude < __builtin_inff())) {
    return {0x7fc0, __builtin_nanf(""), 0.0f};
  }
  uint16_t halves[LANES];
  store_bf16(halves, broadcast((magnitude < MOST ? magnitude : MOST) * factor));
  const uint32_t word = static_cast<uint32_t>(halves[0]) << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return {halves[0], value, 1.0f / value};
}

// In units of a scale; 0 where that is far below all codes, or NaN.
OCTAVO_INLINE f32x16 units(f32x16 values, float inverse) {
  const f32x16 scaled = values * broadcast(inverse);
  return where_less(broadcast(0x1p-20f), magnitude(scaled), scaled, zero());
}

// Sign, exponent and MANTISSA bits of a float16, as a byte; numbers of at most 1.75 leave the first exponent bit out.
template <int MANTISSA>
OCTAVO_INLINE i32x16 fp8_of(f32x16 values) {
  constexpr int CUT = 23 - MANTISSA;
  const f32x16 size = magnitude(values);
  const i32x16 word = bits(size);
  const i32x16 odd = shift_right<CUT>(word) & broadcast_int(1);
  const i32x16 normal = shift_right<CUT>(word + odd + broadcast_int((1 << (CUT - 1)) - 1)) + broadcast_int(-(112 << MANTISSA));
  const i32x16 small = to_int(size * broadcast(static_cast<float>(1 << (14 + MANTISSA))));
  const f32x16 code = where_less(size, broadcast(0x1p-14f), from_bits(small), from_bits(normal));
  return bits(code) + (shift_right<24>(bits(values)) & broadcast_int(0x80));
}

// Bytes of a head of numbers, one each: `top` is what the largest becomes.
uint16_t encode8(Items items, const float* head, size_t dim, uint8_t* codes) {
  const float top = items == Items::INT8 ? 127.0f : items == Items::E4M3 ? 1.75f : 57344.0f;
  const Scale scale = scale_of(magnitude_of(head, dim), 1.0f / top);
  for (size_t d = 0; d < dim; d += LANES) {
    const f32x16 values = min(max(units(load(head + d), scale.inverse), broadcast(-top)), broadcast(top));
    store(codes + d, low8(items == Items::INT8   ? to_int(values)
                          : items == Items::E4M3 ? fp8_of<3>(values)
                                                 : fp8_of<2>(values)));
  }
  return scale.bf16;
}

// Twice the middles between levels, less 128, in each lane. As they are whole, a number's double is above one if it is
// once it has been rounded up.
struct Middles {
  int8_t of[15][LANES];
};

constexpr Middles middles_of(const int8_t (&levels)[16]) {
  Middles middles = {};
  for (size_t k = 0; k < 15; ++k) {
    for (size_t i = 0; i < LANES; ++i) {
      middles.of[k][i] = static_cast<int8_t>(levels[k] + levels[k + 1] - 128);
    }
  }
  return middles;
}

constexpr Middles V_MIDDLES = middles_of(V_LEVELS), FAST_MIDDLES = middles_of(FAST_LEVELS),
                  SLOW_MIDDLES = middles_of(SLOW_LEVELS);

struct Levels {
  const int8_t* of;
  const Middles* middles;
  size_t count;
};

// Numbers of the levels nearest to some magnitudes, the lower one in the middle.
OCTAVO_INLINE u8x16 nearest(f32x16 sizes, const Levels& levels) {
  const i32x16 doubled = to_int(min(ceil(sizes + sizes), broadcast(255.0f)));
  const u8x16 bytes = low8(doubled + broadcast_int(-128));
  return levels.count == 8 ? count_above<7>(bytes, levels.middles->of) : count_above<15>(bytes, levels.middles->of);
}

constexpr size_t NUM_FACTORS = 5;
constexpr float FACTORS[NUM_FACTORS] = {1.0f, 0.9f, 0.8f, 0.7f, 0.6f};

// Codes of a head whose halves have levels of their own, sign · count + index. Of five scales, that of the least error.
uint16_t encode4(const float* head, size_t dim, const Levels (&levels)[2], uint8_t* codes) {
  const size_t half = dim / 2;
  float need = 0.0f;
  for (size_t h = 0; h < 2; ++h) {
    const float part = magnitude_of(head + h * half, half) * (1.0f / levels[h].of[levels[h].count - 1]);
    need = part > need || part != part ? part : need;  // NaN stays
  }
  // All errors before any is looked at: a wrong guess would have to wait for one, five times over.
  Scale scales[NUM_FACTORS];
  float errors[NUM_FACTORS];
  for (size_t f = 0; f < NUM_FACTORS; ++f) {
    scales[f] = scale_of(need, FACTORS[f]);
    f32x16 squares = zero();
    for (size_t h = 0; h < 2; ++h) {
      for (size_t i = 0; i < half; i += LANES) {
        const f32x16 sizes = magnitude(units(load_next(head + h * half + i, half - i), scales[f].inverse));
        const f32x16 error = signed_float(look_up(nearest(sizes, levels[h]), levels[h].of)) - sizes;
        const f32x16 square = error * error;
        squares = squares + (half - i < LANES ? where_first(half - i, square, zero()) : square);
      }
    }
    errors[f] = sum(squares) * (scales[f].value * scales[f].value);
  }
  Scale best = scales[0];
  float least = __builtin_inff();
  for (size_t f = 0; f < NUM_FACTORS; ++f) {
    if (errors[f] < least) {
      least = errors[f];
      best = scales[f];
    }
  }
  for (size_t h = 0; h < 2; ++h) {
    for (size_t i = 0; i < half; i += LANES) {
      const size_t n = half - i < LANES ? half - i : LANES;
      const f32x16 values = units(load_next(head + h * half + i, n), best.inverse);
      const i32x16 sign = shift_right<31>(bits(values)) * broadcast_int(static_cast<int>(levels[h].count));
      uint8_t bytes[LANES];
      store(bytes, nearest(magnitude(values), levels[h]) + low8(sign));
      memcpy(codes + h * half + i, bytes, n);
    }
  }
  return best.bf16;
}

constexpr Levels K_CODES[2] = {{FAST_LEVELS, &FAST_MIDDLES, 8}, {SLOW_LEVELS, &SLOW_MIDDLES, 16}};
constexpr Levels V_CODES[2] = {{V_LEVELS, &V_MIDDLES, 8}, {V_LEVELS, &V_MIDDLES, 8}};

}  // namespace
}  // namespace octavo::OCTAVO_VARIANT
