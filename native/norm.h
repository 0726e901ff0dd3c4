// RMS norm of one row, for the kernels that begin with it.
#pragma once

#include "vec.h"

namespace octavo::OCTAVO_VARIANT {
namespace {

// out = x / sqrt(mean(x²) + eps) · weight, n floats; out may be x. The squares are summed in 4 × 16 chains, always.
OCTAVO_INLINE void rms_norm(const float* x, const float* weight, float eps, size_t n, float* out) {
  f32x16 squares[4] = {zero(), zero(), zero(), zero()};
  const size_t whole = n / LANES * LANES;
  size_t i = 0;
  for (; i + 4 * LANES <= whole; i += 4 * LANES) {
    for (size_t chain = 0; chain < 4; ++chain) {
      const f32x16 a = load(x + i + chain * LANES);
      squares[chain] = fma(a, a, squares[chain]);
    }
  }
  for (size_t chain = 0; i < n; i += LANES, ++chain) {
    const f32x16 a = i < whole ? load(x + i) : load_first(x + i, n - i);
    squares[chain] = fma(a, a, squares[chain]);
  }
  const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const f32x16 scale = broadcast(1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps));
  for (i = 0; i < whole; i += LANES) {
    store(out + i, load(x + i) * scale * load(weight + i));
  }
  if (i < n) {
    store_first(out + i, n - i, load_first(x + i, n - i) * scale * load_first(weight + i, n - i));
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_VARIANT
