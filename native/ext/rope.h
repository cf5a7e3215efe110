// Operations of kern/rope.h.
#pragma once
#include <cmath>
#include <map>
#include <optional>
#include <variant>

#include "kern/rope.h"
#include "layout.h"

namespace phalanx_cpu {

// base ** (-2 i / dims) with MLX's rounding of the exponents. Kept: models ask for the same ones in every layer.
inline mx::array rope_frequencies(float base, int dims) {
  static auto& kept = *new std::map<std::pair<float, int>, mx::array>();  // outlives MLX's own statics
  auto found = kept.find({base, dims});
  if (found != kept.end()) return found->second;
  if (kept.size() >= 64) kept.clear();  // a base that grows with the length
  int half = dims / 2;
  float step = static_cast<float>(std::log(base) / half);
  std::vector<float> freqs;
  for (int i = 0; i < half; i++) freqs.push_back(static_cast<float>(std::exp(static_cast<double>(-i * step))));
  return kept.emplace(std::pair{base, dims}, mx::array(freqs.begin(), {half}, mx::float32)).first->second;
}

// As mx.fast.rope.
inline mx::array rope(const mx::array& x, int dims, bool traditional, std::optional<float> base, float scale,
                      const std::variant<int, mx::array>& offset, const std::optional<mx::array>& freqs,
                      mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  if (x.ndim() < 3) throw std::invalid_argument("rope: x must have at least 3 dimensions");
  if (dims <= 0 || dims % 2 != 0 || dims > x.shape(-1)) throw std::invalid_argument("rope: dims does not fit x");
  if (base.has_value() == freqs.has_value()) throw std::invalid_argument("rope: give either base or freqs");
  if (freqs && (freqs->ndim() != 1 || freqs->shape(0) != dims / 2))
    throw std::invalid_argument("rope: freqs must have dims / 2 elements");
  int last = static_cast<int>(x.ndim()) - 1;
  mx::array four = x.ndim() == 3  ? mx::expand_dims(x, 1, stream)
                   : x.ndim() > 4 ? mx::flatten(x, 1, last - 2, stream)
                                  : x;
  mx::array starts = std::holds_alternative<int>(offset) ? mx::array(std::get<int>(offset), mx::int32)
                                                         : mx::astype(std::get<mx::array>(offset), mx::int32, stream);
  if (starts.ndim() > 1 || (starts.size() != 1 && starts.size() != static_cast<size_t>(x.shape(0))))
    throw std::invalid_argument("rope: offset must be one number or one per row");
  kern_rope_args args{};
  args.rows = four.shape(0);
  args.heads = four.shape(1);
  args.positions = four.shape(2);
  args.dim = four.shape(3);
  args.dims = dims;
  args.offset_stride = starts.size() > 1 ? 1 : 0;
  args.scale = scale;
  args.type = float_type(x.dtype(), "rope");
  args.traditional = traditional;
  args.wavelengths = freqs.has_value();
  Arrays inputs{four, packed(starts, stream),
                freqs ? packed(mx::astype(*freqs, mx::float32, stream), stream) : rope_frequencies(*base, dims)};
  auto fill = [](kern_rope_args& a, const Arrays& in, Arrays& out) {
    mx::array x = dense(in[0], out[0]);
    a.x = data(x);
    copy_strides(a.x_strides, x);
    copy_strides(a.out_strides, out[0]);
    a.offsets = in[1].data<int32_t>();
    a.freqs = in[2].data<float>();
    a.out = data(out[0]);
  };
  mx::array repacked = make<kern_rope_args>(four.shape(), x.dtype(), stream, "KernRoPE", args, fill, kern_rope,
                                          std::move(inputs));
  return x.ndim() == 4 ? repacked : mx::reshape(repacked, x.shape(), stream);
}

}  // namespace phalanx_cpu
