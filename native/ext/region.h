// Rows of keys and values in address space that is reserved once: a page becomes memory when a token is written to it.
//
// MLX must never write to a region: it does not own the memory, so it would silently copy all of it. `rows.h` writes in
// place.
#pragma once
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "op.h"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

namespace phalanx_cpu {

// [rows, ...] in row-major order, followed by space for one row, which swaps use.
class Regions {
 public:
  static Regions& get() {
    static Regions* regions = new Regions;  // arrays may outlive statics
    return *regions;
  }

  // An evaluated array of zeros that takes no memory yet. Throws if the system refuses the address space.
  mx::array reserve(const mx::Shape& shape, mx::Dtype dtype) {
    if (shape.empty() || shape[0] <= 0) throw std::invalid_argument("reserve: there must be rows");
    size_t row = mx::size_of(dtype);
    for (size_t i = 1; i < shape.size(); i++) {
      if (shape[i] <= 0) throw std::invalid_argument("reserve: a dimension of " + std::to_string(shape[i]));
      row *= static_cast<size_t>(shape[i]);
    }
    const size_t bytes = row * static_cast<size_t>(shape[0]), mapped = page_ + up(bytes + row);
    void* begin = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED)
      throw std::runtime_error("reserve: no " + std::to_string(mapped) + " bytes of address space: " +
                               std::strerror(errno));
#ifdef MADV_NOHUGEPAGE
    madvise(begin, mapped, MADV_NOHUGEPAGE);  // one token of a head would take 2 MiB
#endif
    auto* place = static_cast<char*>(begin) + page_;
    auto* size = reinterpret_cast<size_t*>(place) - 1;  // MLX reads a buffer's size in front of it
    *size = bytes;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      rows_[place] = row;
    }
    auto unmap = [this, begin, mapped, place](mx::allocator::Buffer) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        rows_.erase(place);
      }
      munmap(begin, mapped);
    };
    return mx::array(mx::allocator::Data(mx::allocator::Buffer(size), unmap), shape, dtype);
  }

  // Whether an evaluated array is a whole region, not a copy of one.
  bool is_region(const mx::array& a) {
    std::lock_guard<std::mutex> lock(mutex_);
    return a.flags().row_contiguous && rows_.count(static_cast<const char*>(data(a))) != 0;
  }

  // Zeroes a row and returns its pages to the system. No computation may be using the row.
  void clear(mx::array region, int row) {
    const auto [begin, bytes] = at(region, row);
    char *first = begin + (up(address(begin)) - address(begin)), *last = begin + bytes;
    last -= address(last) % page_;
    if (first >= last || madvise(first, last - first, MADV_DONTNEED) != 0) {
      std::memset(begin, 0, bytes);
      return;
    }
    std::memset(begin, 0, first - begin);
    std::memset(last, 0, begin + bytes - last);
  }

  // Swaps two rows: by remapping pages if rows are page-aligned and the system can (Linux 5.7); else by copying the
  // first `length` entries of the last axis but one. No computation may be using the rows.
  void swap(mx::array region, int a, int b, int length) {
    if (a == b) return;
    const auto [one, bytes] = at(region, a);
    char* const other = at(region, b).first;
    char* const spare = at(region, 0).first + bytes * static_cast<size_t>(region.shape(0));
    if (bytes % page_ == 0 && move(one, spare, bytes)) {
      if (move(other, one, bytes)) {
        if (move(spare, other, bytes)) return;
        if (!move(one, other, bytes)) throw std::runtime_error("swap_rows: the system does not move pages back");
      }
      if (!move(spare, one, bytes)) throw std::runtime_error("swap_rows: the system does not move pages back");
    }
    swap_bytes(region, one, other, bytes, length);
  }

 private:
  Regions() : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {}

  static size_t address(const char* p) { return reinterpret_cast<size_t>(p); }
  size_t up(size_t bytes) const { return (bytes + page_ - 1) / page_ * page_; }

  std::pair<char*, size_t> at(mx::array& region, int row) {
    region.eval();
    if (!is_region(region)) throw std::runtime_error("what should be a reserved region is a copy");
    if (row < 0 || row >= region.shape(0)) throw std::invalid_argument("the region does not have that row");
    const size_t bytes = region.nbytes() / static_cast<size_t>(region.shape(0));
    return {static_cast<char*>(data(region)) + bytes * static_cast<size_t>(row), bytes};
  }

  // Afterwards the source has no pages and reads as zeros.
  static bool move(char* from, char* to, size_t bytes) {
    return mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) != MAP_FAILED;
  }

  static void swap_bytes(const mx::array& region, char* one, char* other, size_t bytes, int length) {
    size_t heads = 1, used = bytes;
    if (region.ndim() == 4) {
      heads = static_cast<size_t>(region.shape(1));
      used = static_cast<size_t>(std::min(length, region.shape(2))) * region.shape(3) * region.itemsize();
    }
    for (size_t h = 0; h < heads; h++) std::swap_ranges(one + h * (bytes / heads), one + h * (bytes / heads) + used,
                                                        other + h * (bytes / heads));
  }

  const size_t page_;
  std::mutex mutex_;
  std::map<const char*, size_t> rows_;  // start of a region -> bytes per row
};

}  // namespace phalanx_cpu
