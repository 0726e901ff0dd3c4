// Weight matrices into the order that linear.h describes. No arithmetic but the rounding of float32 to bf16.
#pragma once

#include "linear.h"
#include "memory.h"

namespace octavo {

// An empty matrix of this format, its memory taken from the arena.
Segment make_segment(Arena& arena, Format format, size_t outputs, size_t inputs);

// Rows first … first + rows - 1. codes: one byte each, [rows, inputs]; scales, minimums: [rows, inputs / group].
void pack_quantized(const Segment& segment, size_t first, size_t rows, const uint8_t* codes, const float* scales,
                    const float* minimums);
void pack_bf16(const Segment& segment, size_t first, size_t rows, const float* values);

// Whether f16 holds all of these values exactly.
bool fit_f16(const float* values, size_t count);

}  // namespace octavo
