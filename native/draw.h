// From a row of logits to tokens: the best, those that are kept, the one that is drawn. One copy for all variants: what
// costs time is in logits.h, and the rest is exact integers and float64 in one order.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "logits.h"

namespace octavo {

// See `Draws` in ops/api.py.
struct Draw {
  double temperature;
  size_t top_k;  // 0: all
  double top_p, min_p, point;
};

// Reads one row after another; all its memory is taken at once, none while it works.
class LogitReader {
 public:
  LogitReader(const LogitKernels& kernels, size_t vocabulary);

  size_t vocabulary() const { return size_; }

  // Must come first. False if a logit is NaN or +inf or none is finite; then nothing else may be asked.
  bool read(const float* row);

  int32_t best() const;
  double log_total() const;  // of all exponentials
  int32_t rank(int32_t token) const;
  void top(size_t count, int32_t* out);  // the most likely, lower ids first among equals; at most the vocabulary
  int32_t choose(const Draw& draw);

 private:
  void keep_from(float lowest);
  void keep_first(size_t count);
  void lay(float scale);

  const LogitKernels* kernels_;
  size_t size_;
  const float* row_ = nullptr;
  float largest_ = 0.0f;
  std::vector<float> maxima_, sorted_maxima_;
  // the tokens kept, most likely first: (order, id), and where each ends on the line
  size_t num_kept_ = 0;
  std::vector<uint64_t> kept_;
  std::vector<float> masses_;
  std::vector<double> line_;
};

}  // namespace octavo
