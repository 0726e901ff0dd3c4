#include "logits.h"

#include "vec.h"

namespace octavo::OCTAVO_VARIANT {
namespace {

constexpr float IMPOSSIBLE = -__builtin_inff();
constexpr size_t CHAINS = 4;
constexpr size_t CHUNK = 16 * CHAINS * LANES;  // logits whose exponentials are summed in float32

OCTAVO_INLINE f32x16 lanes_of(const float* logits, size_t n, size_t at) {
  return n - at >= LANES ? load(logits + at) : load_first(logits + at, n - at, IMPOSSIBLE);
}

bool maxima(const float* logits, size_t n, float* out) {
  f32x16 broken = zero();
  for (size_t begin = 0; begin < n; begin += SPAN) {
    f32x16 most = broadcast(IMPOSSIBLE);
    for (size_t at = begin; at < begin + SPAN && at < n; at += LANES) {
      const f32x16 a = lanes_of(logits, n, at);
      broken = where_nan(a, broadcast(1.0f), broken);
      most = max(a, most);
    }
    out[begin / SPAN] = largest(most);
  }
  return largest(broken) != 0.0f;
}

OCTAVO_INLINE f32x16 exponential(f32x16 logits, float most, float scale) {
  return exp((logits - broadcast(most)) * broadcast(scale));
}

void exponentials(const float* logits, size_t n, float most, float scale, float* out) {
  for (size_t at = 0; at < n; at += LANES) {
    store_first(out + at, n - at, exponential(lanes_of(logits, n, at), most, scale));
  }
}

double total(const float* logits, size_t n, float most, float scale) {
  double whole = 0.0;
  for (size_t begin = 0; begin < n; begin += CHUNK) {
    f32x16 chains[CHAINS] = {zero(), zero(), zero(), zero()};
    for (size_t at = begin; at < begin + CHUNK && at < n; at += CHAINS * LANES) {
      OCTAVO_UNROLL
      for (size_t chain = 0; chain < CHAINS; ++chain) {
        const size_t place = at + chain * LANES;
        if (place < n) {
          chains[chain] = chains[chain] + exponential(lanes_of(logits, n, place), most, scale);
        }
      }
    }
    whole += static_cast<double>(sum((chains[0] + chains[1]) + (chains[2] + chains[3])));
  }
  return whole;
}

}  // namespace

const LogitKernels logit_kernels = {maxima, exponentials, total};

}  // namespace octavo::OCTAVO_VARIANT
