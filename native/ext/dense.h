// Operations of kern/dense.h.
#pragma once
#include <optional>

#include "kern/dense.h"
#include "layout.h"
#include "op.h"

namespace phalanx_cpu {

// The weight w [n, k] if b [k, n] is an unevaluated view w.T, as in the products of layers. The kernel then reads w as
// it is stored, and the transpose is never evaluated. (MLX does not export the type of Transpose, hence the name.)
inline std::optional<mx::array> repacked_weight(const mx::array& b) {
  if (b.is_available() || !b.has_primitive() || b.inputs().size() != 1) return std::nullopt;
  const mx::array& w = b.inputs()[0];
  if (std::strcmp(b.primitive().name(), "Transpose") != 0 || w.ndim() != 2) return std::nullopt;
  const bool repacked = static_cast<const mx::Transpose&>(b.primitive()).state() == std::vector<int>{1, 0};
  if (!repacked || !w.is_available() || !w.flags().row_contiguous) return std::nullopt;
  return w;
}

// Row by row or column by column, but without gaps.
inline mx::array without_gaps(const mx::array& b, mx::Stream stream) {
  if (b.is_available() && (b.flags().row_contiguous || b.flags().col_contiguous)) return b;
  return mx::contiguous(b, true, stream);
}

// a [..., k] times b [k, n], plus bias [n]; the type MLX's own product would have.
inline mx::array matmul(const mx::array& a, const mx::array& b, const std::optional<mx::array>& bias,
                        mx::StreamOrDevice s) {
  if (b.ndim() != 2 || a.ndim() < 1 || a.shape(-1) != b.shape(0))
    throw std::invalid_argument("matmul: a is [..., k] and b is [k, n]");
  mx::Stream stream = mx::to_stream(s);
  mx::Dtype dtype = mx::result_type(a, b);
  if (type_of(dtype) < 0 || type_of(b.dtype()) < 0) throw std::invalid_argument("matmul: floating types only");
  kern_gemm_args args{};
  args.k = b.shape(0);
  args.n = b.shape(1);
  args.m = args.k == 0 ? 0 : static_cast<int64_t>(a.size()) / args.k;
  args.out_stride = args.n;
  args.alpha = 1.0f;
  args.type = type_of(dtype);
  args.b_type = type_of(b.dtype());
  const std::optional<mx::array> weight = repacked_weight(b);
  args.b_transposed = weight.has_value();
  args.b_stride = weight ? args.k : args.n;
  Arrays inputs{mx::astype(a, dtype, stream), weight ? *weight : without_gaps(b, stream)};
  if (bias) {
    inputs.push_back(packed(*bias, stream));
    args.bias_type = type_of(bias->dtype());
  }
  mx::Shape shape = a.shape();
  shape.back() = b.shape(1);
  auto fill = [](kern_gemm_args& g, const Arrays& in, Arrays& out) {
    const Rows a = rows_of(in[0], out[0]);
    g.a = a.data;
    g.a_stride = a.stride;
    g.b = data(in[1]);
    if (!in[1].flags().row_contiguous) {  // column by column
      g.b_transposed = 1;
      g.b_stride = g.k;
    }
    g.bias = in.size() > 2 ? data(in[2]) : nullptr;
    g.out = data(out[0]);
  };
  return make<kern_gemm_args>(std::move(shape), dtype, stream, "KernMatmul", args, fill, kern_gemm, std::move(inputs));
}

// out[i] = a[lhs[i]] @ b[rhs[i]] for index arrays of one shape; a [..., m, k], b [..., k, n], as mx.gather_mm.
inline mx::array gather_mm(const mx::array& a, const mx::array& b, const mx::array& lhs, const mx::array& rhs,
                           mx::StreamOrDevice s) {
  if (a.ndim() < 2 || b.ndim() < 2 || a.shape(-1) != b.shape(-2) || lhs.shape() != rhs.shape())
    throw std::invalid_argument("gather_mm: a is [..., m, k], b is [..., k, n], lhs and rhs have one shape");
  mx::Stream stream = mx::to_stream(s);
  mx::Dtype dtype = mx::result_type(a, b);
  if (type_of(dtype) < 0 || type_of(b.dtype()) < 0) throw std::invalid_argument("gather_mm: floating types only");
  kern_gather_gemm_args args{};
  args.one.m = a.shape(-2);
  args.one.k = a.shape(-1);
  args.one.n = b.shape(-1);
  args.one.a_stride = args.one.k;
  args.one.out_stride = args.one.n;
  args.one.alpha = 1.0f;
  args.one.type = type_of(dtype);
  args.one.b_type = type_of(b.dtype());
  args.pairs = static_cast<int64_t>(lhs.size());
  args.lhs_count = static_cast<int64_t>(a.size()) / (args.one.m * args.one.k);
  args.rhs_count = static_cast<int64_t>(b.size()) / (args.one.n * args.one.k);
  args.a_matrix = args.one.m * args.one.k;
  args.b_matrix = args.one.n * args.one.k;
  args.out_matrix = args.one.m * args.one.n;
  // Weights usually come as the transposed view of [experts, n, k]: repacked back, that is packed and is not copied.
  Arrays inputs{packed(mx::astype(a, dtype, stream), stream), packed(mx::swapaxes(b, -1, -2, stream), stream),
                packed(mx::astype(lhs, mx::uint32, stream), stream),
                packed(mx::astype(rhs, mx::uint32, stream), stream)};
  args.one.b_transposed = 1;
  args.one.b_stride = args.one.k;
  mx::Shape shape = lhs.shape();
  shape.push_back(a.shape(-2));
  shape.push_back(b.shape(-1));
  auto fill = [](kern_gather_gemm_args& g, const Arrays& in, Arrays& out) {
    g.one.a = data(in[0]);
    g.one.b = data(in[1]);
    g.lhs = in[2].data<uint32_t>();
    g.rhs = in[3].data<uint32_t>();
    g.one.out = data(out[0]);
  };
  return make<kern_gather_gemm_args>(std::move(shape), dtype, stream, "KernGatherMM", args, fill, kern_gather_gemm,
                                     std::move(inputs));
}

}  // namespace phalanx_cpu
