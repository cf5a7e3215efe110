// Operations of kern/quant.h, with the signatures and types of MLX's own.
#pragma once
#include <cstring>
#include <optional>
#include <string>

#include "kern/quant.h"
#include "layout.h"

namespace phalanx_cpu {

using OptionalArray = std::optional<mx::array>;

// What `mode` means and what MLX assumes where group size and bits are not given.
inline kern_quant format_of(const std::string& mode, std::optional<int> group, std::optional<int> bits) {
  struct Mode {
    const char* name;
    int mode, group, bits;
  };
  static constexpr Mode modes[] = {{"affine", KERN_AFFINE, 64, 4},
                                   {"mxfp4", KERN_MXFP4, 32, 4},
                                   {"mxfp8", KERN_MXFP8, 32, 8},
                                   {"nvfp4", KERN_NVFP4, 16, 4}};
  for (const Mode& m : modes)
    if (mode == m.name) {
      kern_quant w{};
      w.mode = m.mode;
      w.group = group.value_or(m.group);
      w.bits = bits.value_or(m.bits);
      const bool affine = w.mode == KERN_AFFINE && (w.group == 32 || w.group == 64 || w.group == 128) && w.bits >= 2 &&
                          w.bits <= 8 && w.bits != 7;
      if (!affine && (w.group != m.group || w.bits != m.bits))
        throw std::invalid_argument(mode + " has no group size " + std::to_string(w.group) + " with " +
                                    std::to_string(w.bits) + " bits");
      return w;
    }
  throw std::invalid_argument("there is no quantisation mode " + mode);
}

inline int precision_of(const std::string& precision) {
  if (precision == "exact") return KERN_EXACT;
  if (precision == "fast") return KERN_FAST;
  throw std::invalid_argument("precision is exact or fast, not " + precision);
}

// Whether products with matrices of so many rows are faster when these are repacked (repack_rows).
inline bool repacks(int rows, int width, const std::string& mode, std::optional<int> group, std::optional<int> bits) {
  kern_quant w = format_of(mode, group, bits);
  w.rows = rows;
  w.width = width;
  return kern_repacks(&w) != 0;
}

// Repacks an evaluated array [..., rows, columns] in place: of each sixteen rows, the elements of a column lie together.
// Returns the same array. Codes (uint32) get the type int32: products recognise repacked codes by it, and MLX's own
// operations refuse it.
inline mx::array repack_rows(mx::array a) {
  const bool fits = a.ndim() >= 2 && a.shape(-2) % 16 == 0 && a.itemsize() <= 4;
  if (!fits || !a.is_available() || !a.flags().row_contiguous)
    throw std::invalid_argument("repack_rows: an evaluated array of whole sixteens of rows is needed");
  kern_repack_args args{};
  args.data = data(a);
  args.columns = a.shape(-1);
  args.panels = args.columns == 0 ? 0 : static_cast<int64_t>(a.size()) / args.columns / 16;
  args.element_bytes = static_cast<int>(a.itemsize());
  kern_repack(&args);
  if (a.dtype() != mx::uint32) return a;
  mx::array repacked = mx::view(a, mx::int32);
  repacked.eval();
  return repacked;
}

constexpr int64_t factored_bytes(int64_t groups) {  // of a row
  return groups % 8 == 0 ? groups / 8 * static_cast<int64_t>(sizeof(kern_factored)) / 16 : -1;
}

// Writes repacked float32 scales or biases [..., rows, columns] as factors (kern_factored) into `out`, uint8
// [..., rows, columns * 10 / 8]. Returns whether all have factors; otherwise what is in `out` means nothing.
inline bool factor_rows(const mx::array& a, mx::array out) {
  mx::Shape expected = a.shape();
  if (a.ndim() < 2 || a.shape(-1) % 8 != 0 || a.shape(-2) % 16 != 0 || a.dtype() != mx::float32) return false;
  expected.back() = static_cast<int>(factored_bytes(a.shape(-1)));
  const bool fit = out.shape() == expected && out.dtype() == mx::uint8 && out.is_available() && a.is_available();
  if (!fit || !a.flags().row_contiguous || !out.flags().row_contiguous)
    throw std::invalid_argument("factor_rows: evaluated arrays are needed, and bytes for the factors");
  kern_factor_args args{static_cast<const float*>(data(a)), static_cast<kern_factored*>(data(out)), 0, a.shape(-1), 0};
  args.panels = args.columns == 0 ? 0 : static_cast<int64_t>(a.size()) / args.columns / 16;
  return kern_factor(&args) == KERN_OK && args.exact != 0;
}

// A quantised matrix [..., rows, width] and the arrays it is made of, in the order that `bind` expects.
struct Quantized {
  kern_quant w;
  Arrays arrays;
  mx::Shape batch;

  Quantized(kern_quant format, const mx::array& codes, const mx::array& scales, const OptionalArray& biases,
            mx::Stream stream)
      : w(format) {
    const bool affine = w.mode == KERN_AFFINE;
    w.repacked = codes.dtype() == mx::int32;
    if (codes.ndim() < 2 || (codes.dtype() != mx::uint32 && !w.repacked))
      throw std::invalid_argument("quantised weights are uint32, or int32 repacked, and have at least two axes");
    w.rows = codes.shape(-2);
    w.width = static_cast<int64_t>(codes.shape(-1)) * 32 / w.bits;
    w.matrices = 1;
    for (int i = 0; i + 2 < static_cast<int>(codes.ndim()); i++) {
      batch.push_back(codes.shape(i));
      w.matrices *= codes.shape(i);
    }
    const bool factored = affine && w.repacked && scales.dtype() == mx::uint8;
    mx::Shape expected = codes.shape();
    expected.back() = static_cast<int>(factored ? factored_bytes(w.width / w.group) : w.width / w.group);
    if (w.width % w.group != 0 || scales.shape() != expected || affine != biases.has_value() ||
        (biases && (biases->shape() != expected || biases->dtype() != scales.dtype())))
      throw std::invalid_argument("scales or biases do not fit the quantised weights");
    w.scale_type = factored ? KERN_FACTORED : affine ? type_of(scales.dtype()) : -1;
    if (affine ? w.scale_type < 0 : scales.dtype() != mx::uint8)
      throw std::invalid_argument("scales have the wrong type for their mode");
    if (w.repacked && !kern_repacks(&w)) throw std::invalid_argument("such weights cannot be repacked on this processor");
    arrays = {packed(codes, stream), packed(scales, stream)};
    if (biases) arrays.push_back(packed(*biases, stream));
  }

  // Of what a product with float32 and more exact numbers is.
  mx::Dtype scale_dtype() const { return w.scale_type == KERN_FACTORED ? mx::float32 : arrays[1].dtype(); }
  static size_t count(const kern_quant& w) { return w.mode == KERN_AFFINE ? 3 : 2; }
  static void bind(kern_quant& w, const mx::array* in) {
    w.codes = data(in[0]);
    w.scales = data(in[1]);
    w.biases = w.mode == KERN_AFFINE ? data(in[2]) : nullptr;
  }
};

inline mx::Shape shape_before(const mx::array& a, int axes) {
  return mx::Shape(a.shape().begin(), a.shape().end() - axes);
}

// For each element of `full`, the number of the element of `shape` that broadcasts to it.
inline mx::array broadcast_numbers(const mx::Shape& shape, const mx::Shape& full, mx::Stream stream) {
  int64_t size = 1;
  for (int n : shape) size *= n;
  mx::array numbers = mx::reshape(mx::arange(0, static_cast<double>(size), mx::uint32, stream), shape, stream);
  return packed(mx::broadcast_to(numbers, full, stream), stream);
}

// How often each element of `shape` comes in a row when it is broadcast to `full`; 0 where they do not just repeat.
inline int64_t repeats(const mx::Shape& shape, const mx::Shape& full) {
  if (shape.size() > full.size()) return 0;
  int64_t repeat = 1;
  size_t axis = full.size(), own = shape.size();
  for (; axis > 0 && (own == 0 || shape[own - 1] == 1); axis--, own -= own > 0) repeat *= full[axis - 1];
  for (; axis > 0; axis--, own--)
    if (own == 0 || shape[own - 1] != full[axis - 1]) return 0;
  return repeat;
}

// The pairs of matrices of x and w to multiply: indices of both, in arrays of one shape. Without `lhs` each matrix of x
// is paired with `repeat` consecutive entries; without both, matrices are paired in order.
struct Pairing {
  OptionalArray lhs, rhs;
  int64_t repeat = 1;
};

// out = x[lhs] @ w[rhs].T (or without .T).
inline mx::array quantized_pairs(const mx::array& x, const Quantized& q, const Pairing& pairing, bool transpose,
                                 int precision, mx::Shape shape, int64_t rows, mx::Stream stream) {
  kern_quant_matmul_args args{};
  args.w = q.w;
  args.rows = rows;
  const int64_t inner = transpose ? q.w.width : q.w.rows;
  args.blocks = rows * inner == 0 ? 0 : static_cast<int64_t>(x.size()) / (rows * inner);
  args.pairs = pairing.rhs ? static_cast<int64_t>(pairing.rhs->size()) : args.blocks;
  args.repeat = pairing.repeat;
  args.transpose = transpose;
  args.precision = precision;
  args.x_type = type_of(x.dtype());
  if (args.x_type < 0) throw std::invalid_argument("quantised products take floating activations");
  mx::Dtype dtype = q.w.mode == KERN_AFFINE ? mx::promote_types(x.dtype(), q.scale_dtype()) : x.dtype();
  args.out_type = type_of(dtype);
  Arrays inputs{x};
  inputs.insert(inputs.end(), q.arrays.begin(), q.arrays.end());
  if (pairing.rhs) inputs.push_back(*pairing.rhs);
  if (pairing.lhs) inputs.push_back(*pairing.lhs);
  auto fill = [](kern_quant_matmul_args& a, const Arrays& in, Arrays& out) {
    const size_t indices = 1 + Quantized::count(a.w);
    a.x = row_major(in[0], out[0]);
    Quantized::bind(a.w, &in[1]);
    auto numbers = [&](size_t i) {
      return i < in.size() ? static_cast<const uint32_t*>(row_major(in[i], out[0])) : nullptr;
    };
    a.rhs = numbers(indices);
    a.lhs = numbers(indices + 1);
    a.out = data(out[0]);
  };
  return make<kern_quant_matmul_args>(std::move(shape), dtype, stream, "KernQuantizedMatmul", args, fill,
                                      kern_quant_matmul, std::move(inputs));
}

inline void check_inner(const mx::array& x, const Quantized& q, bool transpose) {
  if (x.ndim() < 1 || x.shape(-1) != (transpose ? q.w.width : q.w.rows))
    throw std::invalid_argument("the last axis of x does not fit the quantised weights");
  if (q.w.repacked && !transpose) throw std::invalid_argument("weights that are repacked are for transposed products");
}

inline mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                                  const OptionalArray& biases, bool transpose, std::optional<int> group_size,
                                  std::optional<int> bits, const std::string& mode, const std::string& precision,
                                  mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  Quantized q(format_of(mode, group_size, bits), w, scales, biases, stream);
  check_inner(x, q, transpose);
  const int outer = static_cast<int>(transpose ? q.w.rows : q.w.width);
  const int exact_or_fast = precision_of(precision);
  if (q.batch.empty()) {
    mx::Shape shape = x.shape();
    shape.back() = outer;
    const int64_t rows = x.shape(-1) == 0 ? 0 : static_cast<int64_t>(x.size()) / x.shape(-1);
    return quantized_pairs(x, q, {}, transpose, exact_or_fast, std::move(shape), rows, stream);
  }
  if (x.ndim() < 2) throw std::invalid_argument("a batch of quantised weights needs x with at least two axes");
  mx::Shape x_batch = shape_before(x, 2), full = mx::broadcast_shapes(x_batch, q.batch);
  mx::Shape shape = full;
  shape.push_back(x.shape(-2));
  shape.push_back(outer);
  Pairing pairing;
  if (x_batch != full || q.batch != full)
    pairing = {broadcast_numbers(x_batch, full, stream), broadcast_numbers(q.batch, full, stream)};
  return quantized_pairs(x, q, pairing, transpose, exact_or_fast, std::move(shape), x.shape(-2), stream);
}

// Pairs are put in order of their matrices in any case: `sorted_indices` is accepted and makes no difference.
inline mx::array gather_qmm(const mx::array& x, const mx::array& w, const mx::array& scales,
                            const OptionalArray& biases, const OptionalArray& lhs_indices,
                            const OptionalArray& rhs_indices, bool transpose, std::optional<int> group_size,
                            std::optional<int> bits, const std::string& mode, bool, const std::string& precision,
                            mx::StreamOrDevice s) {
  if (!lhs_indices && !rhs_indices)
    return quantized_matmul(x, w, scales, biases, transpose, group_size, bits, mode, precision, s);
  mx::Stream stream = mx::to_stream(s);
  Quantized q(format_of(mode, group_size, bits), w, scales, biases, stream);
  check_inner(x, q, transpose);
  if (x.ndim() < 2) throw std::invalid_argument("gather_qmm: x needs at least two axes");
  const mx::Shape x_batch = shape_before(x, 2);
  const int64_t repeat = lhs_indices ? 0 : repeats(x_batch, rhs_indices->shape());
  mx::Shape shape;
  Pairing pairing;
  if (repeat > 0) {  // the experts of each token
    shape = rhs_indices->shape();
    pairing = {std::nullopt, mx::astype(*rhs_indices, mx::uint32, stream), repeat};
  } else {
    auto numbers = [&](const OptionalArray& indices, const mx::Shape& batch) {
      return indices ? mx::astype(*indices, mx::uint32, stream) : broadcast_numbers(batch, batch, stream);
    };
    Arrays both = mx::broadcast_arrays({numbers(lhs_indices, x_batch), numbers(rhs_indices, q.batch)}, stream);
    shape = both[0].shape();
    pairing = {both[0], both[1]};
  }
  shape.push_back(x.shape(-2));
  shape.push_back(static_cast<int>(transpose ? q.w.rows : q.w.width));
  return quantized_pairs(x, q, pairing, transpose, precision_of(precision), std::move(shape), x.shape(-2), stream);
}

// Rows of a quantised matrix, decoded: mx.dequantize(w[indices], scales[indices], biases[indices]) without the gathered
// copies. Without indices: all of w, of any number of axes.
inline mx::array dequantize_rows(const mx::array& w, const mx::array& scales, const OptionalArray& biases,
                                 const OptionalArray& indices, std::optional<int> group_size, std::optional<int> bits,
                                 const std::string& mode, std::optional<mx::Dtype> dtype, mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  Quantized q(format_of(mode, group_size, bits), w, scales, biases, stream);
  if (indices && !q.batch.empty()) throw std::invalid_argument("dequantize_rows: indices need one matrix");
  kern_dequantize_args args{};
  args.w = q.w;
  args.w.rows *= q.w.matrices;
  args.w.matrices = 1;
  args.count = indices ? static_cast<int64_t>(indices->size()) : args.w.rows;
  mx::Dtype type = dtype.value_or(q.w.mode == KERN_AFFINE ? q.scale_dtype() : mx::bfloat16);
  args.out_type = type_of(type);
  if (args.out_type < 0) throw std::invalid_argument("dequantize_rows: a floating type is needed");
  mx::Shape shape = indices ? indices->shape() : shape_before(w, 1);
  shape.push_back(static_cast<int>(q.w.width));
  Arrays inputs = q.arrays;
  if (indices)  // a negative one is too large
    inputs.push_back(indices->dtype() == mx::int32 ? *indices : mx::astype(*indices, mx::uint32, stream));
  auto fill = [](kern_dequantize_args& a, const Arrays& in, Arrays& out) {
    Quantized::bind(a.w, &in[0]);
    const size_t count = Quantized::count(a.w);
    a.indices = in.size() > count ? static_cast<const uint32_t*>(row_major(in[count], out[0])) : nullptr;
    a.out = data(out[0]);
  };
  return make<kern_dequantize_args>(std::move(shape), type, stream, "KernDequantize", args, fill, kern_dequantize,
                                    std::move(inputs));
}

}  // namespace phalanx_cpu
