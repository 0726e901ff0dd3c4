#include "draw.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>

namespace octavo {
namespace {

// How far below the best logit heads of the vocabulary reach, in units of temperature. The last one is everything that can
// be drawn: its exponential is 0.
constexpr double HEADS[] = {3.0, 5.0, 7.0, 9.0, 12.0, 104.0};

// Ascending where logits descend and, among equal ones, ids ascend.
uint64_t order_of(float logit, size_t id) {
  const float sound = logit + 0.0f;  // makes one zero of two
  uint32_t word;
  std::memcpy(&word, &sound, 4);
  word = word >> 31 ? word : word ^ 0x7fffffff;
  return static_cast<uint64_t>(word) << 32 | id;
}

int32_t id_of(uint64_t order) { return static_cast<int32_t>(order & 0xffffffff); }

}  // namespace

LogitReader::LogitReader(const LogitKernels& kernels, size_t vocabulary)
    : kernels_(&kernels), size_(vocabulary), maxima_((vocabulary + SPAN - 1) / SPAN), sorted_maxima_(maxima_.size()),
      kept_(vocabulary + 1), masses_(vocabulary), line_(vocabulary) {}

bool LogitReader::read(const float* row) {
  row_ = row;
  if (kernels_->maxima(row, size_, maxima_.data())) {
    return false;
  }
  largest_ = *std::max_element(maxima_.begin(), maxima_.end());
  return std::isfinite(largest_);
}

int32_t LogitReader::best() const {
  const size_t span = static_cast<size_t>(std::find(maxima_.begin(), maxima_.end(), largest_) - maxima_.begin());
  return static_cast<int32_t>(std::find(row_ + span * SPAN, row_ + size_, largest_) - row_);
}

double LogitReader::log_total() const {
  return static_cast<double>(largest_) + std::log(kernels_->total(row_, size_, largest_, 1.0f));
}

int32_t LogitReader::rank(int32_t token) const {
  const float value = row_[token];
  size_t above = 0;
  for (size_t begin = 0; begin < size_; begin += SPAN) {
    if (maxima_[begin / SPAN] > value) {
      above += static_cast<size_t>(
          std::count_if(row_ + begin, row_ + std::min(begin + SPAN, size_), [value](float x) { return x > value; }));
    }
  }
  return static_cast<int32_t>(above + 1);
}

void LogitReader::top(size_t count, int32_t* out) {
  keep_first(count);
  std::transform(kept_.begin(), kept_.begin() + static_cast<ptrdiff_t>(num_kept_), out, id_of);
}

// Tokens of at least `lowest`, in order.
void LogitReader::keep_from(float lowest) {
  num_kept_ = 0;
  for (size_t begin = 0; begin < size_; begin += SPAN) {
    if (maxima_[begin / SPAN] >= lowest) {
      for (size_t id = begin; id < std::min(begin + SPAN, size_); ++id) {
        kept_[num_kept_] = order_of(row_[id], id);  // to be written over if it is not kept
        num_kept_ += row_[id] >= lowest;
      }
    }
  }
  std::sort(kept_.begin(), kept_.begin() + static_cast<ptrdiff_t>(num_kept_));
}

// The `count` most likely tokens, in order. The count-th largest of the spans' maxima bounds the count-th logit from below.
void LogitReader::keep_first(size_t count) {
  float lowest = count ? -INFINITY : INFINITY;
  if (count > 0 && count <= maxima_.size()) {
    sorted_maxima_ = maxima_;
    const auto nth = sorted_maxima_.begin() + static_cast<ptrdiff_t>(count - 1);
    std::nth_element(sorted_maxima_.begin(), nth, sorted_maxima_.end(), std::greater<>());
    lowest = *nth;
  }
  keep_from(lowest);
  num_kept_ = std::min(num_kept_, count);
}

// Lays the tokens kept end to end, each as long as its exponential.
void LogitReader::lay(float scale) {
  for (size_t i = 0; i < num_kept_; ++i) {
    masses_[i] = row_[id_of(kept_[i])];
  }
  kernels_->exponentials(masses_.data(), num_kept_, largest_, scale, masses_.data());
  double end = 0.0;
  for (size_t i = 0; i < num_kept_; ++i) {
    line_[i] = end += static_cast<double>(masses_[i]);
  }
}

// Only the head of the vocabulary is sorted. Each filter keeps a prefix of the order "most likely first", and the running
// sum of a prefix does not depend on how much of the rest is known, so a longer head changes no answer.
int32_t LogitReader::choose(const Draw& draw) {
  const double largest = largest_;
  const float scale = static_cast<float>(1.0 / draw.temperature);
  const double lowest = draw.min_p > 0.0 ? largest + draw.temperature * std::log(draw.min_p) : -DBL_MAX;
  double total = -1.0;  // of the whole vocabulary, where it is known
  if (draw.top_k > 0 && draw.top_k < size_) {
    keep_first(draw.top_k);
    while (row_[id_of(kept_[num_kept_ - 1])] == -INFINITY) {
      --num_kept_;
    }
    lay(scale);
  } else if (draw.top_p == 1.0 && draw.min_p > 0.0) {
    keep_from(static_cast<float>(std::max(lowest, -static_cast<double>(FLT_MAX))));
    lay(scale);
  } else {
    total = kernels_->total(row_, size_, largest_, scale);
    const double needed = total * (draw.top_p < 1.0 ? draw.top_p : draw.point);
    for (const double depth : HEADS) {
      keep_from(static_cast<float>(std::max(largest - depth * draw.temperature, -static_cast<double>(FLT_MAX))));
      lay(scale);
      if (line_[num_kept_ - 1] > needed) {
        break;
      }
    }
  }
  size_t kept = num_kept_;
  const double* const line = line_.data();
  if (draw.top_p < 1.0) {
    const double mass = draw.top_p * (total < 0.0 ? line[kept - 1] : total);
    kept = std::min(kept, static_cast<size_t>(std::lower_bound(line, line + kept, mass) - line) + 1);
  }
  if (draw.min_p > 0.0) {
    size_t likely = 0;  // all but the first may be too unlikely
    while (likely < kept && static_cast<double>(row_[id_of(kept_[likely])]) >= lowest) {
      ++likely;
    }
    kept = std::max<size_t>(likely, 1);
  }
  if (draw.top_p < 1.0 || total < 0.0) {
    total = line[kept - 1];
  }
  const size_t place = static_cast<size_t>(std::upper_bound(line, line + kept, draw.point * total) - line);
  return id_of(kept_[std::min(place, kept - 1)]);
}

}  // namespace octavo
