// The only file that knows Python: checks shapes, hands raw pointers to the kernels, and lets other Python threads run
// meanwhile. One Backend serves one thread at a time.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "dispatch.h"
#include "draw.h"
#include "linear.h"
#include "memory.h"
#include "packing.h"
#include "pages.h"
#include "parallel.h"
#include "probe.h"
#include "rope.h"

namespace nb = nanobind;
using namespace octavo;

namespace {

template <typename T, int N>
using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <typename T, int N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

void require(bool good, const char* message) {
  if (!good) {
    throw nb::value_error(message);
  }
}

const Kernels* kernels_of(const std::string& variant) {
  for (const Kernels* const* table = available_kernels(); *table; ++table) {
    if (variant == (*table)->variant) {
      return *table;
    }
  }
  throw nb::value_error("this machine cannot run that variant");
}

// Ops that were performed once, to be performed again: on the same objects, whatever they hold by then.
struct Program {
  struct Op {
    std::function<void()> perform;
    const Reading* reading;  // of its weights, or null
  };
  std::vector<Op> ops;
  Pool* pool = nullptr;
  Reading *first = nullptr, *last = nullptr;

  void add(Pool& on, std::function<void()> perform, Reading* reading) {
    pool = &on;
    ops.push_back({std::move(perform), reading});
    if (reading) {
      first = first ? first : reading;
      (last ? last : reading)->next = reading;
      reading->next = first;
      last = reading;
    }
  }

  void run() {
    nb::gil_scoped_release release;
    for (const Op& op : ops) {
      op.perform();
      if (op.reading) {
        pool->expect(op.reading->next);  // after the last one the next run's, while others decide what it is of
      }
    }
  }
};

struct Backend {
  const Kernels* kernels;
  std::deque<Reading> readings;  // outlives the pool
  Pool pool;
  Arena arena;
  const size_t cache_bytes = last_cache();
  Scratch scratch;
  std::vector<LogitReader> readers;  // one for each thread
  Program* recording = nullptr;

  Backend(const std::string& variant, int num_threads) : kernels(kernels_of(variant)), pool(num_threads) {}
};

// Performs an op while other Python threads run, and records it if a program is being recorded. What it refers to must
// live as long as the program.
void perform(Backend& backend, std::function<void()> op, Reading* reading = nullptr) {
  {
    nb::gil_scoped_release release;
    op();
  }
  if (backend.recording) {
    backend.recording->add(backend.pool, std::move(op), reading);
  }
}

// Activations: float32 rows whose memory grows and never shrinks.
struct Matrix {
  size_t columns;
  size_t rows = 0;
  Scratch memory;
  float* data = nullptr;

  explicit Matrix(size_t columns) : columns(columns) {}

  void resize(size_t count) {
    data = static_cast<float*>(memory.reserve(count * columns * sizeof(float)));
    rows = count;
  }
};

struct Vector {
  std::vector<float> values;

  explicit Vector(Array<float, 1> source) : values(source.data(), source.data() + source.size()) {}
};

template <typename Body>
void in_parallel(Pool& pool, size_t num_items, const Body& body);

class PackedLinear {
 public:
  PackedLinear(Backend& backend, size_t inputs, bool fine) : backend_(backend) {
    linear_.inputs = inputs;
    linear_.fine = fine;
  }

  void add_segment(size_t outputs, int bits, size_t group, bool minimum, bool wide) {
    Format format{};
    if (bits == 4 && group == 32) {
      format = {Format::W4, minimum, wide};
    } else if (bits == 8 && group == 32) {
      format = {Format::W8, minimum, wide};
    } else if (bits == 8 && group == 16) {
      format = {Format::W8_GROUP16, minimum, wide};
    } else if (bits == 16) {
      format = {Format::BF16, false, false};
    } else {
      throw nb::value_error("weights have 4 bits in groups of 32, 8 bits in groups of 16 or 32, or 16 bits");
    }
    require(outputs > 0 && linear_.inputs > 0, "a matrix has at least one output and one input");
    require(bits == 16 || linear_.inputs % group == 0, "the inputs are not a multiple of the group");
    Segment segment = make_segment(backend_.arena, format, outputs, linear_.inputs);
    segment.column = linear_.outputs;
    segments_.push_back(segment);
    count();
  }

  void drop_segment() {
    require(!segments_.empty(), "there is no segment");
    segments_.pop_back();
    count();
  }

  void pack_quantized(size_t first, Array<uint8_t, 2> codes, Array<float, 2> scales,
                      std::optional<Array<float, 2>> minimums) {
    const Segment& segment = last(first, codes.shape(0), codes.shape(1));
    const size_t group = segment.format.codes == Format::W8_GROUP16 ? 16 : GROUP;
    require(segment.format.codes != Format::BF16, "the segment is not quantised");
    require(scales.shape(0) == codes.shape(0) && scales.shape(1) == codes.shape(1) / group, "scales have a wrong shape");
    require(minimums.has_value() == segment.format.minimum, "minimums are given for all rows or none");
    require(!minimums || (minimums->shape(0) == scales.shape(0) && minimums->shape(1) == scales.shape(1)),
            "minimums have a wrong shape");
    const size_t inputs = codes.shape(1), num_scales = scales.shape(1);
    nb::gil_scoped_release release;
    in_parallel(backend_.pool, codes.shape(0), [&](size_t begin, size_t end) {
      octavo::pack_quantized(segment, first + begin, end - begin, codes.data() + begin * inputs,
                             scales.data() + begin * num_scales,
                             minimums ? minimums->data() + begin * num_scales : nullptr);
    });
  }

  void pack_float(size_t first, Array<float, 2> values) {
    const Segment& segment = last(first, values.shape(0), values.shape(1));
    require(segment.format.codes == Format::BF16, "the segment is quantised");
    nb::gil_scoped_release release;
    in_parallel(backend_.pool, values.shape(0), [&](size_t begin, size_t end) {
      pack_bf16(segment, first + begin, end - begin, values.data() + begin * values.shape(1));
    });
  }

  void set_bias(Array<float, 1> bias) {
    require(bias.shape(0) == linear_.outputs, "the bias has a wrong length");
    bias_.assign(linear_.outputs + BLOCK, 0.0f);
    std::memcpy(bias_.data(), bias.data(), linear_.outputs * sizeof(float));
    linear_.bias = bias_.data();
  }

  const Linear& linear() const { return linear_; }

  // As packed.
  size_t num_bytes() const {
    size_t bytes = 0;
    for (const Segment& segment : segments_) {
      bytes += segment.num_blocks * segment.block_bytes;
    }
    return bytes;
  }

  // Weights that are multiplied as bf16; the others are multiplied as int8.
  size_t num_bf16() const {
    size_t weights = 0;
    for (const Segment& segment : segments_) {
      weights += segment.format.codes == Format::BF16 ? segment.outputs * segment.inputs : 0;
    }
    return weights;
  }

  bool halves() const { return segments_.size() == 2 && segments_[0].outputs == segments_[1].outputs; }

 private:
  void count() {
    linear_.outputs = linear_.num_blocks = 0;
    for (const Segment& segment : segments_) {
      linear_.outputs += segment.outputs;
      linear_.num_blocks += segment.num_blocks;
    }
    linear_.num_segments = segments_.size();
    linear_.segments = segments_.data();
  }

  const Segment& last(size_t first, size_t rows, size_t inputs) const {
    require(!segments_.empty(), "there is no segment");
    const Segment& segment = segments_.back();
    require(inputs == segment.inputs && first + rows <= segment.outputs, "the rows do not fit the segment");
    return segment;
  }

  Backend& backend_;
  std::vector<Segment> segments_;
  std::vector<float> bias_;
  Linear linear_{};
};

bool all_below(const int32_t* ids, size_t count, size_t limit) {
  for (size_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || static_cast<size_t>(ids[i]) >= limit) {
      return false;
    }
  }
  return true;
}

void run_linear(Backend& backend, LinearCall call) {
  if (call.rows == 0) {
    return;
  }
  call.once = backend.arena.num_bytes() > backend.cache_bytes;
  const LinearKernels& kernels = *backend.kernels->linear;
  void* scratch = backend.scratch.reserve(kernels.scratch_bytes(*call.linear, call.rows, backend.pool.size()));
  kernels.run(call, scratch, backend.pool);
}

// What a product reads of its weights, by thread, if a program is being recorded: the blocks that `Pool` gives each to
// begin with. Of gate and up, whose blocks go in pairs, the same ones of both.
Reading* reading_of(Backend& backend, const Linear& linear, bool pairs) {
  if (!backend.recording) {
    return nullptr;
  }
  const size_t threads = static_cast<size_t>(backend.pool.size()), num_blocks = linear.num_blocks / (pairs ? 2 : 1);
  Reading& reading = backend.readings.emplace_back();
  for (size_t thread = 0; thread < threads; ++thread) {
    std::vector<Reading::Span>& spans = reading.threads.emplace_back();
    const size_t begin = num_blocks * thread / threads, end = num_blocks * (thread + 1) / threads;
    size_t first = 0;  // block of the segment
    for (size_t s = 0; s < linear.num_segments; ++s) {
      const Segment& segment = linear.segments[s];
      const size_t from = std::max(begin, first), to = std::min(end, first + segment.num_blocks);
      if (from < to) {
        spans.push_back({segment.data + (from - first) * segment.block_bytes, (to - from) * segment.block_bytes});
      }
      first += pairs ? 0 : segment.num_blocks;
    }
  }
  return &reading;
}

void check_product(const Matrix& x, const Vector* norm, const PackedLinear& weight) {
  require(x.columns == weight.linear().inputs, "the inputs and the matrix differ in width");
  require(!norm || norm->values.size() == x.columns, "the norm's weight has a wrong length");
}

// out = product of x, normed where `norm` is given
void linear(Backend& backend, const Matrix& x, const Vector* norm, float eps, const PackedLinear& weight, Matrix& out) {
  check_product(x, norm, weight);
  require(out.columns == weight.linear().outputs && out.data != x.data, "the output has a wrong width");
  perform(backend, [=, &backend, &x, &weight, &out] {
    out.resize(x.rows);
    run_linear(backend, {&weight.linear(), x.data, nullptr, x.rows, norm ? norm->values.data() : nullptr, eps,
                         LinearCall::STORE, out.data});
  }, reading_of(backend, weight.linear(), false));
}

void add_linear(Backend& backend, Matrix& x, const Matrix& inputs, const PackedLinear& weight) {
  check_product(inputs, nullptr, weight);
  require(x.columns == weight.linear().outputs, "the residual has a wrong width");
  perform(backend, [&backend, &x, &inputs, &weight] {
    require(x.rows == inputs.rows, "the residual has a wrong shape");
    run_linear(backend, {&weight.linear(), inputs.data, nullptr, x.rows, nullptr, 0.0f, LinearCall::ADD, x.data});
  }, reading_of(backend, weight.linear(), false));
}

void gate_up(Backend& backend, const Matrix& x, const Vector& norm, float eps, const PackedLinear& weight, Matrix& out) {
  check_product(x, &norm, weight);
  require(weight.halves() && out.columns == weight.linear().outputs / 2, "gate and up are two matrices of one shape");
  perform(backend, [=, &backend, &x, &norm, &weight, &out] {
    out.resize(x.rows);
    run_linear(backend,
               {&weight.linear(), x.data, nullptr, x.rows, norm.values.data(), eps, LinearCall::GATE_UP, out.data});
  }, reading_of(backend, weight.linear(), true));
}

void logits(Backend& backend, const Matrix& x, Array<int32_t, 1> rows, const Vector& norm, float eps,
            const PackedLinear& weight, Matrix& out) {
  check_product(x, &norm, weight);
  require(out.columns == weight.linear().outputs, "the output has a wrong width");
  require(all_below(rows.data(), rows.size(), x.rows), "a row is out of range");
  out.resize(rows.size());
  nb::gil_scoped_release release;
  run_linear(backend, {&weight.linear(), x.data, rows.data(), rows.size(), norm.values.data(), eps, LinearCall::STORE,
                       out.data});
}

// ── pages: rope_write, attention ──────────────────────────────────────────────────────────────────────────────────────

Items items_of(const std::string& dtype) {
  const std::pair<const char*, Items> names[] = {{"fp32", Items::FP32},     {"bf16", Items::BF16},
                                                 {"int8", Items::INT8},     {"fp8_e4m3", Items::E4M3},
                                                 {"fp8_e5m2", Items::E5M2}, {"int4", Items::INT4}};
  for (const auto& [name, items] : names) {
    if (dtype == name) {
      return items;
    }
  }
  throw nb::value_error("the kernels lack that format of keys and values");
}

// The page pool; its memory is mapped as it is first written. A layer is told as its offset in a page and its dtype.
struct Pages {
  size_t num_pages, page_bytes, num_kv_heads, head_dim, block_size;
  std::vector<LayerPages> layers;
  Arena arena;
  uint8_t* data;

  Pages(size_t num_pages, size_t page_bytes, size_t num_kv_heads, size_t head_dim, size_t block_size,
        const std::vector<std::pair<size_t, std::string>>& layers)
      : num_pages(num_pages), page_bytes(page_bytes), num_kv_heads(num_kv_heads), head_dim(head_dim),
        block_size(block_size) {
    require(head_dim % 16 == 0 && head_dim > 0 && head_dim <= 256, "head_dim must be a multiple of 16, at most 256");
    require(block_size == 4 || block_size == 8 || (block_size > 0 && block_size % 16 == 0),
            "block_size must be 4, 8 or a multiple of 16");
    require(num_kv_heads > 0 && page_bytes % 64 == 0, "a page is a multiple of 64 bytes");
    data = static_cast<uint8_t*>(arena.allocate(num_pages * page_bytes));
    for (const auto& [offset, dtype] : layers) {
      this->layers.push_back({data + offset, page_bytes, num_kv_heads, head_dim, block_size, items_of(dtype)});
      require(offset % 4 == 0 && offset + this->layers.back().layer_bytes() <= page_bytes, "page_bytes is too small");
    }
  }

  LayerPages layer(size_t index) const {
    require(index < layers.size(), "the layer is out of range");
    return layers[index];
  }

  void copy(size_t src, size_t dst) {
    require(src < num_pages && dst < num_pages, "a page is out of range");
    std::memmove(data + dst * page_bytes, data + src * page_bytes, page_bytes);
  }
};

// The rows of a step, checked and copied once for all layers.
class Step {
 public:
  void set(Array<int32_t, 1> token_ids, Array<int32_t, 1> positions, Array<int32_t, 1> row_start,
           Array<int32_t, 1> write_start, Array<int32_t, 1> page_start, Array<int32_t, 1> pages) {
    copy(token_ids, token_ids_);
    copy(positions, positions_);
    copy(row_start, row_start_);
    copy(write_start, write_start_);
    copy(page_start, page_start_);
    copy(pages, pages_);
    num_positions_ = checked_pages_ = checked_block_size_ = 0;
    const size_t slices = write_start_.size();
    require(token_ids_.size() == positions_.size(), "token ids and positions differ in number");
    require(row_start_.size() == slices + 1 && page_start_.size() == slices + 1, "the slices' arrays differ in length");
    require(row_start_[0] == 0 && row_start_[slices] == static_cast<int32_t>(positions_.size()) &&
                page_start_[0] == 0 && page_start_[slices] == static_cast<int32_t>(pages_.size()),
            "the slices do not cover the rows or the pages");
    for (size_t s = 0; s < slices; ++s) {
      require(row_start_[s] < row_start_[s + 1] && row_start_[s + 1] <= row_start_[slices] &&
                  page_start_[s] <= page_start_[s + 1],
              "a slice is empty");
      const int32_t first = row_start_[s], last = row_start_[s + 1] - 1;
      require(positions_[first] >= 0, "a position is negative");
      for (int32_t row = first; row <= last; ++row) {
        require(positions_[row] - positions_[first] == row - first, "the positions of a slice do not follow each other");
      }
      num_positions_ = std::max(num_positions_, static_cast<size_t>(positions_[last]) + 1);
    }
  }

  // Once for a pool, checks that the pages exist and reach to the last position of each slice.
  StepRows rows(const Pages& pages) {
    if (checked_pages_ != pages.num_pages || checked_block_size_ != pages.block_size) {
      check(pages);
    }
    return {positions_.data(), row_start_.data(), write_start_.data(), page_start_.data(), pages_.data(),
            write_start_.size()};
  }

  const std::vector<int32_t>& token_ids() const { return token_ids_; }
  size_t num_rows() const { return positions_.size(); }
  size_t num_positions() const { return num_positions_; }

 private:
  static void copy(const Array<int32_t, 1>& source, std::vector<int32_t>& out) {
    out.assign(source.data(), source.data() + source.size());
  }

  void check(const Pages& pages) {
    for (size_t s = 0; s < write_start_.size(); ++s) {
      const size_t last = static_cast<size_t>(positions_[row_start_[s + 1] - 1]);
      require(static_cast<size_t>(page_start_[s + 1] - page_start_[s]) > last / pages.block_size,
              "a slice has too few pages");
    }
    require(all_below(pages_.data(), pages_.size(), pages.num_pages), "a page is out of range");
    checked_pages_ = pages.num_pages;
    checked_block_size_ = pages.block_size;
  }

  std::vector<int32_t> token_ids_, positions_, row_start_, write_start_, page_start_, pages_;
  size_t num_positions_ = 0;
  size_t checked_pages_ = 0, checked_block_size_ = 0;
};

// Cosines and sines, [num_positions, head_dim / 2].
struct RopeTable {
  size_t num_positions, half;
  std::vector<float> cos, sin;

  RopeTable(Array<float, 2> cosines, Array<float, 2> sines)
      : num_positions(cosines.shape(0)), half(cosines.shape(1)), cos(cosines.data(), cosines.data() + cosines.size()),
        sin(sines.data(), sines.data() + sines.size()) {
    require(sines.shape(0) == num_positions && sines.shape(1) == half, "cosines and sines differ in shape");
  }
};

// Calls body(begin, end) for all parts of num_items, spread over the pool.
template <typename Body>
void in_parallel(Pool& pool, size_t num_items, const Body& body) {
  pool.run(num_items,
           [](void* context, size_t begin, size_t end, int) { (*static_cast<const Body*>(context))(begin, end); },
           const_cast<Body*>(&body));
}

void embed(Backend& backend, const PackedLinear& table, const Step& step, Matrix& out) {
  require(out.columns == table.linear().inputs, "the output has a wrong width");
  perform(backend, [&backend, &table, &step, &out] {
    const std::vector<int32_t>& ids = step.token_ids();
    require(all_below(ids.data(), ids.size(), table.linear().outputs), "a token id is outside the vocabulary");
    out.resize(ids.size());
    backend.kernels->linear->embed(table.linear(), ids.data(), ids.size(), out.data, backend.pool);
  });
}

void check_qkv(const Matrix& qkv, size_t num_heads, const Pages& pages) {
  require(num_heads > 0 && num_heads % pages.num_kv_heads == 0, "num_heads is not a multiple of num_kv_heads");
  require(qkv.columns == (num_heads + 2 * pages.num_kv_heads) * pages.head_dim, "qkv has a wrong width");
}

void rope_write(Backend& backend, Matrix& qkv, size_t layer, size_t num_heads, Pages& pages, const RopeTable& rope,
                Step& step, const Vector* q_norm, const Vector* k_norm, float eps) {
  check_qkv(qkv, num_heads, pages);
  require(rope.half * 2 == pages.head_dim, "the rope table has a wrong width");
  for (const Vector* norm : {q_norm, k_norm}) {
    require(!norm || norm->values.size() == pages.head_dim, "a norm's weight has a wrong length");
  }
  perform(backend, [=, &backend, &qkv, &pages, &rope, &step] {
    require(qkv.rows == step.num_rows(), "qkv has a wrong shape");
    require(step.num_positions() <= rope.num_positions, "a position lies beyond the rope table");
    const RopeWrite args = {qkv.data, num_heads, pages.layer(layer), step.rows(pages), rope.cos.data(), rope.sin.data(),
                            q_norm ? q_norm->values.data() : nullptr, k_norm ? k_norm->values.data() : nullptr, eps};
    in_parallel(backend.pool, step.num_rows(),
                [&](size_t begin, size_t end) { backend.kernels->rope->rope_write(args, begin, end); });
  });
}

void attention(Backend& backend, const Matrix& qkv, size_t layer, size_t num_heads, const Pages& pages, Step& step,
               size_t window, Matrix& out) {
  check_qkv(qkv, num_heads, pages);
  require(out.columns == num_heads * pages.head_dim, "the output has a wrong width");
  perform(backend, [=, &backend, &qkv, &pages, &step, &out] {
    require(qkv.rows == step.num_rows(), "qkv has a wrong shape");
    out.resize(step.num_rows());
    Attention args = {qkv.data, out.data, num_heads, pages.layer(layer), step.rows(pages), window,
                      static_cast<size_t>(backend.pool.size()), nullptr};
    const AttentionKernels& kernels = *backend.kernels->attention;
    args.scratch = static_cast<float*>(backend.scratch.reserve(kernels.scratch_floats(args) * sizeof(float)));
    in_parallel(backend.pool, args.num_threads, [&](size_t begin, size_t end) {
      for (size_t part = begin; part < end; ++part) {
        kernels.attend(args, part);
      }
    });
    kernels.finish(args);
  });
}

// ── logits ───────────────────────────────────────────────────────────────────────────────────────────────────────────

// Calls body(i, reader, whether the row is sound) for each of `count` rows of logits, by number or from the first on.
void read_rows(Backend& backend, Array<float, 2> logits, const int32_t* rows, size_t count, const auto& body) {
  const size_t vocabulary = logits.shape(1);
  require(vocabulary > 0, "the vocabulary is empty");
  require(!rows || all_below(rows, count, logits.shape(0)), "a row is out of range");
  if (backend.readers.empty() || backend.readers[0].vocabulary() != vocabulary) {
    backend.readers.clear();
    for (int thread = 0; thread < backend.pool.size(); ++thread) {
      backend.readers.emplace_back(*backend.kernels->logit, vocabulary);
    }
  }
  nb::gil_scoped_release release;
  auto read = [&](size_t begin, size_t end, int thread) {
    LogitReader& reader = backend.readers[static_cast<size_t>(thread)];
    for (size_t i = begin; i < end; ++i) {
      const size_t row = rows ? static_cast<size_t>(rows[i]) : i;
      body(i, reader, reader.read(logits.data() + row * vocabulary));
    }
  };
  backend.pool.run(count,
                   [](void* context, size_t begin, size_t end, int thread) {
                     (*static_cast<decltype(read)*>(context))(begin, end, thread);
                   },
                   &read);
}

// out[i] = the best token of row i, -1 where the row is broken
void best(Backend& backend, Array<float, 2> logits, Out<int32_t, 1> out) {
  require(out.size() == logits.shape(0), "there is one best token a row");
  read_rows(backend, logits, nullptr, out.size(),
            [&](size_t i, const LogitReader& reader, bool sound) { out.data()[i] = sound ? reader.best() : -1; });
}

// The arrays are those of `Draws` in ops/api.py.
void choose(Backend& backend, Array<float, 2> logits, Array<int32_t, 1> rows, Array<double, 1> temperatures,
            Array<int32_t, 1> top_ks, Array<double, 1> top_ps, Array<double, 1> min_ps, Array<double, 1> points,
            Out<int32_t, 1> out) {
  const size_t count = rows.size();
  require(temperatures.size() == count && top_ks.size() == count && top_ps.size() == count && min_ps.size() == count &&
              points.size() == count && out.size() == count,
          "the draws' arrays differ in length");
  read_rows(backend, logits, rows.data(), count, [&](size_t i, LogitReader& reader, bool sound) {
    const Draw draw = {temperatures.data()[i], static_cast<size_t>(std::max(top_ks.data()[i], 0)), top_ps.data()[i],
                       min_ps.data()[i], points.data()[i]};
    out.data()[i] = sound ? reader.choose(draw) : 0;
  });
}

// Of row rows[i]: log of the sum of exponentials, the rank of tokens[i], and the num_tops[i] best tokens.
void score(Backend& backend, Array<float, 2> logits, Array<int32_t, 1> rows, Array<int32_t, 1> tokens,
           Array<int32_t, 1> num_tops, Out<double, 1> log_totals, Out<int32_t, 1> ranks, Out<int32_t, 2> tops) {
  const size_t count = rows.size();
  require(tokens.size() == count && num_tops.size() == count && log_totals.size() == count && ranks.size() == count &&
              tops.shape(0) == count,
          "the scores' arrays differ in length");
  require(all_below(tokens.data(), count, logits.shape(1)), "a token is outside the vocabulary");
  require(tops.shape(1) <= logits.shape(1) && all_below(num_tops.data(), count, tops.shape(1) + 1),
          "more of the best tokens are asked for than there is room for");
  read_rows(backend, logits, rows.data(), count, [&](size_t i, LogitReader& reader, bool sound) {
    log_totals.data()[i] = sound ? reader.log_total() : NAN;
    ranks.data()[i] = sound ? reader.rank(tokens.data()[i]) : 0;
    if (sound) {
      reader.top(static_cast<size_t>(num_tops.data()[i]), tops.data() + i * tops.shape(1));
    }
  });
}

// ── probes: see probe.h ───────────────────────────────────────────────────────────────────────────────────────────────

// Bytes a second for each size of what is read over and over; the best of a few readings.
std::vector<double> read_rates(Backend& backend, const std::vector<size_t>& sizes) {
  nb::gil_scoped_release release;
  constexpr size_t CHUNK = ProbeKernels::CHUNK, MAPPED = 4096;
  constexpr double ENOUGH = 64e-3;  // seconds a size
  const size_t most = sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
  Arena arena;
  uint8_t* memory = static_cast<uint8_t*>(arena.allocate(most + CHUNK));
  in_parallel(backend.pool, most / MAPPED + 1, [&](size_t begin, size_t end) {
    for (size_t page = begin; page < end; ++page) {
      memory[page * MAPPED] = 1;
    }
  });
  std::vector<double> rates;
  for (const size_t size : sizes) {
    const size_t bytes = std::max(size / CHUNK, size_t{1}) * CHUNK;
    double best = 0.0, spent = 0.0;
    for (int pass = 0; pass < 3 || spent < ENOUGH; ++pass) {
      const double seconds = backend.kernels->probe->read(memory, bytes, backend.pool);
      spent += seconds;
      if (pass) {  // the first one fills the caches
        best = std::max(best, static_cast<double>(bytes) / seconds);
      }
    }
    rates.push_back(best);
  }
  return rates;
}

// Operations a second by the type that is multiplied: "int8", "bf16", "float32".
double product_rate(Backend& backend, const std::string& type) {
  const char* names[ProbeKernels::COUNT] = {"int8", "bf16", "float32"};
  const auto found = std::find(names, names + ProbeKernels::COUNT, type);
  require(found != names + ProbeKernels::COUNT, "products are of int8, bf16 or float32");
  nb::gil_scoped_release release;
  return backend.kernels->probe->multiply(static_cast<int>(found - names), backend.pool);
}

}  // namespace

NB_MODULE(OCTAVO_MODULE, module) {
  module.def("variants", [] {
    std::vector<std::string> names;
    for (const Kernels* const* table = available_kernels(); *table; ++table) {
      names.push_back((*table)->variant);
    }
    return names;
  });
  module.def("fit_f16", [](Array<float, 2> values) {
    nb::gil_scoped_release release;
    return fit_f16(values.data(), values.size());
  });

  nb::class_<Program>(module, "Program").def(nb::init<>()).def("run", &Program::run);

  nb::class_<Backend>(module, "Backend")
      .def(nb::init<const std::string&, int>(), nb::arg("variant"), nb::arg("num_threads"))
      .def("record", [](Backend& self, Program* program) { self.recording = program; }, nb::arg().none())
      .def_prop_ro("variant", [](const Backend& self) { return self.kernels->variant; })
      .def_prop_ro("num_threads", [](const Backend& self) { return self.pool.size(); });

  nb::class_<Matrix>(module, "Matrix")
      .def(nb::init<size_t>(), nb::arg("columns"))
      .def("resize", &Matrix::resize)
      .def_ro("rows", &Matrix::rows)
      .def_ro("columns", &Matrix::columns)
      .def("numpy", [](Matrix& self) {
        return nb::ndarray<nb::numpy, float, nb::ndim<2>>(self.data, {self.rows, self.columns}, nb::find(&self));
      });

  nb::class_<Vector>(module, "Vector").def(nb::init<Array<float, 1>>());

  nb::class_<PackedLinear>(module, "Linear")
      .def(nb::init<Backend&, size_t, bool>(), nb::keep_alive<1, 2>())
      .def("add_segment", &PackedLinear::add_segment)
      .def("drop_segment", &PackedLinear::drop_segment)
      .def("pack_quantized", &PackedLinear::pack_quantized, nb::arg("first"), nb::arg("codes"), nb::arg("scales"),
           nb::arg("minimums").none())
      .def("pack_float", &PackedLinear::pack_float)
      .def("set_bias", &PackedLinear::set_bias)
      .def_prop_ro("inputs", [](const PackedLinear& self) { return self.linear().inputs; })
      .def_prop_ro("outputs", [](const PackedLinear& self) { return self.linear().outputs; })
      .def_prop_ro("num_bytes", &PackedLinear::num_bytes)
      .def_prop_ro("num_bf16", &PackedLinear::num_bf16);

  module.def("linear", &linear, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg());
  module.def("add_linear", &add_linear);
  module.def("gate_up", &gate_up);
  module.def("logits", &logits);
  module.def("embed", &embed);

  nb::class_<Pages>(module, "Pages")
      .def(nb::init<size_t, size_t, size_t, size_t, size_t, const std::vector<std::pair<size_t, std::string>>&>(),
           nb::arg("num_pages"), nb::arg("page_bytes"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
           nb::arg("block_size"), nb::arg("layers"))
      .def("copy", &Pages::copy)
      .def("numpy", [](Pages& self) {
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(self.data, {self.num_pages, self.page_bytes}, nb::find(&self));
      });

  nb::class_<Step>(module, "Step").def(nb::init<>()).def("set", &Step::set);

  nb::class_<RopeTable>(module, "RopeTable").def(nb::init<Array<float, 2>, Array<float, 2>>());

  module.def("rope_write", &rope_write, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg().none(), nb::arg().none(), nb::arg());
  module.def("attention", &attention);

  module.def("best", &best);
  module.def("choose", &choose);
  module.def("score", &score);
  module.def("read_rates", &read_rates);
  module.def("product_rate", &product_rate);
}
