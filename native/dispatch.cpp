#include "dispatch.h"

#include "attention.h"
#include "linear.h"
#include "logits.h"
#include "probe.h"
#include "rope.h"

#if defined(__x86_64__) && !defined(OCTAVO_EMULATED)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

#define TABLE(name)                                                                                             \
  constexpr Kernels name##_table = {#name, &name::linear_kernels, &name::rope_kernels, &name::attention_kernels, \
                                   &name::logit_kernels, &name::probe_kernels};
OCTAVO_VARIANTS(TABLE)
#undef TABLE

bool runs_generic() { return true; }

#if defined(OCTAVO_EMULATED)

bool runs_avx512() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool runs_amx() { return runs_avx512(); }

#elif defined(__x86_64__)

struct Cpu {
  unsigned ecx1 = 0, ebx7 = 0, ecx7 = 0, edx7 = 0, xcr0 = 0;

  Cpu() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx1, &edx) || !(ecx1 >> 27 & 1)) {  // OSXSAVE: xgetbv may be asked
      return;
    }
    unsigned high;
    asm volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
      ebx7 = ebx;
      ecx7 = ecx;
      edx7 = edx;
    }
  }
};

const Cpu& cpu() {
  static const Cpu cpu;
  return cpu;
}

bool has(unsigned word, unsigned wanted) { return (word & wanted) == wanted; }

bool runs_avx2() {
  return has(cpu().xcr0, 0x6) && has(cpu().ecx1, 1u << 12 | 1u << 28 | 1u << 29) &&  // FMA, AVX, F16C
         has(cpu().ebx7, 1u << 5);
}

bool runs_avx512() {
  return runs_avx2() && has(cpu().xcr0, 0xe6) && has(cpu().ebx7, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) &&
         has(cpu().ecx7, 1u << 11);  // F, DQ, BW, VL; VNNI
}

bool runs_amx() {
  if (!runs_avx512() || !has(cpu().xcr0, 0x60000) || !has(cpu().edx7, 1u << 22 | 1u << 24 | 1u << 25)) {
    return false;  // BF16, TILE, INT8
  }
#if defined(__linux__)
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILE_DATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILE_DATA) == 0;
#else
  return false;
#endif
}

#endif

struct Available {
  const Kernels* tables[5] = {};

  Available() {
    size_t n = 0;
#define ADD(name)                  \
  if (runs_##name()) {             \
    tables[n++] = &name##_table;   \
  }
    OCTAVO_VARIANTS(ADD)
#undef ADD
  }
};

}  // namespace

const Kernels* const* available_kernels() {
  static const Available available;
  return available.tables;
}

}  // namespace octavo
