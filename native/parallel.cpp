#include "parallel.h"

#include <pthread.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

std::atomic<unsigned> forks{0};  // raised in every child, whose copy of a pool has lost its workers

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr size_t PARTS = 4;         // of a thread: what another can take over
constexpr int SPINS = 2000;         // some 50 to 100 µs of pauses: longer than the gap between two kernels of a step
constexpr size_t AHEAD_TASKS = 16, AHEAD_BYTES = 256 << 10;  // what a thread asks for: of so many tasks, so much of each
constexpr int SPINS_AT_END = 500;   // then let another thread have the core, should there be fewer cores than threads

// Subnormal numbers are zero in AMX products; here they are zero everywhere, so that all variants agree.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (1ull << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  unsigned long long saved_;
#else
  FlushSubnormals() {}
#endif
};

// Asks for what a thread is going to read, a few lines at a time.
class Ahead {
 public:
  explicit Ahead(size_t thread) : thread_(thread) {}

  // False if there is nothing left to ask for.
  bool ask(const Reading* expected) {
    if (expected != expected_) {
      follow(expected);
    }
    if (tasks_left_ == 0) {
      return false;
    }
    const std::vector<Reading::Span>& spans = at_->threads[thread_];
    if (span_ == spans.size() || asked_ >= AHEAD_BYTES) {
      at_ = at_->next;
      span_ = offset_ = asked_ = 0;
      tasks_left_ = at_ == expected_ ? 0 : tasks_left_ - 1;
      return true;
    }
    const char* lines = static_cast<const char*>(spans[span_].data) + offset_;
    for (size_t line = 0; line < LINES; ++line) {
      __builtin_prefetch(lines + line * 64, 0, 2);
    }
    offset_ += LINES * 64;
    asked_ += LINES * 64;
    if (offset_ >= spans[span_].bytes) {
      ++span_;
      offset_ = 0;
    }
    return true;
  }

 private:
  static constexpr size_t LINES = 4;

  // Goes on where it is if that is still ahead, else begins anew.
  void follow(const Reading* expected) {
    expected_ = expected;
    const Reading* reading = expected;
    for (size_t tasks = AHEAD_TASKS; tasks > 0; --tasks, reading = reading->next) {
      if (reading == at_) {
        tasks_left_ = tasks;
        return;
      }
    }
    at_ = expected;
    span_ = offset_ = asked_ = 0;
    tasks_left_ = AHEAD_TASKS;
  }

  const size_t thread_;
  const Reading *expected_ = nullptr, *at_ = nullptr;
  size_t span_ = 0, offset_ = 0, asked_ = 0, tasks_left_ = 0;
};

}  // namespace

struct Pool::State {
  // The round in which each part of a thread was last begun. Whoever raises it from the round before does the part.
  struct alignas(64) Claims {
    std::atomic<unsigned> begun[PARTS];
  };

  explicit State(size_t num_threads) : claims(new Claims[num_threads]()), num_threads(num_threads) {}

  // Written by the caller between rounds. A worker that comes late may read them then, but will find no part to begin.
  std::atomic<Task> task{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<size_t> num_items{0};
  std::unique_ptr<Claims[]> claims;
  size_t num_threads;
  alignas(64) std::atomic<const Reading*> expected{nullptr};
  alignas(64) std::atomic<unsigned> round{0};    // raised by one for each task
  alignas(64) std::atomic<size_t> unfinished{0};  // parts of this round
  alignas(64) std::atomic<bool> stop{false};
  unsigned forks_seen = forks;
  std::vector<std::thread> workers;

  void work(unsigned current, size_t thread) {
    const Task call = task.load(std::memory_order_relaxed);
    void* const argument = context.load(std::memory_order_relaxed);
    const size_t items = num_items.load(std::memory_order_relaxed);
    const size_t parts = num_threads * PARTS;
    size_t finished = 0;
    for (size_t i = 0; i < num_threads; ++i) {
      const size_t owner = (thread + i) % num_threads;
      for (size_t k = 0; k < PARTS; ++k) {
        const size_t part = i == 0 ? k : PARTS - 1 - k;
        unsigned before = current - 1;
        if (!claims[owner].begun[part].compare_exchange_strong(before, current, std::memory_order_acq_rel)) {
          continue;
        }
        const size_t index = owner * PARTS + part;
        const size_t begin = items * index / parts, end = items * (index + 1) / parts;
        if (begin < end) {
          call(argument, begin, end, static_cast<int>(thread));
        }
        ++finished;
      }
    }
    if (finished) {
      unfinished.fetch_sub(finished, std::memory_order_acq_rel);
    }
  }
};

Pool::Pool(int num_threads) : state_(nullptr), num_threads_(num_threads < 1 ? 1 : num_threads) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  static_cast<void>(registered);
  start();
}

void Pool::start() {
  state_ = new State(static_cast<size_t>(num_threads_));
  State* state = state_;
  for (size_t thread = 1; thread < state->num_threads; ++thread) {
    state->workers.emplace_back([state, thread] {
      const FlushSubnormals flush;
      Ahead ahead(thread);
      for (unsigned seen = 0;;) {
        for (int spin = 0; spin < SPINS && state->round.load(std::memory_order_acquire) == seen;) {
          if (!ahead.ask(state->expected.load(std::memory_order_acquire))) {
            pause();
            ++spin;
          }
        }
        state->round.wait(seen, std::memory_order_acquire);
        seen = state->round.load(std::memory_order_acquire);
        if (state->stop) {
          return;
        }
        state->work(seen, thread);
      }
    });
  }
}

Pool::~Pool() {
  if (state_->forks_seen != forks) {
    return;  // a child that never ran: the workers are the parent's
  }
  state_->stop = true;
  state_->round.fetch_add(1, std::memory_order_release);
  state_->round.notify_all();
  for (std::thread& worker : state_->workers) {
    worker.join();
  }
  delete state_;
}

void Pool::expect(const Reading* reading) { state_->expected.store(reading, std::memory_order_release); }

void Pool::run(size_t num_items, Task task, void* context) {
  const FlushSubnormals flush;
  if (num_threads_ == 1 || num_items < 2) {
    if (num_items) {
      task(context, 0, num_items, 0);
    }
    return;
  }
  if (state_->forks_seen != forks) {
    start();  // what the parent left stays unfreed: its threads cannot be joined here
  }
  State& state = *state_;
  state.task.store(task, std::memory_order_relaxed);
  state.context.store(context, std::memory_order_relaxed);
  state.num_items.store(num_items, std::memory_order_relaxed);
  state.unfinished.store(state.num_threads * PARTS, std::memory_order_relaxed);
  const unsigned round = state.round.fetch_add(1, std::memory_order_release) + 1;
  state.round.notify_all();
  state.work(round, 0);
  for (int spin = 0; state.unfinished.load(std::memory_order_acquire) != 0; ++spin) {
    spin < SPINS_AT_END ? pause() : std::this_thread::yield();
  }
}

}  // namespace octavo
