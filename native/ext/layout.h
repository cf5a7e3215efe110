// What kernels ask of an input's layout, which is known only when an operation is evaluated: for use in `Op::Fill`.
#pragma once
#include <cstring>

#include "op.h"

namespace phalanx_cpu {

// While an operation is prepared (`replay.h`): what has to be done before it, and what has to live as long.
struct Preparation {
  std::vector<Task> tasks;
  Arrays kept;

  Preparation() { current() = this; }
  ~Preparation() { current() = nullptr; }
  Preparation(const Preparation&) = delete;
  Preparation& operator=(const Preparation&) = delete;

  static Preparation*& current() {
    static thread_local Preparation* preparation = nullptr;
    return preparation;
  }
};

inline mx::Strides row_major_strides(const mx::Shape& shape) {
  mx::Strides strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

// Elements of a view to others, both `strides` apart and in the order of `shape`.
inline void copy_elements(char* to, const char* from, const mx::Shape& shape, const mx::Strides& places,
                          const mx::Strides& strides, size_t size, size_t axis = 0) {
  if (axis == shape.size()) {
    std::memcpy(to, from, size);
    return;
  }
  const auto count = static_cast<size_t>(shape[axis]);
  if (axis + 1 == shape.size() && strides[axis] == 1 && places[axis] == 1) {
    std::memcpy(to, from, count * size);
    return;
  }
  const auto step = static_cast<int64_t>(size);
  for (size_t i = 0; i < count; i++, to += step * places[axis], from += step * strides[axis])
    copy_elements(to, from, shape, places, strides, size, axis + 1);
}

// A row-major copy of a view, made on the stream just before the kernel that writes `out`.
inline mx::array copied(const mx::array& a, const mx::array& out) {
  mx::array copy(a.shape(), a.dtype(), nullptr, {});
  copy.set_data(mx::allocator::malloc(copy.nbytes()));
  auto work = [from = static_cast<const char*>(data(a)), to = static_cast<char*>(data(copy)), shape = a.shape(),
               places = copy.strides(), strides = a.strides(), size = a.itemsize()] {
    copy_elements(to, from, shape, places, strides, size);
  };
  if (Preparation* preparation = Preparation::current()) {
    preparation->tasks.push_back([work](int) { work(); });
    preparation->kept.push_back(copy);
  } else {
    auto& encoder = mx::cpu::get_command_encoder(out.primitive().stream());
    encoder.dispatch(std::move(work));
    encoder.add_temporary(copy);
  }
  return copy;
}

// In row-major order without gaps, whatever the array was.
inline const void* row_major(const mx::array& a, const mx::array& out) {
  return data(a.flags().row_contiguous ? a : copied(a, out));
}

inline bool last_axis_dense(const mx::array& a) { return a.shape(-1) <= 1 || a.strides(-1) == 1; }

// The array, or a copy where the elements of its last axis are not neighbours. Other axes may have any stride.
inline mx::array dense(const mx::array& a, const mx::array& out) { return last_axis_dense(a) ? a : copied(a, out); }

// A tensor of any rank as [rows, width], where that is one stride; else a copy.
struct Rows {
  const void* data;
  int64_t stride;
};
inline Rows rows_of(const mx::array& a, const mx::array& out) {
  int64_t stride = a.shape(-1), next = 0;  // `next`: the stride that continues the axes so far
  bool regular = last_axis_dense(a);
  for (int axis = static_cast<int>(a.ndim()) - 2; axis >= 0 && regular; axis--) {
    if (a.shape(axis) == 1) continue;
    if (next == 0) stride = a.strides(axis);
    regular = next == 0 || a.strides(axis) == next;
    next = a.strides(axis) * a.shape(axis);
    if (next == 0) regular = regular && axis == 0;  // a repeated axis: only when nothing comes before it
  }
  if (regular) return {data(a), stride};
  return {data(copied(a, out)), a.shape(-1)};
}

// Lets an output that is computed element by element, or row by row, reuse the memory of an input without other users.
// Page faults of large new buffers cost more than the arithmetic.
inline bool take_over(const mx::array& in, mx::array& out) {
  if (!in.is_donatable() || !in.flags().row_contiguous || in.dtype() != out.dtype() || in.size() != out.size())
    return false;
  out.copy_shared_buffer(in);
  return true;
}

// Strides of the axes [from, from + 3).
inline void copy_strides(int64_t (&to)[3], const mx::array& a, int from = 0) {
  for (int i = 0; i < 3; i++) to[i] = a.strides(from + i);
}

}  // namespace phalanx_cpu
