// A fixed team of threads that runs one task at a time on all of its members.
//
// Owns the threads and their waiting, never the division of work: a task asks for its index and takes its static share.
#pragma once

#include <stddef.h>

namespace octavo {

// Cores this process may run on.
int available_cores();

class Pool {
 public:
  // The calling thread counts as one of `num_threads`; the others start now and live until destruction.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return num_threads_; }

  // Calls task(context, thread) once for each thread 0 … size-1 and returns when all have returned. Subnormal floats count
  // as zero meanwhile. One caller at a time. Workers spin for a moment after a task, then sleep. After a fork the child's
  // first run starts workers of its own.
  void run(void (*task)(void* context, int thread), void* context);

  // Inside a task: waits until every thread of the pool has come here.
  void barrier();

 private:
  struct State;
  void start();
  State* state_;
  int num_threads_;
};

// Thread `index` of `count` takes items begin … end-1 of `total`, in runs of equal length (give or take one).
struct Share {
  size_t begin, end;
};
Share share(size_t total, int index, int count);

}  // namespace octavo
