// Paged attention: the lanes of scores are tokens, the lanes of outputs are head dimensions.
//
// Tokens are taken in runs of 64 at absolute positions. In a run, a row's scores are chains of fma over the head's
// dimensions, the softmax is rescaled once (Milakov and Gimelshein, 2018), and its values are chains of fma over the
// tokens it sees. Eight runs are a part; the parts of a row, each begun afresh, are merged in ascending order. All of it
// hangs on absolute positions alone, so a row's bits do not depend on its tile, the thread or the page size.
//
//     row at position p, window w:            p-w+1                              p
//     │ run 0 │ run 1 │ run 2 │ run 3 │ run 4 │ r[un 5 │ run 6 │ run 7 │ run 8 │ r]un 9 │
//     │                          part 0                                │     part 1 …
//
// The work is a list: tiles (tokens of a slice × the query heads of one KV head), each with its parts. A thread takes a
// stretch of that list, of equal cost to the others'. A tile that is cut between threads leaves its states in their
// memories, and `finish` merges them.
#include "attention.h"

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

// An unfinished softmax of each row.
struct State {
  float* highest;  // [max_rows] the largest score; -inf: nothing seen
  float* sum;      // [max_rows][LANES] of e^(score - highest), each in its token's lane
  float* values;   // [max_rows][dim] of e^(score - highest) · V
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
  float *queries, *scores;           // [max_rows][dim], [max_rows][RUN]
  float *new_highest, *rescale;      // [max_rows]
  float *k, *v;                      // a run in float32: [dim][RUN], [RUN][dim]
  uint32_t *gathered_k, *gathered_v; // a run of small pages, in the order of pages of 16
  State whole, part;
  float* records;                    // states [max_parts + 1]
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
  m.new_highest = take(shape.max_rows + LANES);
  m.rescale = take(shape.max_rows + LANES);
  m.k = take(run);
  m.v = take(run);
  m.gathered_k = reinterpret_cast<uint32_t*>(take(run));
  m.gathered_v = reinterpret_cast<uint32_t*>(take(run));
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

// Where a run's groups lie, in words (see pages.h): of K, rows of `k_stride`; of V, rows of head_dim.
struct Run {
  const uint32_t* k[GROUPS];
  const uint32_t* v[GROUPS];
  size_t k_stride;
};

// Vectors side by side in registers, for so many rows.
constexpr size_t width(size_t rows) { return OCTAVO_LEVEL >= 2 ? 4 : rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// scores[r][n · GROUP …] = queries[r] · K of groups 0 … N-1; asks for the words of `next` meanwhile.
template <bool PAIRS, size_t R, size_t N>
void score_block(const float* queries, size_t dim, const uint32_t* const* k, size_t stride,
                 const uint32_t* const* next, float* scores) {
  f32x16 sums[R][N];
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) {
      sums[r][n] = zero();
    }
  }
  constexpr size_t PAIR = PAIRS ? 2 : 1;
  for (size_t word = 0; word * PAIR < dim; ++word) {
    const float* q = queries + word * PAIR;
    for (size_t n = 0; n < N; ++n) {
      const uint32_t* tokens = k[n] + word * stride;
      if (next) {
        __builtin_prefetch(next[n] + word * stride);
      }
      if constexpr (PAIRS) {
        const i32x16 pairs = load_int(tokens);
        const f32x16 first = first_of_pairs(pairs), second = second_of_pairs(pairs);
        for (size_t r = 0; r < R; ++r) {
          sums[r][n] = fma(broadcast(q[r * dim]), first, sums[r][n]);
        }
        for (size_t r = 0; r < R; ++r) {
          sums[r][n] = fma(broadcast(q[r * dim + 1]), second, sums[r][n]);
        }
      } else {
        const f32x16 values = load(reinterpret_cast<const float*>(tokens));
        for (size_t r = 0; r < R; ++r) {
          sums[r][n] = fma(broadcast(q[r * dim]), values, sums[r][n]);
        }
      }
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) {
      store(scores + r * RUN + n * GROUP, sums[r][n]);
    }
  }
}

// values[r][0 … N·LANES-1] += weights[r] · V of the run's tokens begin … end-1.
template <bool PAIRS, size_t R, size_t N>
void value_block(const float* weights, size_t begin, size_t end, const uint32_t* const* v, size_t dim,
                 const uint32_t* const* next, size_t column, float* values) {
  f32x16 sums[R][N];
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) {
      sums[r][n] = load(values + r * dim + column + n * LANES);
    }
  }
  constexpr size_t PAIR = PAIRS ? 2 : 1;
  for (size_t t = begin; t < end;) {
    const size_t offset = t % GROUP / PAIR * dim + column;
    const uint32_t* words = v[t / GROUP] + offset;
    const bool first = t % PAIR == 0, second = PAIRS && (!first || t + 1 < end);
    for (size_t n = 0; n < N; ++n) {
      if (next) {
        __builtin_prefetch(next[t / GROUP] + offset + n * LANES);
      }
      f32x16 even, odd;
      if constexpr (PAIRS) {
        const i32x16 pairs = load_int(words + n * LANES);
        even = first_of_pairs(pairs);
        odd = second_of_pairs(pairs);
      } else {
        even = load(reinterpret_cast<const float*>(words + n * LANES));
      }
      if (first) {
        for (size_t r = 0; r < R; ++r) {
          sums[r][n] = fma(broadcast(weights[r * RUN + t]), even, sums[r][n]);
        }
      }
      if constexpr (PAIRS) {
        if (second) {
          for (size_t r = 0; r < R; ++r) {
            sums[r][n] = fma(broadcast(weights[r * RUN + t / 2 * 2 + 1]), odd, sums[r][n]);
          }
        }
      }
    }
    t += first + second;
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) {
      store(values + r * dim + column + n * LANES, sums[r][n]);
    }
  }
}

// R rows' scores of the groups begin … end-1, in blocks of as many groups as the registers hold.
template <bool PAIRS, size_t R>
void score_rows(const float* queries, size_t dim, const Run& run, const Run* next, size_t begin, size_t end,
                float* scores) {
  constexpr size_t N = width(R);
  size_t g = begin;
  for (; g + N <= end; g += N) {
    score_block<PAIRS, R, N>(queries, dim, run.k + g, run.k_stride, next ? next->k + g : nullptr, scores + g * GROUP);
  }
  for (; g < end; ++g) {
    score_block<PAIRS, R, 1>(queries, dim, run.k + g, run.k_stride, next ? next->k + g : nullptr, scores + g * GROUP);
  }
}

// R rows' values of the tokens begin … end-1, in blocks of as many columns as the registers hold.
template <bool PAIRS, size_t R>
void value_rows(const float* weights, size_t begin, size_t end, const Run& run, const Run* next, size_t dim,
                float* values) {
  constexpr size_t N = width(R);
  const uint32_t* const* ahead = next ? next->v : nullptr;
  size_t column = 0;
  for (; column + N * LANES <= dim; column += N * LANES) {
    value_block<PAIRS, R, N>(weights, begin, end, run.v, dim, ahead, column, values);
  }
  for (; column < dim; column += LANES) {
    value_block<PAIRS, R, 1>(weights, begin, end, run.v, dim, ahead, column, values);
  }
}

template <bool PAIRS>
void scores_of(size_t rows, const float* queries, size_t dim, const Run& run, const Run* next, size_t begin, size_t end,
               float* scores) {
  switch (rows) {
    case 1: return score_rows<PAIRS, 1>(queries, dim, run, next, begin, end, scores);
    case 2: return score_rows<PAIRS, 2>(queries, dim, run, next, begin, end, scores);
    case 3: return score_rows<PAIRS, 3>(queries, dim, run, next, begin, end, scores);
    case 4: return score_rows<PAIRS, 4>(queries, dim, run, next, begin, end, scores);
    case 5: return score_rows<PAIRS, 5>(queries, dim, run, next, begin, end, scores);
    default: return score_rows<PAIRS, 6>(queries, dim, run, next, begin, end, scores);
  }
}

template <bool PAIRS>
void values_of(size_t rows, const float* weights, size_t begin, size_t end, const Run& run, const Run* next, size_t dim,
               float* values) {
  switch (rows) {
    case 1: return value_rows<PAIRS, 1>(weights, begin, end, run, next, dim, values);
    case 2: return value_rows<PAIRS, 2>(weights, begin, end, run, next, dim, values);
    case 3: return value_rows<PAIRS, 3>(weights, begin, end, run, next, dim, values);
    case 4: return value_rows<PAIRS, 4>(weights, begin, end, run, next, dim, values);
    case 5: return value_rows<PAIRS, 5>(weights, begin, end, run, next, dim, values);
    default: return value_rows<PAIRS, 6>(weights, begin, end, run, next, dim, values);
  }
}

// ── one run: from the pages ───────────────────────────────────────────────────────────────────────────────────────

// Finds the groups of the run at `start` that hold any of the tile's tokens. Pages of less than a group are gathered,
// and no page is looked up that lies outside of low … high-1.
Run locate(const Attention& args, const Tile& tile, size_t start, const Memory& memory) {
  const LayerPages& layer = args.layer;
  const int32_t* pages = args.step.pages + args.step.page_start[tile.slice];
  const size_t block = layer.block_size, dim = layer.head_dim, pair = layer.bf16 ? 2 : 1;
  Run run = {};
  run.k_stride = larger(block, GROUP);
  for (size_t g = 0; g < GROUPS; ++g) {
    const size_t begin = larger(start + g * GROUP, tile.low), end = smaller(start + (g + 1) * GROUP, tile.high);
    if (begin >= end) {
      continue;
    }
    if (block >= GROUP) {
      const size_t slot = (start + g * GROUP) % block;
      const int32_t page = pages[begin / block];
      run.k[g] = k_words(layer, page, tile.kv_head) + slot;
      run.v[g] = v_words(layer, page, tile.kv_head) + slot / pair * dim;
      continue;
    }
    uint32_t* k = memory.gathered_k + g * GROUP * dim;
    uint32_t* v = memory.gathered_v + g * GROUP * dim;
    for (size_t p = begin / block; p * block < end; ++p) {
      const size_t token = p * block % GROUP;
      const uint32_t* page_k = k_words(layer, pages[p], tile.kv_head);
      for (size_t word = 0; word < dim / pair; ++word) {
        memcpy(k + word * GROUP + token, page_k + word * block, block * sizeof(uint32_t));
      }
      memcpy(v + token / pair * dim, v_words(layer, pages[p], tile.kv_head), block / pair * dim * sizeof(uint32_t));
    }
    run.k[g] = k;
    run.v[g] = v;
  }
  return run;
}

// The groups begin … end-1 of a bf16 run in float32, for many rows to read.
Run widen(const Run& run, size_t begin, size_t end, size_t dim, const Memory& memory) {
  Run wide = {};
  wide.k_stride = RUN;
  for (size_t g = begin; g < end; ++g) {
    float* k = memory.k + g * GROUP;
    float* v = memory.v + g * GROUP * dim;
    for (size_t word = 0; word < dim / 2; ++word) {
      const i32x16 pairs = load_int(run.k[g] + word * run.k_stride);
      store(k + 2 * word * RUN, first_of_pairs(pairs));
      store(k + (2 * word + 1) * RUN, second_of_pairs(pairs));
    }
    for (size_t word = 0; word < GROUP / 2; ++word) {
      for (size_t column = 0; column < dim; column += LANES) {
        const i32x16 pairs = load_int(run.v[g] + word * dim + column);
        store(v + 2 * word * dim + column, first_of_pairs(pairs));
        store(v + (2 * word + 1) * dim + column, second_of_pairs(pairs));
      }
    }
    wide.k[g] = reinterpret_cast<const uint32_t*>(k);
    wide.v[g] = reinterpret_cast<const uint32_t*>(v);
  }
  return wide;
}

// ── one part ──────────────────────────────────────────────────────────────────────────────────────────────────────

const f32x16 nothing_seen() { return broadcast(-__builtin_inff()); }

// What a row of a tile sees of a run: the run's tokens begin … end-1; none where end <= begin.
struct Seen {
  size_t begin, end;
};

Seen seen_by(const Attention& args, const Tile& tile, const Shape& shape, size_t row, size_t start) {
  const size_t stop = tile.position + row / shape.heads_per_kv + 1;
  const size_t from = args.window && stop > args.window ? stop - args.window : 0;
  const size_t begin = larger(from, start), end = smaller(stop, start + RUN);
  return begin < end ? Seen{begin - start, end - start} : Seen{0, 0};
}

// Masks the scores of a row and returns the largest.
float mask(float* scores, Seen seen) {
  f32x16 highest = nothing_seen();
  for (size_t t = seen.begin / GROUP * GROUP; t < seen.end; t += GROUP) {
    f32x16 group = load(scores + t);
    if (seen.end < t + GROUP) {
      group = where_first(seen.end - t, group, nothing_seen());
    }
    if (seen.begin > t) {
      group = where_first(seen.begin - t, nothing_seen(), group);
    }
    store(scores + t, group);
    highest = max(group, highest);
  }
  return largest(highest);
}

// One run for the rows `first` … `last`-1, all of which see some of it.
template <bool PAIRS>
void attend_rows(const Attention& args, const Tile& tile, const Shape& shape, const Memory& memory, const State& state,
                 size_t start, size_t first, size_t last, const Run& run, const Run* next) {
  const size_t dim = shape.dim;
  const size_t begin = (larger(tile.low, start) - start) / GROUP;
  const size_t end = (smaller(tile.high, start + RUN) - start + GROUP - 1) / GROUP;
  for (size_t row = first; row < last; row += BLOCK) {
    scores_of<PAIRS>(smaller(BLOCK, last - row), memory.queries + row * dim, dim, run, next, begin, end,
                     memory.scores + row * RUN);
  }

  for (size_t row = first; row < last; ++row) {
    const float highest = mask(memory.scores + row * RUN, seen_by(args, tile, shape, row, start));
    memory.new_highest[row] = highest > state.highest[row] ? highest : state.highest[row];
  }
  for (size_t row = first; row < last; row += LANES) {
    const f32x16 new_highest = load(memory.new_highest + row);
    store(memory.rescale + row, exp(load(state.highest + row) - new_highest));
  }
  for (size_t row = first; row < last; ++row) {
    const Seen seen = seen_by(args, tile, shape, row, start);
    const f32x16 highest = broadcast(memory.new_highest[row]), rescale = broadcast(memory.rescale[row]);
    f32x16 sum = load(state.sum + row * LANES) * rescale;
    for (size_t t = seen.begin / GROUP * GROUP; t < seen.end; t += GROUP) {
      float* group = memory.scores + row * RUN + t;
      const f32x16 weight = exp(load(group) - highest);
      store(group, weight);
      sum = sum + weight;
    }
    store(state.sum + row * LANES, sum);
    for (size_t column = 0; column < dim; column += LANES) {
      float* values = state.values + row * dim + column;
      store(values, load(values) * rescale);
    }
    state.highest[row] = memory.new_highest[row];
  }

  // The rows of a block differ in what they see only near their own positions and where the window begins.
  for (size_t row = first; row < last; row += BLOCK) {
    const size_t rows = smaller(BLOCK, last - row);
    const Seen earliest = seen_by(args, tile, shape, row, start);
    const Seen latest = seen_by(args, tile, shape, row + rows - 1, start);
    const Seen common = latest.begin < earliest.end ? Seen{latest.begin, earliest.end} : Seen{RUN, RUN};
    for (size_t r = row; r < row + rows; ++r) {
      const Seen seen = seen_by(args, tile, shape, r, start);
      values_of<PAIRS>(1, memory.scores + r * RUN, seen.begin, smaller(seen.end, common.begin), run, nullptr, dim,
                       state.values + r * dim);
    }
    if (common.begin < common.end) {
      values_of<PAIRS>(rows, memory.scores + row * RUN, common.begin, common.end, run, next, dim,
                       state.values + row * dim);
    }
    for (size_t r = row; r < row + rows; ++r) {
      const Seen seen = seen_by(args, tile, shape, r, start);
      values_of<PAIRS>(1, memory.scores + r * RUN, larger(seen.begin, common.end), seen.end, run, nullptr, dim,
                       state.values + r * dim);
    }
  }
}

// The state of a tile after one part, begun afresh. The tile's queries are in memory.queries.
void attend_part(const Attention& args, const Tile& tile, const Shape& shape, const Memory& memory, size_t part,
                 const State& state) {
  const size_t rows = tile.num_tokens * shape.heads_per_kv;
  for (size_t row = 0; row < rows + LANES; row += LANES) {
    store(state.highest + row, nothing_seen());
  }
  memset(state.sum, 0, rows * LANES * sizeof(float));
  memset(state.values, 0, rows * shape.dim * sizeof(float));

  const size_t part_end = smaller((part + 1) * PART, tile.high);
  size_t start = larger(part * PART, tile.low) / RUN * RUN;
  Run run = locate(args, tile, start, memory);
  for (; start < part_end; start += RUN) {
    // Rows that see some of the run: they lie together, because both ends of what a row sees grow with its position.
    size_t first = 0, last = rows;
    while (first < rows && seen_by(args, tile, shape, first, start).end == 0) {
      first += shape.heads_per_kv;
    }
    while (last > first && seen_by(args, tile, shape, last - 1, start).end == 0) {
      last -= shape.heads_per_kv;
    }
    const bool gathers = args.layer.block_size < GROUP;
    const bool more = start + RUN < part_end;
    if (args.layer.bf16 && last - first > BLOCK) {
      const size_t begin = (larger(tile.low, start) - start) / GROUP;
      const size_t end = (smaller(tile.high, start + RUN) - start + GROUP - 1) / GROUP;
      const Run wide = widen(run, begin, end, shape.dim, memory);
      attend_rows<false>(args, tile, shape, memory, state, start, first, last, wide, nullptr);
      if (more) {
        run = locate(args, tile, start + RUN, memory);
      }
      continue;
    }
    Run next = run;
    if (more && !gathers) {
      next = locate(args, tile, start + RUN, memory);
    }
    if (args.layer.bf16) {
      attend_rows<true>(args, tile, shape, memory, state, start, first, last, run, gathers ? nullptr : &next);
    } else {
      attend_rows<false>(args, tile, shape, memory, state, start, first, last, run, gathers ? nullptr : &next);
    }
    run = more && gathers ? locate(args, tile, start + RUN, memory) : next;
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

void load_queries(const Attention& args, const Tile& tile, const Shape& shape, float* queries) {
  const size_t row_floats = (args.num_heads + 2 * args.layer.num_kv_heads) * shape.dim;
  const size_t used = shape.heads_per_kv * shape.dim;
  const f32x16 scale = broadcast(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(shape.dim))));
  for (size_t token = 0; token < tile.num_tokens; ++token) {
    const float* from = args.qkv + (tile.token + token) * row_floats + tile.kv_head * used;
    for (size_t i = 0; i < used; i += LANES) {
      store(queries + token * used + i, load(from + i) * scale);
    }
  }
}

void write_out(const Attention& args, const Tile& tile, const Shape& shape, const State& state) {
  const size_t used = shape.heads_per_kv * shape.dim;
  for (size_t row = 0; row < tile.num_tokens * shape.heads_per_kv; ++row) {
    float* out = args.out + (tile.token + row / shape.heads_per_kv) * args.num_heads * shape.dim + tile.kv_head * used +
                 row % shape.heads_per_kv * shape.dim;
    const f32x16 total = broadcast(sum(load(state.sum + row * LANES)));
    for (size_t column = 0; column < shape.dim; column += LANES) {
      store(out + column, load(state.values + row * shape.dim + column) / total);
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

void attend(const Attention& args, size_t thread) {
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
      load_queries(args, tile, shape, memory.queries);
      entered = true;
    }
    if (is_first) {
      attend_part(args, tile, shape, memory, part, memory.whole);
      begun = true;
      handover.tile = tile;
    } else if (begun) {
      attend_part(args, tile, shape, memory, part, memory.part);
      merge(memory.whole, memory.part, rows, shape.dim);
    } else {
      attend_part(args, tile, shape, memory, part, record(memory, handover.num_parts, shape));
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
