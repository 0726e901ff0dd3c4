// What is asked of rows of logits: the largest, and exponentials.
#pragma once

#include <stddef.h>

#include "dispatch.h"

namespace octavo {

constexpr size_t SPAN = 64;  // logits that are passed over at once where their largest says so

struct LogitKernels {
  // out = the largest of each SPAN of n logits. Whether there is a NaN, in which case `out` means nothing.
  bool (*maxima)(const float* logits, size_t n, float* out);
  // out = exp((logits - largest) · scale); out may be `logits`.
  void (*exponentials)(const float* logits, size_t n, float largest, float scale, float* out);
  // The sum of those, in an order that depends on n alone.
  double (*total)(const float* logits, size_t n, float largest, float scale);
};

OCTAVO_KERNELS(LogitKernels, logit)

}  // namespace octavo
