// Aligned memory: an arena for what is loaded once, and scratch that only grows.
#pragma once

#include <stddef.h>

#include <vector>

namespace octavo {

// Memory for weights and page pools: 64-byte aligned, zeroed, in huge pages where the system grants them, freed at once
// when the arena dies. Throws std::bad_alloc.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  void* allocate(size_t bytes);
  size_t num_bytes() const;

 private:
  struct Slab {
    void* memory;
    size_t bytes, used;
  };
  std::vector<Slab> slabs_;
};

// Bytes of the last cache before memory, as far as Linux tells; else the largest number.
size_t last_cache();

// A 64-byte aligned buffer that is reallocated, losing its content, only when more is asked for than ever before.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* reserve(size_t bytes);

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace octavo
