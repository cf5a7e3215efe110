// Operations of kern/vocabulary.h.
#pragma once
#include <tuple>

#include "kern/vocabulary.h"
#include "layout.h"

namespace phalanx_cpu {

namespace detail {

inline kern_long_row_args long_rows(const mx::array& x, const char* name) {
  if (x.ndim() == 0 || x.size() == 0) throw std::invalid_argument(std::string(name) + ": there is nothing in x");
  kern_long_row_args args{};
  args.rows = row_count(x);
  args.width = x.shape(-1);
  args.type = float_type(x.dtype(), name);
  return args;
}

inline void fill_long_rows(kern_long_row_args& a, const Arrays& in, Arrays& out) {
  Rows x = rows_of(in[0], out[0]);
  a.x = x.data;
  a.x_stride = x.stride;
  a.out = data(out[0]);
}

inline mx::array over_rows(const mx::array& x, bool keepdims, mx::Dtype dtype, const char* name,
                           int (*run)(const kern_long_row_args*), mx::StreamOrDevice s) {
  mx::Shape shape = x.shape();
  kern_long_row_args args = long_rows(x, name);
  if (keepdims)
    shape.back() = 1;
  else
    shape.pop_back();
  return make<kern_long_row_args>(shape, dtype, mx::to_stream(s), name, args, fill_long_rows, run, {x});
}

}  // namespace detail

// As mx.softmax(x, axis=-1, precise=True).
inline mx::array softmax(const mx::array& x, mx::StreamOrDevice s) {
  kern_long_row_args args = detail::long_rows(x, "KernSoftmax");
  return make<kern_long_row_args>(x.shape(), x.dtype(), mx::to_stream(s), "KernSoftmax", args, detail::fill_long_rows,
                                  kern_softmax, {x});
}

// As mx.logsumexp with axis=-1.
inline mx::array logsumexp(const mx::array& x, bool keepdims, mx::StreamOrDevice s) {
  return detail::over_rows(x, keepdims, x.dtype(), "KernLogSumExp", kern_logsumexp, s);
}

// int64: the sum over the last axis of floor(exp(x) * 2**40); x <= 0.
inline mx::array exp_mass(const mx::array& x, bool keepdims, mx::StreamOrDevice s) {
  if (x.dtype() != mx::float32) throw std::invalid_argument("exp_mass: x must be float32");
  return detail::over_rows(x, keepdims, mx::int64, "KernExpMass", kern_exp_mass, s);
}

// z [rows, width] float32, keys uint64 and floors float32 [rows] or [rows, 1] -> tokens uint32 [rows].
inline mx::array gumbel_argmax(const mx::array& z, const mx::array& keys, const mx::array& floors,
                               mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  if (z.ndim() != 2 || z.size() == 0 || z.dtype() != mx::float32)
    throw std::invalid_argument("gumbel_argmax: z must be float32 [rows, width]");
  if (keys.dtype() != mx::uint64 || keys.size() != static_cast<size_t>(z.shape(0)) || floors.size() != keys.size())
    throw std::invalid_argument("gumbel_argmax: one key (uint64) and one floor per row");
  kern_gumbel_argmax_args args{};
  args.rows = z.shape(0);
  args.width = z.shape(1);
  Arrays inputs{z, packed(keys, stream), packed(mx::astype(floors, mx::float32, stream), stream)};
  auto fill = [](kern_gumbel_argmax_args& a, const Arrays& in, Arrays& out) {
    Rows z = rows_of(in[0], out[0]);
    a.z = static_cast<const float*>(z.data);
    a.z_stride = z.stride;
    a.keys = in[1].data<uint64_t>();
    a.floors = in[2].data<float>();
    a.tokens = out[0].data<uint32_t>();
  };
  return make<kern_gumbel_argmax_args>({z.shape(0)}, mx::uint32, stream, "KernGumbelArgMax", args, fill,
                                       kern_gumbel_argmax,
                                       std::move(inputs));
}

// x [rows, width] float32 -> values float32 and indices uint32 [rows, k], the largest first and the first of equals.
inline std::pair<mx::array, mx::array> top_k(const mx::array& x, int k, mx::StreamOrDevice s) {
  if (x.ndim() != 2 || x.dtype() != mx::float32) throw std::invalid_argument("top_k: x must be float32 [rows, width]");
  if (k < 1 || k > x.shape(1)) throw std::invalid_argument("top_k: k must be from 1 to the width");
  kern_top_k_args args{};
  args.rows = x.shape(0);
  args.width = x.shape(1);
  args.count = k;
  auto fill = [](kern_top_k_args& a, const Arrays& in, Arrays& out) {
    Rows x = rows_of(in[0], out[0]);
    a.x = static_cast<const float*>(x.data);
    a.x_stride = x.stride;
    a.values = out[0].data<float>();
    a.indices = out[1].data<uint32_t>();
  };
  mx::Shape shape{x.shape(0), k};
  Arrays made = make_many<kern_top_k_args>({shape, shape}, {mx::float32, mx::uint32}, mx::to_stream(s), "KernTopK",
                                           args, fill, kern_top_k, {x});
  return {made[0], made[1]};
}

// x [rows, width] float32 -> float32 sums and largest values, and uint32 where those are, all [rows].
inline std::tuple<mx::array, mx::array, mx::array> peaks(const mx::array& x, mx::StreamOrDevice s) {
  if (x.ndim() != 2 || x.shape(1) == 0 || x.dtype() != mx::float32)
    throw std::invalid_argument("peaks: x must be float32 [rows, width]");
  kern_peaks_args args{};
  args.rows = x.shape(0);
  args.width = x.shape(1);
  auto fill = [](kern_peaks_args& a, const Arrays& in, Arrays& out) {
    Rows x = rows_of(in[0], out[0]);
    a.x = static_cast<const float*>(x.data);
    a.x_stride = x.stride;
    a.sums = out[0].data<float>();
    a.values = out[1].data<float>();
    a.indices = out[2].data<uint32_t>();
  };
  mx::Shape shape{x.shape(0)};
  Arrays made = make_many<kern_peaks_args>({shape, shape, shape}, {mx::float32, mx::float32, mx::uint32},
                                           mx::to_stream(s), "KernPeaks", args, fill, kern_peaks, {x});
  return {made[0], made[1], made[2]};
}

// As mx.argpartition(x, kth, axis=-1).
inline mx::array arg_partition(const mx::array& x, int kth, mx::StreamOrDevice s) {
  kern_arg_partition_args args{};
  args.type = float_type(x.dtype(), "arg_partition");
  if (x.ndim() == 0 || x.size() == 0) throw std::invalid_argument("arg_partition: there is nothing in x");
  args.rows = row_count(x);
  args.width = x.shape(-1);
  args.kth = kth < 0 ? kth + args.width : kth;
  if (args.kth < 0 || args.kth >= args.width)
    throw std::invalid_argument("arg_partition: kth is not within the last axis");
  auto fill = [](kern_arg_partition_args& a, const Arrays& in, Arrays& out) {
    Rows x = rows_of(in[0], out[0]);
    a.x = x.data;
    a.x_stride = x.stride;
    a.out = out[0].data<uint32_t>();
  };
  return make<kern_arg_partition_args>(x.shape(), mx::uint32, mx::to_stream(s), "KernArgPartition", args, fill,
                                       kern_arg_partition, {x});
}

}  // namespace phalanx_cpu
