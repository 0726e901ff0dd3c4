// How fast this machine reads memory and multiplies: the bounds that the kernels are held against.
//
// Products load their operands from the first-level cache, as a matrix product must that is not to be held up elsewhere,
// and are those of the linear kernels: the same instructions on the same types, without what surrounds them there
// (unpacking, scales, minimums, rounding).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "dispatch.h"
#include "parallel.h"

namespace octavo {

struct ProbeKernels {
  enum Product { INT8, BF16, FLOAT32, COUNT };
  static constexpr size_t CHUNK = 64 << 10;  // bytes that a thread takes at once

  // Seconds for all threads together to read the memory once; `bytes` is a multiple of CHUNK.
  double (*read)(const uint8_t* memory, size_t bytes, Pool& pool);
  // Operations a second of all threads together, two for each product that is added. Takes some 50 ms.
  double (*multiply)(int product, Pool& pool);
};

OCTAVO_KERNELS(ProbeKernels, probe)

}  // namespace octavo
