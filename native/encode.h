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
    store_low8(codes + d, items == Items::INT8   ? to_int(values)
                          : items == Items::E4M3 ? fp8_of<3>(values)
                                                 : fp8_of<2>(values));
  }
  return scale.bf16;
}

// The levels nearest to some magnitudes and their numbers, of `count` levels.
struct Nearest {
  f32x16 level, index;
};

OCTAVO_INLINE Nearest nearest(f32x16 sizes, const int8_t* levels, size_t count) {
  Nearest found = {broadcast(levels[0]), zero()};
  for (size_t i = 1; i < count; ++i) {
    const f32x16 middle = broadcast(static_cast<float>(levels[i - 1] + levels[i]) * 0.5f);
    found.level = where_less(middle, sizes, broadcast(levels[i]), found.level);
    found.index = where_less(middle, sizes, broadcast(static_cast<float>(i)), found.index);
  }
  return found;
}

struct Levels {
  const int8_t* of;
  size_t count;
};

constexpr float FACTORS[5] = {1.0f, 0.9f, 0.8f, 0.7f, 0.6f};

// Codes of a head whose halves have levels of their own, sign · count + index. Of five scales, that of the least error.
uint16_t encode4(const float* head, size_t dim, const Levels (&levels)[2], uint8_t* codes) {
  const size_t half = dim / 2;
  float need = 0.0f;
  for (size_t h = 0; h < 2; ++h) {
    const float part = magnitude_of(head + h * half, half) * (1.0f / levels[h].of[levels[h].count - 1]);
    need = part > need || part != part ? part : need;  // NaN stays
  }
  Scale best = scale_of(need, 1.0f);
  float least = __builtin_inff();
  for (const float factor : FACTORS) {
    const Scale scale = scale_of(need, factor);
    f32x16 errors = zero();
    for (size_t h = 0; h < 2; ++h) {
      for (size_t i = 0; i < half; i += LANES) {
        const f32x16 sizes = magnitude(units(load_next(head + h * half + i, half - i), scale.inverse));
        const f32x16 error = nearest(sizes, levels[h].of, levels[h].count).level - sizes;
        const f32x16 square = error * error;
        errors = errors + (half - i < LANES ? where_first(half - i, square, zero()) : square);
      }
    }
    const float error = sum(errors) * (scale.value * scale.value);
    if (error < least) {
      least = error;
      best = scale;
    }
  }
  for (size_t h = 0; h < 2; ++h) {
    for (size_t i = 0; i < half; i += LANES) {
      const size_t n = half - i < LANES ? half - i : LANES;
      const f32x16 values = units(load_next(head + h * half + i, n), best.inverse);
      const i32x16 sign = shift_right<31>(bits(values)) * broadcast_int(static_cast<int>(levels[h].count));
      uint8_t bytes[LANES];
      store_low8(bytes, to_int(nearest(magnitude(values), levels[h].of, levels[h].count).index) + sign);
      memcpy(codes + h * half + i, bytes, n);
    }
  }
  return best.bf16;
}

constexpr Levels K_CODES[2] = {{FAST_LEVELS, 8}, {SLOW_LEVELS, 16}};
constexpr Levels V_CODES[2] = {{V_LEVELS, 8}, {V_LEVELS, 8}};

}  // namespace
}  // namespace octavo::OCTAVO_VARIANT
