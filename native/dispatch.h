// Which instruction-set variants of the kernels there are, and what this machine can run.
//
// Every kernel exists once for each variant, with the same bits for the same inputs; a Kernels table holds one variant's.
#pragma once

#include <stddef.h>

#if defined(OCTAVO_EMULATED)
#define OCTAVO_VARIANTS(X) X(generic) X(avx512) X(amx)
#elif defined(__x86_64__)
#define OCTAVO_VARIANTS(X) X(generic) X(avx2) X(avx512) X(amx)
#else
#define OCTAVO_VARIANTS(X) X(generic)
#endif

// Declares the table of a kernel family in each variant's namespace: OCTAVO_KERNELS(RopeKernels, rope).
#define OCTAVO_KERNELS(Type, family)                                      \
  namespace generic { extern const octavo::Type family##_kernels; }      \
  namespace avx2 { extern const octavo::Type family##_kernels; }         \
  namespace avx512 { extern const octavo::Type family##_kernels; }       \
  namespace amx { extern const octavo::Type family##_kernels; }

namespace octavo {

struct LinearKernels;
struct RopeKernels;
struct AttentionKernels;
struct LogitKernels;
struct ProbeKernels;

struct Kernels {
  const char* variant;
  const LinearKernels* linear;
  const RopeKernels* rope;
  const AttentionKernels* attention;
  const LogitKernels* logit;
  const ProbeKernels* probe;
};

// The variants this machine can run, slowest first, ended by a null pointer. The first call asks the system for the AMX
// tile registers; threads that use them must start later.
const Kernels* const* available_kernels();

}  // namespace octavo
