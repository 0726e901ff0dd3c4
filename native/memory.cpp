#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <fstream>
#include <new>

namespace octavo {
namespace {

constexpr size_t LINE = 64;
constexpr size_t HUGE_PAGE = size_t{2} << 20;
constexpr size_t SLAB = size_t{64} << 20;  // address space; memory is taken as it is touched

size_t round_up(size_t bytes, size_t unit) {
  if (bytes > static_cast<size_t>(-1) - unit) {
    throw std::bad_alloc();
  }
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

Arena::~Arena() {
  for (const Slab& slab : slabs_) {
    munmap(slab.memory, slab.bytes);
  }
}

void* Arena::allocate(size_t bytes) {
  bytes = round_up(bytes ? bytes : 1, LINE);
  if (slabs_.empty() || slabs_.back().bytes - slabs_.back().used < bytes) {
    const size_t wanted = round_up(bytes > SLAB ? bytes : SLAB, HUGE_PAGE);
    void* memory = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::bad_alloc();
    }
#if defined(MADV_HUGEPAGE)
    madvise(memory, wanted, MADV_HUGEPAGE);  // a wish: without it all works, slower
#endif
    slabs_.push_back({memory, wanted, 0});
  }
  Slab& slab = slabs_.back();
  void* out = static_cast<char*>(slab.memory) + slab.used;
  slab.used += bytes;
  return out;
}

size_t Arena::num_bytes() const {
  size_t bytes = 0;
  for (const Slab& slab : slabs_) {
    bytes += slab.used;
  }
  return bytes;
}

size_t last_cache() {
  size_t kib = 0;
  std::ifstream("/sys/devices/system/cpu/cpu0/cache/index3/size") >> kib;
  return kib ? kib << 10 : static_cast<size_t>(-1);
}

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::reserve(size_t bytes) {
  if (bytes > bytes_) {
    bytes = round_up(bytes, LINE);
    std::free(memory_);
    bytes_ = 0;
    memory_ = std::aligned_alloc(LINE, bytes);
    if (!memory_) {
      throw std::bad_alloc();
    }
    bytes_ = bytes;
  }
  return memory_;
}

}  // namespace octavo
