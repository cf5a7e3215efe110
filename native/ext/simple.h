// Operations of MLX that this file computes with the same bits: copies, and operations whose result IEEE 754
// determines. The routing of a mixture of experts consists of them.
//
// Otherwise a replay would dispatch each of them to the stream separately, in newly allocated memory.
#pragma once
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "layout.h"

namespace phalanx_cpu {

namespace simple {

using Like = std::pair<mx::Shape, mx::Dtype>;

// A function of two elements, over arrays of one shape; `to` has no gaps. Returns where it ends.
template <class T, class Of>
T* combine(T* to, const T* a, const T* b, const mx::Shape& shape, const mx::Strides& of_a, const mx::Strides& of_b,
           const Of& of, size_t axis = 0) {
  if (axis == shape.size()) {
    *to = of(*a, *b);
    return to + 1;
  }
  const int count = shape[axis];
  const int64_t step_a = of_a[axis], step_b = of_b[axis];
  if (axis + 1 < shape.size()) {
    for (int i = 0; i < count; i++, a += step_a, b += step_b)
      to = combine(to, a, b, shape, of_a, of_b, of, axis + 1);
    return to;
  }
  if (step_a == 1 && step_b == 1)
    for (int i = 0; i < count; i++) to[i] = of(a[i], b[i]);
  else if (step_a == 1 && step_b == 0)
    for (int i = 0; i < count; i++) to[i] = of(a[i], *b);
  else
    for (int i = 0; i < count; i++) to[i] = of(a[i * step_a], b[i * step_b]);
  return to + count;
}

template <class T>
T as(float value) {
  return static_cast<T>(value);
}

template <class T, class Of>
Task pairwise(const Arrays& in, mx::array& out, Of of) {
  const mx::array &a = in.front(), &b = in.back();
  return [to = out.data<T>(), from_a = a.data<T>(), from_b = b.data<T>(), shape = out.shape(), of_a = a.strides(),
          of_b = b.strides(), of](int) { combine(to, from_a, from_b, shape, of_a, of_b, of); };
}

template <class T>
Task arithmetic(const std::string& name, const Arrays& in, mx::array& out) {
  if (name == "Add") return pairwise<T>(in, out, [](T a, T b) { return as<T>(float(a) + float(b)); });
  if (name == "Subtract") return pairwise<T>(in, out, [](T a, T b) { return as<T>(float(a) - float(b)); });
  if (name == "Multiply") return pairwise<T>(in, out, [](T a, T b) { return as<T>(float(a) * float(b)); });
  if (name == "Divide") return pairwise<T>(in, out, [](T a, T b) { return as<T>(float(a) / float(b)); });
  if (name == "Maximum")  // NaN if the first one is
    return pairwise<T>(in, out, [](T a, T b) { return float(a) > float(b) || float(a) != float(a) ? a : b; });
  if (name == "Minimum")
    return pairwise<T>(in, out, [](T a, T b) { return float(a) < float(b) || float(a) != float(a) ? a : b; });
  if (name == "Square") return pairwise<T>(in, out, [](T a, T) { return as<T>(float(a) * float(a)); });
  return pairwise<T>(in, out, [](T a, T) { return as<T>(-float(a)); });  // Negative
}

// Along one axis, one after the other in float32, as MLX does.
template <class T>
Task sum(const mx::array& x, mx::array& out, int axis) {
  int64_t outer = 1, inner = 1;
  for (int i = 0; i < axis; i++) outer *= x.shape(i);
  for (int i = axis + 1; i < static_cast<int>(x.ndim()); i++) inner *= x.shape(i);
  const auto* from = static_cast<const T*>(row_major(x, out));
  return [=, to = out.data<T>(), count = x.shape(axis)](int) {
    constexpr int64_t kAtOnce = 64;
    for (int64_t o = 0; o < outer; o++)
      for (int64_t start = 0; start < inner; start += kAtOnce) {
        const int64_t width = std::min(kAtOnce, inner - start);
        const T* next = from + o * count * inner + start;
        float sums[kAtOnce] = {};
        for (int n = 0; n < count; n++, next += inner)
          for (int64_t i = 0; i < width; i++) sums[i] += float(next[i]);
        for (int64_t i = 0; i < width; i++) to[o * inner + start + i] = as<T>(sums[i]);
      }
  };
}

template <class To, class From>
Task convert(const mx::array& x, mx::array& out) {
  return [to = out.data<To>(), from = static_cast<const From*>(row_major(x, out)), count = out.size()](int) {
    for (size_t i = 0; i < count; i++) to[i] = as<To>(float(from[i]));
  };
}

// Calls `of` with a value of a floating dtype's type.
template <class Of>
auto with_type(mx::Dtype dtype, const Of& of) {
  if (dtype == mx::float16) return of(mx::float16_t{});
  if (dtype == mx::bfloat16) return of(mx::bfloat16_t{});
  return of(float{});
}

// An index that counts from the end if it is negative.
struct Index {
  const int32_t* numbers;
  bool is_signed;
  int64_t length;

  int64_t operator[](int64_t i) const {
    if (!is_signed) return static_cast<uint32_t>(numbers[i]);
    return numbers[i] < 0 ? numbers[i] + length : numbers[i];
  }
};

inline Index index_of(const mx::array& indices, const mx::array& out, int length) {
  return {static_cast<const int32_t*>(row_major(indices, out)), indices.dtype() == mx::int32, length};
}

inline bool is_index(mx::Dtype dtype) { return dtype == mx::int32 || dtype == mx::uint32; }

// Rows x[indices].
inline Task gather(const mx::array& x, const mx::array& indices, mx::array& out) {
  mx::Shape row = x.shape();
  row[0] = 1;
  int64_t bytes = static_cast<int64_t>(x.itemsize());
  for (int n : row) bytes *= n;
  const Index index = index_of(indices, out, x.shape(0));
  return [=, from = static_cast<const char*>(data(x)), to = static_cast<char*>(data(out)), strides = x.strides(),
          places = row_major_strides(row), size = x.itemsize(), count = static_cast<int64_t>(indices.size())](int) {
    const int64_t step = strides[0] * static_cast<int64_t>(size);
    for (int64_t i = 0; i < count; i++)
      copy_elements(to + i * bytes, from + index[i] * step, row, places, strides, size);
  };
}

// Of each row the elements that its own indices name.
inline Task gather_own(const mx::array& x, const mx::array& indices, mx::array& out) {
  const Index index = index_of(indices, out, x.shape(-1));
  return [=, from = static_cast<const char*>(row_major(x, out)), to = static_cast<char*>(data(out)),
          count = static_cast<int64_t>(indices.size()), per_row = indices.shape(-1), size = x.itemsize()](int) {
    for (int64_t i = 0; i < count; i++)
      std::memcpy(to + i * size, from + (i / per_row * index.length + index[i]) * size, size);
  };
}

// One after the other along an axis.
inline Task concatenate(const Arrays& in, mx::array& out, int axis) {
  struct Part {
    const char* from;
    char* to;
    mx::Shape shape;
    mx::Strides strides;
  };
  std::vector<Part> parts;
  char* to = static_cast<char*>(data(out));
  const auto size = static_cast<int64_t>(out.itemsize());
  for (const mx::array& part : in) {
    parts.push_back({static_cast<const char*>(data(part)), to, part.shape(), part.strides()});
    to += part.shape(axis) * out.strides(axis) * size;
  }
  return [=, parts = std::move(parts), places = out.strides()](int) {
    for (const Part& part : parts)
      copy_elements(part.to, part.from, part.shape, places, part.strides, static_cast<size_t>(size));
  };
}

using Likes = std::vector<Like>;

inline bool takes_rows(const mx::Primitive& primitive, const Likes& in) {
  const auto [axes, sizes] = static_cast<const mx::Gather&>(primitive).state();
  mx::Shape row = in[0].first;
  if (axes.size() != 1 || axes[0] != 0 || row.empty()) return false;
  row[0] = 1;
  return in.size() == 2 && is_index(in[1].second) && sizes == row;
}

inline bool takes_elements(const mx::Primitive& primitive, const Likes& in) {
  const mx::Shape &x = in[0].first, &indices = in[1].first;
  const int axis = static_cast<const mx::GatherAxis&>(primitive).state();
  for (int i = 0; i < axis; i++)
    if (x[i] != indices[i]) return false;
  return axis + 1 == static_cast<int>(x.size()) && is_index(in[1].second);
}

// Whether a primitive is one of these, with such inputs and such an output.
inline bool knows(const mx::Primitive& primitive, const Likes& in, const Like& out) {
  const std::string name = primitive.name();
  if (in.empty()) return false;
  if (name == "Gather") return takes_rows(primitive, in);
  if (name == "GatherAxis") return takes_elements(primitive, in);
  if (name == "Concatenate") return true;
  if (type_of(in[0].second) < 0 || type_of(out.second) < 0) return false;
  if (name == "AsType") return true;
  if (out.second != in[0].second) return false;
  if (name == "Sum") {
    const auto* reduce = dynamic_cast<const mx::Reduce*>(&primitive);
    return reduce != nullptr && reduce->state().second.size() == 1;
  }
  for (const char* known : {"Add", "Subtract", "Multiply", "Divide", "Maximum", "Minimum", "Square", "Negative"})
    if (name == known) return std::all_of(in.begin(), in.end(), [&](const Like& one) { return one == out; });
  return false;
}

// Of an operation that is known, its inputs being in memory; `out` has no gaps.
inline Task prepare(const mx::Primitive& primitive, const Arrays& in, mx::array& out) {
  const std::string name = primitive.name();
  if (name == "Gather") return gather(in[0], in[1], out);
  if (name == "GatherAxis") return gather_own(in[0], in[1], out);
  if (name == "Concatenate") return concatenate(in, out, static_cast<const mx::Concatenate&>(primitive).state());
  return with_type(in[0].dtype(), [&](auto from) -> Task {
    using T = decltype(from);
    if (name == "AsType")
      return with_type(out.dtype(), [&](auto to) -> Task { return convert<decltype(to), T>(in[0], out); });
    if (name == "Sum") return sum<T>(in[0], out, static_cast<const mx::Reduce&>(primitive).state().second[0]);
    return arithmetic<T>(name, in, out);
  });
}

}  // namespace simple

}  // namespace phalanx_cpu
