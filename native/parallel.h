// A fixed team of threads that runs one task at a time on all of its members.
//
// Owns the threads and their waiting. A task's items are divided into the same parts whatever the threads do: each thread
// takes its own parts and then, from the others' ends, those that nobody has begun. So no task waits for a thread that the
// system has put aside: on a busy machine, the others do its work. And memory is not idle when they are: threads that wait
// ask for what they are going to read.
#pragma once

#include <stddef.h>

#include <vector>

namespace octavo {

// What a task reads, by thread, and what is read after it: a ring. Nothing of it is touched but by prefetching.
struct Reading {
  struct Span {
    const void* data;
    size_t bytes;
  };
  std::vector<std::vector<Span>> threads;
  const Reading* next;
};

class Pool {
 public:
  // Works on items begin … end-1. `thread` is 0 … size-1 and differs between the threads that run at once.
  using Task = void (*)(void* context, size_t begin, size_t end, int thread);

  // The calling thread counts as one of `num_threads`; the others start now and live until destruction.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return num_threads_; }

  // Runs the task on items 0 … num_items-1 and returns when all are done. Subnormal floats count as zero meanwhile. One
  // caller at a time. Workers spin for a moment after a task, then sleep. After a fork the child's first run starts workers
  // of its own.
  void run(size_t num_items, Task task, void* context);

  // Tells what is read next: from now on, threads that wait ask for some of their spans, and of those that follow. The ring
  // lives as long as the pool.
  void expect(const Reading* reading);

 private:
  struct State;
  void start();
  State* state_;
  int num_threads_;
};

}  // namespace octavo
