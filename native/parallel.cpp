#include "parallel.h"

#include <pthread.h>
#include <sched.h>

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

constexpr int SPINS = 2000;         // some 50 µs of pauses: longer than the gap between two kernels of a step
constexpr int SPINS_IN_TASK = 500;  // then let another thread have the core, should there be fewer cores than threads

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

}  // namespace

struct Pool::State {
  alignas(64) std::atomic<unsigned> round{0};  // raised by one for each task; workers wait on it
  void (*task)(void*, int) = nullptr;
  void* context = nullptr;
  bool stop = false;
  unsigned forks_seen = forks;
  std::vector<std::thread> workers;
  alignas(64) std::atomic<int> running{0};  // workers that have not finished the task
  alignas(64) std::atomic<int> arrived{0};  // threads at the barrier
  alignas(64) std::atomic<unsigned> passed{0};  // barriers passed
};

int available_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    return CPU_COUNT(&set);
  }
#endif
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return cores > 0 ? cores : 1;
}

Pool::Pool(int num_threads) : state_(nullptr), num_threads_(num_threads < 1 ? 1 : num_threads) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  static_cast<void>(registered);
  start();
}

void Pool::start() {
  state_ = new State;
  State* state = state_;
  for (int thread = 1; thread < num_threads_; ++thread) {
    state->workers.emplace_back([state, thread] {
      const FlushSubnormals flush;
      for (unsigned seen = 0;;) {
        for (int spin = 0; spin < SPINS && state->round.load(std::memory_order_acquire) == seen; ++spin) {
          pause();
        }
        state->round.wait(seen, std::memory_order_acquire);
        seen += 1;
        if (state->stop) {
          return;
        }
        state->task(state->context, thread);
        state->running.fetch_sub(1, std::memory_order_release);
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

void Pool::run(void (*task)(void*, int), void* context) {
  if (state_->forks_seen != forks) {
    start();  // what the parent left stays unfreed: its threads cannot be joined here
  }
  const FlushSubnormals flush;
  if (num_threads_ == 1) {
    task(context, 0);
    return;
  }
  State& state = *state_;
  state.task = task;
  state.context = context;
  state.running.store(num_threads_ - 1, std::memory_order_relaxed);
  state.round.fetch_add(1, std::memory_order_release);
  state.round.notify_all();
  task(context, 0);
  for (int spin = 0; state.running.load(std::memory_order_acquire) != 0; ++spin) {
    spin < SPINS_IN_TASK ? pause() : std::this_thread::yield();
  }
}

void Pool::barrier() {
  if (num_threads_ == 1) {
    return;
  }
  State& state = *state_;
  const unsigned passed = state.passed.load(std::memory_order_relaxed);
  if (state.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
    state.arrived.store(0, std::memory_order_relaxed);
    state.passed.store(passed + 1, std::memory_order_release);
    return;
  }
  for (int spin = 0; state.passed.load(std::memory_order_acquire) == passed; ++spin) {
    spin < SPINS_IN_TASK ? pause() : std::this_thread::yield();
  }
}

Share share(size_t total, int index, int count) {
  const size_t n = static_cast<size_t>(count);
  const size_t i = static_cast<size_t>(index);
  return {total * i / n, total * (i + 1) / n};
}

}  // namespace octavo
