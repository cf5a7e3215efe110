// Memory for arrays that are filled from outside, as weights are.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "mlx/allocator.h"
#include "mlx/array.h"

namespace phalanx_cpu {

namespace mx = mlx::core;

namespace detail {

constexpr uintptr_t huge_page = uintptr_t{2} << 20;
constexpr uintptr_t line = 64;

// A first touch costs a page fault: every 4 KiB, or every 2 MiB where the system agrees. It may not.
inline void prefer_huge_pages(void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  uintptr_t first = (reinterpret_cast<uintptr_t>(data) + huge_page - 1) & ~(huge_page - 1);
  uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(huge_page - 1);
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace detail

// An evaluated array whose content is whatever the memory holds: write all of it before it is read. It begins with a
// cache line; what MLX allocates begins behind its length, so that every vector would be read from two lines.
inline mx::array buffer(const mx::Shape& shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (auto n : shape) {
    if (n < 0) throw std::invalid_argument("buffer: a dimension of " + std::to_string(n));
    bytes *= n;
  }
  mx::allocator::Data memory = mx::allocator::malloc(bytes + detail::line);
  const auto begin = reinterpret_cast<uintptr_t>(memory.buffer().raw_ptr());
  const uintptr_t behind = -begin % detail::line;
  detail::prefer_huge_pages(reinterpret_cast<void*>(begin + behind), bytes);
  mx::array made(mx::allocator::Data(mx::allocator::Buffer(nullptr), nullptr), shape, dtype);
  made.set_data(std::move(memory), made.size(), made.strides(), made.flags(), static_cast<int64_t>(behind));
  return made;
}

}  // namespace phalanx_cpu
