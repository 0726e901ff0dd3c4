// AMX tiles: eight registers of up to 16 rows of 64 bytes. Written out because GCC 12's intrinsics tell the compiler
// neither which memory a tile load reads nor that the configuration is 64 bytes long.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(OCTAVO_EMULATED)
#include "emulated.h"
#else

namespace octavo::OCTAVO_VARIANT {
namespace {

struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

inline void tile_configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory"); }
inline void tile_release() { asm volatile("tilerelease" : : : "memory"); }

template <int T>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
inline void tile_load(const void* from, size_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(stride) : "memory");
}
template <int T>
inline void tile_store(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(stride) : "memory");
}
// C += A · B, A of signed bytes, B of unsigned (bsud) or signed (bssd) bytes, or both bf16.
template <int C, int A, int B>
inline void tile_dpbsud() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void tile_dpbssd() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void tile_dpbf16ps() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace
}  // namespace octavo::OCTAVO_VARIANT

#endif
