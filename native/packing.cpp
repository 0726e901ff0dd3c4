#include "packing.h"

#include <cmath>
#include <cstring>

namespace octavo {
namespace {

constexpr size_t LINE = 64;

size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

size_t code_bytes(int codes) { return codes == Format::W4 ? 256 : codes == Format::BF16 ? 1024 : 512; }

// Of a value that f16 holds exactly.
uint16_t f16_of(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  const uint16_t sign = static_cast<uint16_t>(word >> 16 & 0x8000);
  const float size = std::fabs(value);
  if (size < 0x1p-14f) {
    return sign | static_cast<uint16_t>(size * 0x1p24f);
  }
  return sign | static_cast<uint16_t>(((word & 0x7fffffff) >> 13) - (112u << 10));
}

uint16_t bf16_of(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if (std::isnan(value)) {
    return 0x7fc0;
  }
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

void put(const Segment& segment, uint8_t* at, size_t index, float value) {
  if (segment.format.wide) {
    std::memcpy(at + 4 * index, &value, 4);
  } else {
    const uint16_t half = f16_of(value);
    std::memcpy(at + 2 * index, &half, 2);
  }
}

}  // namespace

bool fit_f16(const float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float size = std::fabs(values[i]);
    if (!(size <= 65504.0f)) {
      return false;
    }
    if (size < 0x1p-14f) {
      if (size * 0x1p24f != std::floor(size * 0x1p24f)) {
        return false;
      }
    } else {
      uint32_t word;
      std::memcpy(&word, &size, 4);
      if (word & 0x1fff) {
        return false;
      }
    }
  }
  return true;
}

Segment make_segment(Arena& arena, Format format, size_t outputs, size_t inputs) {
  Segment segment{};
  segment.format = format;
  segment.outputs = outputs;
  segment.inputs = inputs;
  segment.groups = up(inputs, GROUP) / GROUP;
  segment.num_blocks = up(outputs, BLOCK) / BLOCK;
  segment.scales_at = segment.groups * code_bytes(format.codes);
  size_t scale_bytes = segment.groups * BLOCK * (format.wide ? 4 : 2);
  scale_bytes *= format.codes == Format::W8_GROUP16 ? 2 : 1;
  scale_bytes *= format.codes == Format::BF16 ? 0 : 1;
  segment.minimums_at = segment.scales_at + scale_bytes;
  segment.block_bytes = up(segment.minimums_at + (format.minimum ? scale_bytes : 0), LINE);
  segment.data = static_cast<uint8_t*>(arena.allocate(segment.num_blocks * segment.block_bytes));
  return segment;
}

void pack_quantized(const Segment& segment, size_t first, size_t rows, const uint8_t* codes, const float* scales,
                    const float* minimums) {
  const size_t group = segment.format.codes == Format::W8_GROUP16 ? 16 : GROUP;
  const size_t num_scales = segment.inputs / group;
  for (size_t row = 0; row < rows; ++row) {
    const size_t output = first + row;
    uint8_t* block = segment.data + output / BLOCK * segment.block_bytes;
    const size_t lane = output % BLOCK;
    const uint8_t* in = codes + row * segment.inputs;
    if (segment.format.codes == Format::W4) {
      for (size_t pair = 0; pair < segment.inputs / 8; ++pair) {  // of runs, j and j + 4 of a group
        uint32_t low, high;
        std::memcpy(&low, in + pair / 4 * GROUP + pair % 4 * 4, 4);
        std::memcpy(&high, in + pair / 4 * GROUP + pair % 4 * 4 + GROUP / 2, 4);
        const uint32_t both = (low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4;
        std::memcpy(block + pair * 64 + lane * 4, &both, 4);
      }
    } else {
      for (size_t run = 0; run < segment.inputs / 4; ++run) {  // inputs are a multiple of 16
        std::memcpy(block + run * 64 + lane * 4, in + 4 * run, 4);
      }
    }
    for (size_t g = 0; g < num_scales; ++g) {
      put(segment, block + segment.scales_at, g * BLOCK + lane, scales[row * num_scales + g]);
      if (minimums) {
        put(segment, block + segment.minimums_at, g * BLOCK + lane, minimums[row * num_scales + g]);
      }
    }
  }
}

void pack_bf16(const Segment& segment, size_t first, size_t rows, const float* values) {
  for (size_t row = 0; row < rows; ++row) {
    const size_t output = first + row;
    uint8_t* block = segment.data + output / BLOCK * segment.block_bytes;
    const size_t lane = output % BLOCK;
    for (size_t i = 0; i < segment.inputs; ++i) {
      const uint16_t half = bf16_of(values[row * segment.inputs + i]);
      std::memcpy(block + i / 2 * 64 + lane * 4 + i % 2 * 2, &half, 2);
    }
  }
}

}  // namespace octavo
