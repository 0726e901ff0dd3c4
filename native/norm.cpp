#include "norm.h"

#include "vec.h"

namespace octavo::OCTAVO_VARIANT {

void rms_norm(const float* x, const float* weight, float eps, size_t n, float* out) {
  const size_t whole = n / LANES * LANES, left = n - whole;
  f32x16 squares = zero();
  for (size_t i = 0; i < whole; i += LANES) {
    const f32x16 a = load(x + i);
    squares = fma(a, a, squares);
  }
  if (left) {
    const f32x16 a = load_first(x + whole, left);
    squares = fma(a, a, squares);
  }
  const float mean = sum(squares) / static_cast<float>(n);
  const f32x16 factor = broadcast(1.0f / __builtin_sqrtf(mean + eps));
  for (size_t i = 0; i < whole; i += LANES) {
    store(out + i, load(x + i) * factor * load(weight + i));
  }
  if (left) {
    store_first(out + whole, left, load_first(x + whole, left) * factor * load_first(weight + whole, left));
  }
}

}  // namespace octavo::OCTAVO_VARIANT
