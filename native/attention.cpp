// Paged attention: the lanes of scores are tokens, the lanes of outputs are head dimensions.
//
// Tokens are taken in runs of 64 at absolute positions. In a run, a row's scores are chains of fma over the head's
// dimensions, the softmax is rescaled once (Milakov and Gimelshein, 2018), and its values are chains of fma over the
// tokens it sees. Eight runs are a part; the parts of a row, each begun afresh, are merged in ascending order. All of it
// hangs on absolute positions alone, so a row's bits do not depend on its tile, the thread or the page size.
//
// Bytes (int8, keys of fp8, nibbles once spread) are multiplied as whole numbers: a row's query is rounded to int16 once,
// its weights once a run, and their sums are exact in any order.
//
//     row at position p, window w:            p-w+1                              p
//     │ run 0 │ run 1 │ run 2 │ run 3 │ run 4 │ r[un 5 │ run 6 │ run 7 │ run 8 │ r]un 9 │
//     │                          part 0                                │     part 1 …
//
// The work is a list: tiles (tokens of a slice × the query heads of one KV head), each with its parts. A thread takes a
// stretch of that list, of equal cost to the others'. A tile that is cut between threads leaves its states in their
// memories, and `finish` merges them.
#include "attention.h"

#include "codes.h"
#include "vec.h"

namespace octavo::OCTAVO_VARIANT {
namespace {

constexpr size_t GROUP = LANES;  // tokens in a vector
constexpr size_t GROUPS = 4;     // vectors in a run
constexpr size_t RUN = GROUPS * GROUP;
constexpr size_t PART = 8 * RUN;
constexpr size_t TILE = 48;      // rows that share one reading of K and V, about
constexpr size_t BLOCK = 6;      // rows that share registers, at most

constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
constexpr size_t larger(size_t a, size_t b) { return a > b ? a : b; }

// ── tiles, their states, and a thread's memory ────────────────────────────────────────────────────────────────────

struct Shape {
  size_t dim, heads_per_kv, tile_tokens, max_rows, max_parts;
};

Shape shape_of(const Attention& args) {
  Shape shape;
  shape.dim = args.layer.head_dim;
  shape.heads_per_kv = args.num_heads / args.layer.num_kv_heads;
  shape.tile_tokens = larger(1, TILE / shape.heads_per_kv);
  shape.max_rows = shape.tile_tokens * shape.heads_per_kv;
  shape.max_parts = 1;
  for (size_t s = 0; s < args.step.num_slices; ++s) {
    const int32_t last = args.step.positions[args.step.row_start[s + 1] - 1];
    shape.max_parts = larger(shape.max_parts, static_cast<size_t>(last) / PART + 1);
  }
  return shape;
}

// Row i of a tile is query head i % heads_per_kv of its token i / heads_per_kv.
struct Tile {
  size_t slice, kv_head;
  size_t token, num_tokens;  // rows of the step
  size_t position;           // of the first token; the others follow it
  size_t low, high;          // low … high-1: the positions that any of them sees
};

// An unfinished softmax of each row. Vectors of rows may reach LANES - 1 past the last.
struct State {
  float* highest;  // [max_rows + LANES] the largest score; -inf: nothing seen
  float* sum;      // [max_rows][LANES] of e^(score - highest), each in its token's lane
  float* values;   // [max_rows][dim] of e^(score - highest) · V
};

// What a row sees of a run: its tokens begin … end-1. Nothing: 0, 0.
struct Seen {
  size_t begin, end;
};

// What a thread leaves for `finish`.
struct Handover {
  size_t num_parts;  // states of parts whose tile an earlier thread began: the first records
  bool completes;    // whether the tile ends with them
  bool begins;       // whether the next record is the state so far of `tile`, which later threads continue
  Tile tile;
};

struct Memory {
  Handover* handover;
  float *queries, *scores;            // [max_rows][dim], [max_rows][RUN]
  int16_t *q_codes, *weights;         // the same rounded, weights in the place of scores
  float *q_units, *units;             // [max_rows]: what they are rounded to
  float *new_highest, *rescale;       // [max_rows + LANES]
  float *k, *v;                       // a run in float32, [GROUPS][dim][GROUP], [dim / LANES][RUN][LANES], or in bytes
  uint8_t *gathered_k, *gathered_v;   // a run of small pages, in the order of pages of 16
  uint16_t *k_scales, *v_scales;      // [RUN] of one
  float *k_factors, *v_factors;       // [RUN]: the scales of the run at hand
  Seen* seen;                         // [max_rows]
  State whole, part;
  float* records;                     // states [max_parts + 1]
};

size_t state_floats(const Shape& shape) { return shape.max_rows * (shape.dim + LANES) + (shape.max_rows + LANES); }

State state_at(float* memory, const Shape& shape) {
  float* sum = memory + shape.max_rows * shape.dim;
  return {sum + shape.max_rows * LANES, sum, memory};
}

State record(const Memory& memory, size_t index, const Shape& shape) {
  return state_at(memory.records + index * state_floats(shape), shape);
}

// The memory of a thread, or its size in floats where `base` is null.
struct Layout {
  Memory memory;
  size_t floats;
};

Layout layout(float* base, const Shape& shape) {
  size_t used = 0;
  const auto take = [&](size_t floats) {
    float* taken = base ? base + used : nullptr;
    used += (floats + LANES - 1) / LANES * LANES;
    return taken;
  };
  const size_t run = RUN * shape.dim;
  Memory m;
  m.handover = reinterpret_cast<Handover*>(take(sizeof(Handover) / sizeof(float)));
  m.queries = take(shape.max_rows * shape.dim);
  m.scores = take(shape.max_rows * RUN);
  m.q_codes = reinterpret_cast<int16_t*>(take(shape.max_rows * shape.dim / 2));
  m.weights = reinterpret_cast<int16_t*>(take(shape.max_rows * RUN / 2));
  m.q_units = take(shape.max_rows);
  m.units = take(shape.max_rows);
  m.new_highest = take(shape.max_rows + LANES);
  m.rescale = take(shape.max_rows + LANES);
  m.k = take(run);
  m.v = take(run);
  m.gathered_k = reinterpret_cast<uint8_t*>(take(run));
  m.gathered_v = reinterpret_cast<uint8_t*>(take(run));
  m.k_scales = reinterpret_cast<uint16_t*>(take(RUN / 2));
  m.v_scales = reinterpret_cast<uint16_t*>(take(RUN / 2));
  m.k_factors = take(RUN);
  m.v_factors = take(RUN);
  m.seen = reinterpret_cast<Seen*>(take(shape.max_rows * sizeof(Seen) / sizeof(float)));
  m.whole = state_at(take(state_floats(shape)), shape);
  m.part = state_at(take(state_floats(shape)), shape);
  m.records = take((shape.max_parts + 1) * state_floats(shape));
  return {m, used};
}

Memory memory_of(const Attention& args, size_t thread, const Shape& shape) {
  return layout(args.scratch + thread * layout(nullptr, shape).floats, shape).memory;
}

size_t scratch_floats(const Attention& args) { return args.num_threads * layout(nullptr, shape_of(args)).floats; }

// ── one run: kernels ──────────────────────────────────────────────────────────────────────────────────────────────

// Where a run's groups lie (see pages.h): of K, rows of tokens; of V, rows of columns. In bytes.
struct Run {
  const uint8_t* k[GROUPS];
  const uint8_t* v[GROUPS];
  const uint16_t* k_scales[GROUPS];
  const uint16_t* v_scales[GROUPS];
  size_t k_row;             // from a row to the next
  size_t v_row, v_columns;  // from a row to the next, from LANES columns to the next
};

template <size_t N>
struct Count {
  static constexpr size_t value = N;
};

// Calls body(Count<rows>), for 1 … BLOCK rows.
template <class Body>
OCTAVO_INLINE void with_count(size_t rows, const Body& body) {
  static_assert(BLOCK == 6);
  switch (rows) {
    case 1: return body(Count<1>());
    case 2: return body(Count<2>());
    case 3: return body(Count<3>());
    case 4: return body(Count<4>());
    case 5: return body(Count<5>());
    default: return body(Count<6>());
  }
}

// Rows of a block, so that blocks of so many rows are about equal.
constexpr size_t block_of(size_t rows) {
  const size_t blocks = (rows + BLOCK - 1) / BLOCK;
  return (rows + blocks - 1) / blocks;
}

// Vectors side by side in registers, for so many rows. Products of whole numbers need registers of their own.
constexpr size_t width(bool whole, size_t rows) {
  return OCTAVO_LEVEL >= 2 || rows == 1 ? 4 : rows <= (whole ? 2 : 3) ? 2 : 1;
}

// Asks for a line that the next run reads: into the second-level cache, as a run is as large as the first.
OCTAVO_INLINE void prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// The same pointer, unknown to the compiler: with few registers, loading again costs less than a spilled sum.
template <class T>
OCTAVO_INLINE const T* again(const T* p) {
#if OCTAVO_LEVEL == 1
  asm("" : "+r"(p));
#endif
  return p;
}

// Element WHICH of sixteen items of K.
template <Items I, size_t WHICH>
OCTAVO_INLINE f32x16 k_element(const uint8_t* items) {
  if constexpr (I == Items::FP32) {
    return load(reinterpret_cast<const float*>(items));
  } else {
    return WHICH ? second_of_pairs(load_int(items)) : first_of_pairs(load_int(items));
  }
}

// Sixteen columns of V, of the first token of an item or, for BF16, the second.
template <Items I, size_t WHICH = 0>
OCTAVO_INLINE f32x16 v_columns(const uint8_t* items) {
  if constexpr (I == Items::E4M3) {
    return load_e4m3(items);
  } else if constexpr (I == Items::E5M2) {
    return load_e5m2(items);
  } else {
    return k_element<I, WHICH>(items);
  }
}

// Whether the row `word` of group g is where the run ahead is asked for: once for a line, which holds several rows of a
// group, or several groups of a row.
template <Items I>
OCTAVO_INLINE bool begins_line(size_t word, size_t g) {
  return (word + g) % (64 / (GROUP * k_item(I))) == 0;
}

// scores[r][n · GROUP …] = queries[r] · K of the run's groups g … g+N-1. With AHEAD, asks for those of the run `next`.
template <Items I, bool AHEAD, size_t R, size_t N>
void score_block(const float* queries, size_t dim, const Run& run, const Run& next, size_t g, float* scores) {
  constexpr size_t ELEMENTS = k_elements(I);
  f32x16 sums[R][N];
  for (size_t n = 0; n < N; ++n) {
    for (size_t r = 0; r < R; ++r) {
      sums[r][n] = zero();
    }
  }
  for (size_t word = 0; word < dim / ELEMENTS; ++word) {
    const float* q = queries + ELEMENTS * word;
    for (size_t n = 0; n < N; ++n) {
      const uint8_t* items = run.k[g + n] + word * run.k_row;
      if (AHEAD && begins_line<I>(word, g + n)) {
        prefetch(next.k[g + n] + word * run.k_row);
      }
      const f32x16 first = k_element<I, 0>(items);
      for (size_t r = 0; r < R; ++r) {
        sums[r][n] = fma(broadcast(q[r * dim]), first, sums[r][n]);
      }
      if constexpr (ELEMENTS == 2) {
        const f32x16 second = k_element<I, 1>(again(items));
        for (size_t r = 0; r < R; ++r) {
          sums[r][n] = fma(broadcast(q[r * dim + 1]), second, sums[r][n]);
        }
      }
      q = again(q);
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) {
      store(scores + r * RUN + n * GROUP, sums[r][n]);
    }
  }
}

// The same of pairs of bytes and rounded queries, whose products are whole numbers.
template <bool AHEAD, size_t R, size_t N>
void score_codes(const int16_t* queries, const float* units, size_t dim, const Run& run, const Run& next, size_t g,
                 const float* factors, float* scores) {
  i32x16 sums[R][N];
  for (size_t n = 0; n < N; ++n) {
    for (size_t r = 0; r < R; ++r) {
      sums[r][n] = broadcast_int(0);
    }
  }
  const size_t row = run.k_row;
  for (size_t word = 0; word < dim / 2; word += 2) {
    const int16_t* q = queries + 2 * word;
    for (size_t n = 0; n < N; ++n) {
      if (AHEAD) {  // a line is two rows of a group, or two groups of a row
        prefetch(next.k[g + n] + (word + (g + n) % 2) * row);
      }
      const uint8_t* items = run.k[g + n] + word * row;
      for (size_t i = 0; i < 2; ++i) {
        const i32x16 pairs = load_pairs(items + i * row);
        for (size_t r = 0; r < R; ++r) {
          sums[r][n] = add_products(sums[r][n], broadcast_pair(q + r * dim + 2 * i), pairs);
        }
        q = again(q);
      }
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) {
      store(scores + r * RUN + n * GROUP, to_float(sums[r][n]) * (load(factors + n * GROUP) * broadcast(units[r])));
    }
  }
}

// sums[r][n] += weights[r][0] · v
template <size_t R, size_t N>
OCTAVO_INLINE void add_weighted(f32x16 (&sums)[R][N], size_t n, const float* weights, f32x16 v) {
  for (size_t r = 0; r < R; ++r) {
    sums[r][n] = fma(broadcast(weights[r * RUN]), v, sums[r][n]);
  }
}

// values[r][column + n · LANES …] += weights[r] · V of the run's tokens begin … end-1. AHEAD as above.
template <Items I, bool AHEAD, size_t R, size_t N>
void value_block(const float* weights, size_t begin, size_t end, size_t dim, const Run& run, const Run& next,
                 size_t column, float* values) {
  f32x16 sums[R][N];
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) {
      sums[r][n] = load(values + r * dim + column + n * LANES);
    }
  }
  constexpr size_t TOKENS = v_tokens(I);
  const size_t row = run.v_row, columns = run.v_columns, offset = column / LANES * columns;
  for (size_t t = begin; t < end;) {
    const size_t g = t / GROUP, stop = smaller(end, (g + 1) * GROUP);
    const uint8_t* items = run.v[g] + t % GROUP / TOKENS * row + offset;
    const uint8_t* ahead = next.v[g] + t % GROUP / TOKENS * row + offset;
    if (TOKENS == 2 && t % 2) {
      for (size_t n = 0; n < N; ++n) {
        add_weighted(sums, n, weights + t, v_columns<I, 1>(items + n * columns));
      }
      ++t;
      items += row;
      ahead += row;
    }
    for (; t + TOKENS <= stop; t += TOKENS, items += row, ahead += row) {
      const float* w = weights + t;
      for (size_t n = 0; n < N; ++n) {
        if (AHEAD && (lane_bytes(I) == 64 || n == 0)) {
          prefetch(ahead + n * columns);
        }
        add_weighted(sums, n, w, v_columns<I>(items + n * columns));
        if constexpr (TOKENS == 2) {
          add_weighted(sums, n, w + 1, v_columns<I, 1>(again(items + n * columns)));
        }
        w = again(w);
      }
    }
    if (TOKENS == 2 && t < stop) {
      for (size_t n = 0; n < N; ++n) {
        add_weighted(sums, n, weights + t, v_columns<I>(items + n * columns));
      }
      ++t;
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) {
      store(values + r * dim + column + n * LANES, sums[r][n]);
    }
  }
}

// values[r][column + n · LANES …] = rescale[r] · themselves + weights[r] · V of the run's tokens begin … end-1, whole
// numbers in units[r]. Four tokens at a time: a weight of zero is as good as none.
template <bool AHEAD, size_t R, size_t N>
void value_codes(const int16_t* weights, const float* units, const float* rescale, size_t begin, size_t end, size_t dim,
                 const Run& run, const Run& next, size_t column, float* values) {
  i32x16 sums[R][N];
  for (size_t n = 0; n < N; ++n) {
    for (size_t r = 0; r < R; ++r) {
      sums[r][n] = broadcast_int(0);
    }
  }
  const size_t row = run.v_row, columns = run.v_columns, offset = column / LANES * columns;
  const size_t odd = column / LANES % 2 * row, even = row - odd;
  for (size_t t = begin / 4 * 4; t < end;) {
    const size_t g = t / GROUP, stop = smaller(end, (g + 1) * GROUP);
    const uint8_t* items = run.v[g] + t % GROUP / 2 * row + offset;
    const uint8_t* ahead = next.v[g] + t % GROUP / 2 * row + offset;
    for (; t < stop; t += 4, items += 2 * row, ahead += 2 * row) {
      const int16_t* w = weights + t;
      for (size_t n = 0; n < N; ++n) {
        if (AHEAD) {  // a line is half a row, or an eighth of two
          prefetch(ahead + n * columns + (n % 2 ? even : odd));
        }
        for (size_t i = 0; i < 2; ++i) {
          const i32x16 pairs = load_pairs(items + i * row + n * columns);
          for (size_t r = 0; r < R; ++r) {
            sums[r][n] = add_products(sums[r][n], broadcast_pair(w + r * RUN + 2 * i), pairs);
          }
          w = again(w);
        }
      }
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) {
      float* to = values + r * dim + column + n * LANES;
      store(to, fma(to_float(sums[r][n]), broadcast(units[r]), load(to) * broadcast(rescale[r])));
    }
  }
}

// Scores of the rows first … last-1 for the groups begin … end-1. A few groups are kept near for all blocks of rows.
template <Items I, bool AHEAD>
void scores_of(size_t dim, const Memory& memory, size_t first, size_t last, size_t begin, size_t end, const Run& run,
               const Run& next) {
  const size_t block = block_of(last - first);
  for (size_t g = begin; g < end;) {
    const size_t n = g + width(scaled(I), block) <= end ? width(scaled(I), block) : 1;
    for (size_t row = first; row < last; row += block) {
      const Run& ahead = row == first ? next : run;
      float* scores = memory.scores + row * RUN + g * GROUP;
      with_count(smaller(block, last - row), [&](auto count) {
        // The last block may have fewer rows; its groups are the others' all the same: width(…, R), or one.
        constexpr size_t R = decltype(count)::value, N = width(scaled(I), R);
        if constexpr (scaled(I)) {
          const auto kernel = n == N ? score_codes<AHEAD, R, N> : score_codes<AHEAD, R, 1>;
          kernel(memory.q_codes + row * dim, memory.q_units + row, dim, run, ahead, g, memory.k_factors + g * GROUP,
                 scores);
        } else {
          const auto kernel = n == N ? score_block<I, AHEAD, R, N> : score_block<I, AHEAD, R, 1>;
          kernel(memory.queries + row * dim, dim, run, ahead, g, scores);
        }
      });
    }
    g += n;
  }
}

// Calls body(columns side by side, the first) for all columns of some rows.
template <bool WHOLE, size_t R, class Body>
OCTAVO_INLINE void for_columns(size_t dim, const Body& body) {
  constexpr size_t N = width(WHOLE, R);
  size_t column = 0;
  for (; column + N * LANES <= dim; column += N * LANES) {
    body(Count<N>(), column);
  }
  for (; column < dim; column += LANES) {
    body(Count<1>(), column);
  }
}

// values of a block of rows for the tokens begin … end-1.
template <Items I, bool AHEAD>
void values_of(size_t rows, const float* weights, size_t begin, size_t end, size_t dim, const Run& run, const Run& next,
               float* values) {
  if (begin >= end) {
    return;
  }
  with_count(rows, [&](auto count) {
    constexpr size_t R = decltype(count)::value;
    for_columns<false, R>(dim, [&](auto n, size_t column) {
      value_block<I, AHEAD, R, decltype(n)::value>(weights, begin, end, dim, run, next, column, values);
    });
  });
}

// ── one run: from the pages ───────────────────────────────────────────────────────────────────────────────────────

// Finds the groups of the run at `start` that hold any of the tile's tokens. Pages of less than a group are gathered,
// and no page is looked up that lies outside of low … high-1.
Run locate(const Attention& args, const Tile& tile, size_t start, const Memory& memory) {
  const LayerPages& layer = args.layer;
  const int32_t* pages = args.step.pages + args.step.page_start[tile.slice];
  const size_t block = layer.block_size, item = k_item(layer.items), head = tile.kv_head;
  const size_t v_row = layer.v_row(), tokens = v_tokens(layer.items);
  const size_t k_group = layer.k_rows() * GROUP * item, v_group = GROUP / tokens * v_row;
  Run run;
  run.k_row = larger(block, GROUP) * item;
  run.v_row = v_row;
  run.v_columns = lane_bytes(layer.items);
  for (size_t g = 0; g < GROUPS; ++g) {
    run.k[g] = run.v[g] = layer.data;  // not to be read
    run.k_scales[g] = run.v_scales[g] = reinterpret_cast<const uint16_t*>(layer.data);
    const size_t begin = larger(start + g * GROUP, tile.low), end = smaller(start + (g + 1) * GROUP, tile.high);
    if (begin >= end) {
      continue;
    }
    if (block >= GROUP) {
      const size_t slot = (start + g * GROUP) % block;
      const int32_t page = pages[begin / block];
      run.k[g] = k_of(layer, page, head) + slot * item;
      run.v[g] = v_of(layer, page, head) + slot / tokens * v_row;
      run.k_scales[g] = k_scales(layer, page, head) + slot;
      run.v_scales[g] = v_scales(layer, page, head) + slot;
      continue;
    }
    uint8_t* k = memory.gathered_k + g * k_group;
    uint8_t* v = memory.gathered_v + g * v_group;
    for (size_t p = begin / block; p * block < end; ++p) {
      const size_t token = p * block % GROUP;
      const uint8_t* page_k = k_of(layer, pages[p], head);
      for (size_t row = 0; row < layer.k_rows(); ++row) {
        uint8_t* to = k + (row * GROUP + token) * item;
        const uint8_t* from = page_k + row * block * item;
        switch (block * item) {  // copies of a known size take no call
          case 4: memcpy(to, from, 4); break;
          case 8: memcpy(to, from, 8); break;
          case 16: memcpy(to, from, 16); break;
          default: memcpy(to, from, 32);
        }
      }
      memcpy(v + token / tokens * v_row, v_of(layer, pages[p], head), block / tokens * v_row);
      if (scaled(layer.items)) {
        memcpy(memory.k_scales + g * GROUP + token, k_scales(layer, pages[p], head), block * sizeof(uint16_t));
        memcpy(memory.v_scales + g * GROUP + token, v_scales(layer, pages[p], head), block * sizeof(uint16_t));
      }
    }
    run.k[g] = k;
    run.v[g] = v;
    run.k_scales[g] = memory.k_scales + g * GROUP;
    run.v_scales[g] = memory.v_scales + g * GROUP;
  }
  return run;
}

// The run that is likely read after the last of a part: where the next head begins, if the tile ends here.
Run after(const Attention& args, const Tile& tile, size_t part, const Run& last, const Memory& memory) {
  if ((part + 1) * PART < tile.high || tile.kv_head + 1 == args.layer.num_kv_heads) {
    return last;
  }
  Tile next = tile;
  ++next.kv_head;
  return locate(args, next, tile.low / RUN * RUN, memory);
}

// The groups begin … end-1 of a run in float32, codes without their scales, for many rows to read. Keys of codes stay.
template <Items I>
Run widen(const Run& run, const Run& next, size_t begin, size_t end, size_t dim, const Memory& memory) {
  constexpr size_t TOKENS = v_tokens(I);
  Run wide = run;
  wide.v_row = LANES * sizeof(float);
  wide.v_columns = RUN * LANES * sizeof(float);
  for (size_t g = begin; g < end; ++g) {
    for (size_t word = 0; word < dim / k_elements(I); ++word) {
      const uint8_t* items = run.k[g] + word * run.k_row;
      if (begins_line<I>(word, g)) {
        prefetch(next.k[g] + word * run.k_row);
      }
      if constexpr (!scaled(I)) {
        float* to = memory.k + (g * dim + 2 * word) * GROUP;
        store(to, k_element<I, 0>(items));
        store(to + GROUP, k_element<I, 1>(items));
      }
    }
    if (!scaled(I)) {
      wide.k[g] = reinterpret_cast<const uint8_t*>(memory.k + g * dim * GROUP);
    }
    float* v = memory.v + g * GROUP * LANES;
    for (size_t word = 0; word < GROUP / TOKENS; ++word) {
      for (size_t column = 0; column < dim; column += LANES) {
        const size_t offset = word * run.v_row + column / LANES * lane_bytes(I);
        const uint8_t* items = run.v[g] + offset;
        if (lane_bytes(I) == 64 || column % (4 * LANES) == 0) {
          prefetch(next.v[g] + offset);
        }
        float* to = v + column * RUN + TOKENS * word * LANES;
        store(to, v_columns<I>(items));
        if constexpr (TOKENS == 2) {
          store(to + LANES, v_columns<I, 1>(items));
        }
      }
    }
    wide.v[g] = reinterpret_cast<const uint8_t*>(v);
  }
  if (!scaled(I)) {
    wide.k_row = GROUP * sizeof(float);
  }
  return wide;
}

// The groups begin … end-1 of a run of nibbles as pairs of bytes.
Run spread(const Run& run, const Run& next, size_t begin, size_t end, size_t dim, const Memory& memory) {
  const size_t words = dim / 2, k_row = 2 * GROUP, v_row = 2 * dim;
  Run bytes = run;
  bytes.k_row = k_row;
  bytes.v_row = v_row;
  bytes.v_columns = lane_bytes(Items::INT8);
  for (size_t g = begin; g < end; ++g) {
    uint8_t* k = reinterpret_cast<uint8_t*>(memory.k) + g * words * k_row;
    const uint8_t *items = run.k[g], *signs = items + words * run.k_row;
    for (size_t word = (GROUPS - g) % GROUPS; word < words + dim / 16; word += GROUPS) {  // where a line begins
      prefetch(next.k[g] + word * run.k_row);
    }
    for (size_t word = 0; word < words / 2; word += 4) {
      spread_keys<false>(items + word * run.k_row, run.k_row, nullptr, FAST_LEVELS, k + word * k_row);
    }
    for (size_t word = words / 2; word < words; word += 4, signs += run.k_row) {
      spread_keys<true>(items + word * run.k_row, run.k_row, signs, SLOW_LEVELS, k + word * k_row);
    }
    uint8_t* v = reinterpret_cast<uint8_t*>(memory.v) + g * (GROUP / 2) * v_row;
    for (size_t token = 0; token < GROUP; token += 2) {
      const uint8_t* first = run.v[g] + token * run.v_row;
      for (size_t offset = 0; offset < 2 * run.v_row; offset += 64) {
        prefetch(next.v[g] + token * run.v_row + offset);
      }
      for (size_t column = 0; column < dim; column += LANES) {
        const uint8_t* at = first + column / 2;
        spread_values(at, at + run.v_row, V_LEVELS, v + token / 2 * v_row + 2 * column);
      }
    }
    bytes.k[g] = k;
    bytes.v[g] = v;
  }
  return bytes;
}

// ── one part ──────────────────────────────────────────────────────────────────────────────────────────────────────

f32x16 nothing_seen() { return broadcast(-__builtin_inff()); }

// Sets memory.seen for the run at `start`.
void find_seen(const Attention& args, const Tile& tile, const Shape& shape, size_t start, const Memory& memory) {
  Seen* seen = memory.seen;
  for (size_t token = 0; token < tile.num_tokens; ++token) {
    const size_t stop = tile.position + token + 1;
    const size_t from = args.window && stop > args.window ? stop - args.window : 0;
    const size_t begin = larger(from, start), end = smaller(stop, start + RUN);
    for (size_t head = 0; head < shape.heads_per_kv; ++head) {
      *seen++ = begin < end ? Seen{begin - start, end - start} : Seen{0, 0};
    }
  }
}

// What a row sees of the group at t, `fill` in place of the rest.
OCTAVO_INLINE f32x16 seen_of(f32x16 group, size_t t, Seen seen, f32x16 fill) {
  if (seen.end < t + GROUP) {
    group = where_first(seen.end - t, group, fill);
  }
  if (seen.begin > t) {
    group = where_first(seen.begin - t, fill, group);
  }
  return group;
}

// Masks the scores of a row and returns the largest.
float mask(float* scores, Seen seen) {
  f32x16 highest = nothing_seen();
  for (size_t t = seen.begin / GROUP * GROUP; t < seen.end; t += GROUP) {
    const f32x16 group = seen_of(load(scores + t), t, seen, nothing_seen());
    store(scores + t, group);
    highest = max(group, highest);
  }
  return largest(highest);
}

// One run, its groups begin … end-1, for the rows first … last-1, all of which see some of it. K and V say how the run's
// numbers lie: codes are INT8.
template <Items K, Items V, bool AHEAD>
void attend_rows(size_t dim, const Memory& memory, const State& state, size_t first, size_t last, size_t begin,
                 size_t end, const Run& run, const Run& next) {
  constexpr bool SCALED = scaled(K), WHOLE = V == Items::INT8;
  const Seen* seen = memory.seen;
  scores_of<K, AHEAD>(dim, memory, first, last, begin, end, run, next);

  for (size_t row = first; row < last; ++row) {
    const float highest = mask(memory.scores + row * RUN, seen[row]);
    memory.new_highest[row] = highest > state.highest[row] ? highest : state.highest[row];
  }
  for (size_t row = first; row < last; row += LANES) {
    const f32x16 new_highest = load(memory.new_highest + row);
    store(memory.rescale + row, exp(load(state.highest + row) - new_highest));
  }
  for (size_t row = first; row < last; ++row) {
    const f32x16 highest = broadcast(memory.new_highest[row]), rescale = broadcast(memory.rescale[row]);
    const size_t from = seen[row].begin / GROUP * GROUP;
    float* scores = memory.scores + row * RUN;
    f32x16 sum = load(state.sum + row * LANES) * rescale;
    for (size_t t = from; t < seen[row].end; t += GROUP) {
      f32x16 weight = exp(load(scores + t) - highest);
      sum = sum + weight;
      if constexpr (SCALED) {
        weight = weight * load(memory.v_factors + t);
      }
      store(scores + t, WHOLE ? seen_of(weight, t, seen[row], zero()) : weight);
    }
    store(state.sum + row * LANES, sum);
    state.highest[row] = memory.new_highest[row];
    if constexpr (WHOLE) {
      int16_t* weights = memory.weights + row * RUN;
      memset(weights, 0, RUN * sizeof(int16_t));
      memory.units[row] = round16(scores + from, (seen[row].end - from + GROUP - 1) / GROUP * GROUP, weights + from);
    } else {
      for (size_t column = 0; column < dim; column += LANES) {
        float* values = state.values + row * dim + column;
        store(values, load(values) * rescale);
      }
    }
  }

  const size_t block = block_of(last - first);
  for (size_t row = first; row < last; row += block) {
    const size_t rows = smaller(block, last - row);
    const Seen earliest = seen[row], latest = seen[row + rows - 1];
    const Run& ahead = row == first ? next : run;
    if constexpr (WHOLE) {  // a row's weights of tokens that it does not see are zero
      with_count(rows, [&](auto count) {
        constexpr size_t R = decltype(count)::value;
        for_columns<true, R>(dim, [&](auto n, size_t column) {
          value_codes<AHEAD, R, decltype(n)::value>(memory.weights + row * RUN, memory.units + row, memory.rescale + row,
                                                    earliest.begin, latest.end, dim, run, ahead, column,
                                                    state.values + row * dim);
        });
      });
    } else {
      // The rows of a block differ in what they see only near their own positions and where the window begins.
      const Seen common = latest.begin < earliest.end ? Seen{latest.begin, earliest.end} : Seen{RUN, RUN};
      const auto alone = [&](size_t r, size_t from, size_t to) {
        values_of<V, false>(1, memory.scores + r * RUN, from, to, dim, run, run, state.values + r * dim);
      };
      for (size_t r = row; r < row + rows; ++r) {
        alone(r, seen[r].begin, smaller(seen[r].end, common.begin));
      }
      values_of<V, AHEAD>(rows, memory.scores + row * RUN, common.begin, common.end, dim, run, ahead,
                          state.values + row * dim);
      for (size_t r = row; r < row + rows; ++r) {
        alone(r, larger(seen[r].begin, common.end), seen[r].end);
      }
    }
  }
}

// One run for the rows first … last-1. Many rows share one unpacking; the generic variant always unpacks, to be small.
template <Items I>
void attend_run(size_t dim, const Memory& memory, const State& state, size_t first, size_t last, size_t begin, size_t end,
                const Run& run, const Run& next) {
  constexpr Items K = scaled(I) ? Items::INT8 : I;
  constexpr Items WIDE_K = scaled(I) ? Items::INT8 : Items::FP32;
  if constexpr (scaled(I)) {
    for (size_t g = begin; g < end; ++g) {
      prefetch(next.k_scales[g]);
      prefetch(next.v_scales[g]);
      store(memory.k_factors + g * GROUP, load_bf16(run.k_scales[g]));
      store(memory.v_factors + g * GROUP, load_bf16(run.v_scales[g]));
    }
  }
  if constexpr (I == Items::INT4) {
    const Run bytes = spread(run, next, begin, end, dim, memory);
    attend_rows<K, Items::INT8, false>(dim, memory, state, first, last, begin, end, bytes, bytes);
  } else if constexpr (I == Items::INT8 || I == Items::FP32) {
    attend_rows<K, I, true>(dim, memory, state, first, last, begin, end, run, next);
  } else if (OCTAVO_LEVEL == 0 || last - first > BLOCK) {
    const Run wide = widen<I>(run, next, begin, end, dim, memory);
    attend_rows<WIDE_K, Items::FP32, false>(dim, memory, state, first, last, begin, end, wide, wide);
  } else if constexpr (OCTAVO_LEVEL != 0) {
    attend_rows<K, I, true>(dim, memory, state, first, last, begin, end, run, next);
  }
}

// The state of a tile after one part, begun afresh. The tile's queries are in memory.queries.
template <Items I>
void attend_part(const Attention& args, const Tile& tile, const Shape& shape, const Memory& memory, size_t part,
                 const State& state) {
  const size_t rows = tile.num_tokens * shape.heads_per_kv;
  for (size_t row = 0; row < rows; row += LANES) {
    store(state.highest + row, nothing_seen());
  }
  memset(state.sum, 0, rows * LANES * sizeof(float));
  memset(state.values, 0, rows * shape.dim * sizeof(float));

  const size_t part_end = smaller((part + 1) * PART, tile.high);
  const bool gathers = args.layer.block_size < GROUP;
  size_t start = larger(part * PART, tile.low) / RUN * RUN;
  Run run = locate(args, tile, start, memory);
  for (;;) {
    // The rows that see some of the run lie together, because both ends of what a row sees grow with its position.
    find_seen(args, tile, shape, start, memory);
    size_t first = 0, last = rows;
    while (first < rows && memory.seen[first].end == 0) {
      ++first;
    }
    while (last > first && memory.seen[last - 1].end == 0) {
      --last;
    }
    const size_t begin = (larger(tile.low, start) - start) / GROUP;
    const size_t end = (smaller(tile.high, start + RUN) - start + GROUP - 1) / GROUP;
    const bool more = start + RUN < part_end;
    const Run next = gathers ? run
                     : more  ? locate(args, tile, start + RUN, memory)
                             : after(args, tile, part, run, memory);
    attend_run<I>(shape.dim, memory, state, first, last, begin, end, run, next);
    if (!more) {
      return;
    }
    start += RUN;
    run = gathers ? locate(args, tile, start, memory) : next;
  }
}

// ── whole tiles ───────────────────────────────────────────────────────────────────────────────────────────────────

void copy_state(const State& to, const State& from, size_t row, size_t rows, size_t dim) {
  memcpy(to.highest + row, from.highest + row, rows * sizeof(float));
  memcpy(to.sum + row * LANES, from.sum + row * LANES, rows * LANES * sizeof(float));
  memcpy(to.values + row * dim, from.values + row * dim, rows * dim * sizeof(float));
}

// Adds the state of a later part.
void merge(const State& whole, const State& part, size_t rows, size_t dim) {
  const float nothing = -__builtin_inff();
  for (size_t row = 0; row < rows; ++row) {
    const float a = whole.highest[row], b = part.highest[row];
    if (b == nothing) {
      continue;
    }
    if (a == nothing) {
      copy_state(whole, part, row, 1, dim);
      continue;
    }
    const float highest = a > b ? a : b;
    const f32x16 rescale_whole = exp(broadcast(a - highest)), rescale_part = exp(broadcast(b - highest));
    const auto add = [&](float* to, const float* from) {
      store(to, fma(load(from), rescale_part, load(to) * rescale_whole));
    };
    add(whole.sum + row * LANES, part.sum + row * LANES);
    for (size_t column = 0; column < dim; column += LANES) {
      add(whole.values + row * dim + column, part.values + row * dim + column);
    }
    whole.highest[row] = highest;
  }
}

void load_queries(const Attention& args, const Tile& tile, const Shape& shape, const Memory& memory) {
  const size_t row_floats = (args.num_heads + 2 * args.layer.num_kv_heads) * shape.dim;
  const size_t used = shape.heads_per_kv * shape.dim;
  const f32x16 scale = broadcast(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(shape.dim))));
  for (size_t row = 0; row < tile.num_tokens * shape.heads_per_kv; ++row) {
    const float* from = args.qkv + (tile.token + row / shape.heads_per_kv) * row_floats + tile.kv_head * used +
                        row % shape.heads_per_kv * shape.dim;
    float* query = memory.queries + row * shape.dim;
    for (size_t d = 0; d < shape.dim; d += LANES) {
      store(query + d, load(from + d) * scale);
    }
    if (scaled(args.layer.items)) {
      float turned[MAX_HEAD_DIM];
      turn(query, turned, shape.dim);
      memory.q_units[row] = round16(turned, shape.dim, memory.q_codes + row * shape.dim);
    }
  }
}

void write_out(const Attention& args, const Tile& tile, const Shape& shape, const State& state) {
  const size_t used = shape.heads_per_kv * shape.dim;
  for (size_t row = 0; row < tile.num_tokens * shape.heads_per_kv; ++row) {
    float* out = args.out + (tile.token + row / shape.heads_per_kv) * args.num_heads * shape.dim + tile.kv_head * used +
                 row % shape.heads_per_kv * shape.dim;
    const f32x16 total = broadcast(sum(load(state.sum + row * LANES)));
    float turned[MAX_HEAD_DIM];
    float* to = scaled(args.layer.items) ? turned : out;
    for (size_t column = 0; column < shape.dim; column += LANES) {
      store(to + column, load(state.values + row * shape.dim + column) / total);
    }
    if (scaled(args.layer.items)) {
      turn_back(turned, out, shape.dim);
    }
  }
}

// ── the division of the work ──────────────────────────────────────────────────────────────────────────────────────

// Calls visit(tile, part, cost) for each part of each tile, in the one order that all threads agree on. The cost is about
// that of so many fma of a row and a token.
template <class Visit>
void for_each_part(const Attention& args, const Shape& shape, const Visit& visit) {
  constexpr size_t TOKEN_COST = 6, PART_COST = 256;
  const StepRows& step = args.step;
  for (size_t slice = 0; slice < step.num_slices; ++slice) {
    const size_t end = static_cast<size_t>(step.row_start[slice + 1]);
    for (size_t token = static_cast<size_t>(step.row_start[slice]); token < end; token += shape.tile_tokens) {
      Tile tile;
      tile.slice = slice;
      tile.token = token;
      tile.num_tokens = smaller(shape.tile_tokens, end - token);
      tile.position = static_cast<size_t>(step.positions[token]);
      tile.low = args.window && tile.position >= args.window ? tile.position + 1 - args.window : 0;
      tile.high = tile.position + tile.num_tokens;
      const size_t token_cost = tile.num_tokens * shape.heads_per_kv + TOKEN_COST;
      for (tile.kv_head = 0; tile.kv_head < args.layer.num_kv_heads; ++tile.kv_head) {
        for (size_t part = tile.low / PART; part * PART < tile.high; ++part) {
          const size_t tokens = smaller(tile.high, (part + 1) * PART) - larger(tile.low, part * PART);
          visit(tile, part, tokens * token_cost + PART_COST);
        }
      }
    }
  }
}

template <Items I>
void attend_items(const Attention& args, size_t thread) {
  const Shape shape = shape_of(args);
  const Memory memory = memory_of(args, thread, shape);
  size_t total = 0;
  for_each_part(args, shape, [&](const Tile&, size_t, size_t cost) { total += cost; });
  const size_t share_begin = total * thread / args.num_threads, share_end = total * (thread + 1) / args.num_threads;

  Handover& handover = *memory.handover;
  handover = {};
  bool entered = false, begun = false;  // whether memory.queries, memory.whole are of the current tile
  size_t before = 0;
  for_each_part(args, shape, [&](const Tile& tile, size_t part, size_t cost) {
    const size_t at = before;
    before += cost;
    if (at < share_begin || at >= share_end) {
      return;
    }
    const bool is_first = part == tile.low / PART, is_last = (part + 1) * PART >= tile.high;
    const size_t rows = tile.num_tokens * shape.heads_per_kv;
    if (is_first || !entered) {
      load_queries(args, tile, shape, memory);
      entered = true;
    }
    if (is_first) {
      attend_part<I>(args, tile, shape, memory, part, memory.whole);
      begun = true;
      handover.tile = tile;
    } else if (begun) {
      attend_part<I>(args, tile, shape, memory, part, memory.part);
      merge(memory.whole, memory.part, rows, shape.dim);
    } else {
      attend_part<I>(args, tile, shape, memory, part, record(memory, handover.num_parts, shape));
      ++handover.num_parts;
      handover.completes = is_last;
    }
    if (is_last && begun) {
      write_out(args, tile, shape, memory.whole);
      begun = false;
    }
  });
  if (begun) {
    handover.begins = true;
    copy_state(record(memory, handover.num_parts, shape), memory.whole, 0,
               handover.tile.num_tokens * shape.heads_per_kv, shape.dim);
  }
}

void attend(const Attention& args, size_t thread) {
  switch (args.layer.items) {
    case Items::FP32: return attend_items<Items::FP32>(args, thread);
    case Items::BF16: return attend_items<Items::BF16>(args, thread);
    case Items::INT8: return attend_items<Items::INT8>(args, thread);
    case Items::E4M3: return attend_items<Items::E4M3>(args, thread);
    case Items::E5M2: return attend_items<Items::E5M2>(args, thread);
    case Items::INT4: return attend_items<Items::INT4>(args, thread);
  }
}

void finish(const Attention& args) {
  const Shape shape = shape_of(args);
  for (size_t thread = 0; thread < args.num_threads; ++thread) {
    const Memory memory = memory_of(args, thread, shape);
    if (!memory.handover->begins) {
      continue;
    }
    const Tile& tile = memory.handover->tile;
    const State whole = record(memory, memory.handover->num_parts, shape);
    for (size_t later = thread + 1; later < args.num_threads; ++later) {
      const Memory continued = memory_of(args, later, shape);
      for (size_t i = 0; i < continued.handover->num_parts; ++i) {
        merge(whole, record(continued, i, shape), tile.num_tokens * shape.heads_per_kv, shape.dim);
      }
      if (continued.handover->completes) {
        break;
      }
    }
    write_out(args, tile, shape, whole);
  }
}

}  // namespace

const AttentionKernels attention_kernels = {scratch_floats, attend, finish};

}  // namespace octavo::OCTAVO_VARIANT
