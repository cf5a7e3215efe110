// What kernels ask of an input's layout, which is known only when an operation is evaluated: for use in `Op::Fill`.
#pragma once
#include <cstring>

#include "op.h"

namespace phalanx_cpu {

// A row-major copy of a view, made on the stream just before the kernel that writes `out`.
inline mx::array copied(const mx::array& a, const mx::array& out) {
  auto& encoder = mx::cpu::get_command_encoder(out.primitive().stream());
  mx::array copy(a.shape(), a.dtype(), nullptr, {});
  copy.set_data(mx::allocator::malloc(copy.nbytes()));
  encoder.dispatch([from = static_cast<const char*>(data(a)), to = static_cast<char*>(data(copy)), shape = a.shape(),
                    strides = a.strides(), count = a.size(), size = a.itemsize()] {
    std::vector<int64_t> place(shape.size());
    int64_t offset = 0;
    for (size_t i = 0; i < count; i++) {
      std::memcpy(to + i * size, from + offset * static_cast<int64_t>(size), size);
      for (size_t axis = shape.size(); axis-- > 0;) {  // the next element in row-major order
        offset += strides[axis];
        if (++place[axis] < shape[axis]) break;
        offset -= place[axis] * strides[axis];
        place[axis] = 0;
      }
    }
  });
  encoder.add_temporary(copy);
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

// Lets an output that is computed element by element, or row by row, live in the memory of an input that nobody else
// will read; large new buffers cost more, in page faults, than the arithmetic.
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
