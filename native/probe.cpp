#include "probe.h"

#include <time.h>

#include "vec.h"
#if OCTAVO_LEVEL == 3
#include "amx.h"
#endif

namespace octavo::OCTAVO_VARIANT {
namespace {

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Makes the compiler believe that the value is used, and that memory has changed.
template <class T>
OCTAVO_INLINE void use(const T& value) {
  asm volatile("" : : "r"(&value) : "memory");
}

// ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────

void read_chunks(const uint8_t* memory, size_t bytes) {
  i32x16 sums[4] = {broadcast_int(0), broadcast_int(0), broadcast_int(0), broadcast_int(0)};
  for (const uint8_t* end = memory + bytes; memory < end; memory += 4 * 64) {
    OCTAVO_UNROLL
    for (size_t i = 0; i < 4; ++i) {
      sums[i] = sums[i] + load_int(memory + 64 * i);
    }
  }
  use(sums);
}

double read(const uint8_t* memory, size_t bytes, Pool& pool) {
  const double start = now();
  pool.run(
      bytes / ProbeKernels::CHUNK,
      [](void* context, size_t begin, size_t end, int) {
        const uint8_t* memory = static_cast<const uint8_t*>(context);
        read_chunks(memory + begin * ProbeKernels::CHUNK, (end - begin) * ProbeKernels::CHUNK);
      },
      const_cast<uint8_t*>(memory));
  return now() - start;
}

// ── products ──────────────────────────────────────────────────────────────────────────────────────────────────────────
//
// A round multiplies the whole of a thread's operands: R rows of inputs and, for each step along them, N vectors of
// weights. R and N fill the registers, so that operands are loaded no more often than must be.

constexpr size_t STEPS = 64;  // of 4 bytes of inputs

struct alignas(64) Operands {
  uint8_t weights[STEPS * 3 * 64];    // [step][N vectors]; of tiles, the first 8
  uint8_t inputs[2 * STEPS * 8 * 4];  // [row][step], bf16 as float; of tiles, the first 4

  explicit Operands(int product) {
    const uint32_t bf16 = 0x3f003f00, int8 = 0x01010101;  // 0.5 twice, in float32 a little more; 1 four times
    for (size_t i = 0; i < sizeof *this; i += 4) {
      memcpy(reinterpret_cast<char*>(this) + i, product == ProbeKernels::INT8 ? &int8 : &bf16, 4);
    }
  }
};

OCTAVO_INLINE const float* floats(const uint8_t* bytes) { return reinterpret_cast<const float*>(bytes); }

// Adds to R · N sums, each of its row's inputs and its column's weights: add(sum, weights(i), inputs(row, step)). Returns
// the operations, which are `width` a sum and step.
template <size_t R, size_t N, class Sum, class Weights, class Inputs, class Add>
OCTAVO_INLINE double products(const Operands& at, size_t rounds, Sum nothing, double width, const Weights& weights,
                              const Inputs& inputs, const Add& add) {
  Sum sums[R][N];
  OCTAVO_UNROLL
  for (size_t i = 0; i < R * N; ++i) {
    sums[i / N][i % N] = nothing;
  }
  for (size_t round = 0; round < rounds; ++round) {
    use(at);
    for (size_t step = 0; step < STEPS; ++step) {
      decltype(weights(0)) w[N];
      OCTAVO_UNROLL
      for (size_t n = 0; n < N; ++n) {
        w[n] = weights(step * N + n);
      }
      OCTAVO_UNROLL
      for (size_t r = 0; r < R; ++r) {
        const auto a = inputs(r, step);
        OCTAVO_UNROLL
        for (size_t n = 0; n < N; ++n) {
          sums[r][n] = add(sums[r][n], w[n], a);
        }
      }
    }
  }
  use(sums);
  return width * static_cast<double>(R * N * STEPS) * static_cast<double>(rounds);
}

#if OCTAVO_LEVEL == 3

// Four loads, four products, as a tile product of any size must: accumulators 0 … 3, inputs 4 and 5, weights 6 and 7.
struct TileProducts {
  static constexpr double ROUND = 2.0 * 4 * 4 * 16 * 16;  // of 4-byte pairs or quads

  template <bool BYTES, int C, int A, int B>
  static void multiply() {
    if constexpr (BYTES) {
      tile_dpbssd<C, A, B>();
    } else {
      tile_dpbf16ps<C, A, B>();
    }
  }

  template <bool BYTES>
  static double run(const Operands& at, size_t rounds) {
    TileShapes shapes{};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = 64;
      shapes.rows[tile] = 16;
    }
    tile_configure(shapes);
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (size_t round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < 4; ++i) {
        tile_load<4>(at.inputs + i % 2 * 2048, 64);
        tile_load<5>(at.inputs + i % 2 * 2048 + 1024, 64);
        tile_load<6>(at.weights + i * 2048, 64);
        tile_load<7>(at.weights + i * 2048 + 1024, 64);
        multiply<BYTES, 0, 4, 6>();
        multiply<BYTES, 1, 4, 7>();
        multiply<BYTES, 2, 5, 6>();
        multiply<BYTES, 3, 5, 7>();
      }
    }
    tile_release();
    return ROUND * 16 * (BYTES ? 4 : 2) * static_cast<double>(rounds);
  }
};

double int8_products(const Operands& at, size_t rounds) { return TileProducts::run<true>(at, rounds); }
double bf16_products(const Operands& at, size_t rounds) { return TileProducts::run<false>(at, rounds); }

#else

#if OCTAVO_LEVEL == 2

double int8_products(const Operands& at, size_t rounds) {
  return products<8, 3>(
      at, rounds, broadcast_int(0), 2.0 * 64, [&](size_t i) { return load_int(at.weights + i * 64); },
      [&](size_t row, size_t step) {
        int32_t four;
        memcpy(&four, at.inputs + (row * STEPS + step) * 4, 4);
        return broadcast_int(four);
      },
      [](i32x16 sum, i32x16 w, i32x16 a) { return i32x16{_mm512_dpbusd_epi32(sum.v, w.v, a.v)}; });
}

#elif OCTAVO_LEVEL == 1

// Sums of 4-bit weights have room in 16 bits for eight steps.
double int8_products(const Operands& at, size_t rounds) {
  constexpr size_t R = 3;
  const __m256i ones = _mm256_set1_epi16(1);
  i32x16 sums[R];
  OCTAVO_UNROLL
  for (size_t r = 0; r < R; ++r) {
    sums[r] = broadcast_int(0);
  }
  for (size_t round = 0; round < rounds; ++round) {
    use(at);
    for (size_t group = 0; group < STEPS; group += 8) {
      __m256i lo[R], hi[R];
      OCTAVO_UNROLL
      for (size_t r = 0; r < R; ++r) {
        lo[r] = hi[r] = _mm256_setzero_si256();
      }
      OCTAVO_UNROLL
      for (size_t step = group; step < group + 8; ++step) {
        const i32x16 w = load_int(at.weights + step * 64);
        OCTAVO_UNROLL
        for (size_t r = 0; r < R; ++r) {
          int32_t four;
          memcpy(&four, at.inputs + (r * STEPS + step) * 4, 4);
          const __m256i a = _mm256_set1_epi32(four);
          lo[r] = _mm256_add_epi16(lo[r], _mm256_maddubs_epi16(w.lo, a));
          hi[r] = _mm256_add_epi16(hi[r], _mm256_maddubs_epi16(w.hi, a));
        }
      }
      OCTAVO_UNROLL
      for (size_t r = 0; r < R; ++r) {
        sums[r] = sums[r] + i32x16{_mm256_madd_epi16(lo[r], ones), _mm256_madd_epi16(hi[r], ones)};
      }
    }
  }
  use(sums);
  return 2.0 * 64 * R * STEPS * static_cast<double>(rounds);
}

#else

double int8_products(const Operands& at, size_t rounds) {
  constexpr size_t R = 4;
  i32x16 sums[R] = {};
  for (size_t round = 0; round < rounds; ++round) {
    use(at);
    for (size_t step = 0; step < STEPS; ++step) {
      const uint8_t* w = at.weights + step * 64;
      for (size_t r = 0; r < R; ++r) {
        const uint8_t* a = at.inputs + (r * STEPS + step) * 4;
        for (size_t lane = 0; lane < LANES; ++lane) {
          for (size_t i = 0; i < 4; ++i) {
            sums[r].v[lane] += static_cast<int8_t>(w[4 * lane + i]) * static_cast<int8_t>(a[i]);
          }
        }
      }
    }
  }
  use(sums);
  return 2.0 * 64 * R * STEPS * static_cast<double>(rounds);
}

#endif

// Weights in pairs, widened beside the product; even and odd inputs have chains of their own.
double bf16_products(const Operands& at, size_t rounds) {
  constexpr size_t R = OCTAVO_LEVEL >= 2 ? 6 : 3, N = OCTAVO_LEVEL >= 2 ? 2 : 1;
  f32x16 sums[R][N][2];
  OCTAVO_UNROLL
  for (size_t i = 0; i < R * N; ++i) {
    sums[i / N][i % N][0] = sums[i / N][i % N][1] = zero();
  }
  for (size_t round = 0; round < rounds; ++round) {
    use(at);
    for (size_t step = 0; step < STEPS; ++step) {
      OCTAVO_UNROLL
      for (size_t half = 0; half < 2; ++half) {
        f32x16 w[N];
        OCTAVO_UNROLL
        for (size_t n = 0; n < N; ++n) {
          const i32x16 pairs = load_int(at.weights + (step * N + n) * 64);
          w[n] = half ? second_of_pairs(pairs) : first_of_pairs(pairs);
        }
        OCTAVO_UNROLL
        for (size_t r = 0; r < R; ++r) {
          const f32x16 a = broadcast(floats(at.inputs)[(r * STEPS + step) * 2 + half]);
          OCTAVO_UNROLL
          for (size_t n = 0; n < N; ++n) {
            sums[r][n][half] = fma(a, w[n], sums[r][n][half]);
          }
        }
      }
    }
  }
  use(sums);
  return 2.0 * 32 * R * N * STEPS * static_cast<double>(rounds);
}

#endif

double float32_products(const Operands& at, size_t rounds) {
  constexpr size_t R = OCTAVO_LEVEL >= 2 ? 8 : OCTAVO_LEVEL == 1 ? 6 : 3, N = OCTAVO_LEVEL >= 2 ? 3 : 1;
  return products<R, N>(
      at, rounds, zero(), 2.0 * LANES, [&](size_t i) { return load(floats(at.weights) + i * LANES); },
      [&](size_t row, size_t step) { return broadcast(floats(at.inputs)[row * STEPS + step]); },
      [](f32x16 sum, f32x16 w, f32x16 a) { return fma(a, w, sum); });
}

struct Work {
  int product;
  size_t rounds;
  double operations;  // of one item
};

void multiply_items(void* context, size_t begin, size_t end, int) {
  Work& work = *static_cast<Work*>(context);
  const Operands operands(work.product);
  constexpr double (*KERNELS[])(const Operands&, size_t) = {int8_products, bf16_products, float32_products};
  for (size_t item = begin; item < end; ++item) {
    const double operations = KERNELS[work.product](operands, work.rounds);
    if (item == 0) {
      work.operations = operations;
    }
  }
}

double multiply(int product, Pool& pool) {
  constexpr double LONG_ENOUGH = 3e-3;  // seconds
  constexpr int REPEATS = 12;
  const size_t items = 4 * static_cast<size_t>(pool.size());
  Work work{product, 1, 0.0};
  double best = 0.0;
  for (int repeat = 0; repeat < REPEATS;) {
    const double start = now();
    pool.run(items, multiply_items, &work);
    const double seconds = now() - start;
    if (seconds < LONG_ENOUGH) {
      work.rounds *= 2;
      continue;
    }
    const double rate = work.operations * static_cast<double>(items) / seconds;
    best = rate > best ? rate : best;
    ++repeat;
  }
  return best;
}

}  // namespace

const ProbeKernels probe_kernels = {read, multiply};

}  // namespace octavo::OCTAVO_VARIANT
