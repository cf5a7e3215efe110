// Operations of kern/norms.h.
#pragma once
#include <optional>

#include "kern/norms.h"
#include "layout.h"

namespace phalanx_cpu {

using MaybeArray = std::optional<mx::array>;

// As mx.fast.rms_norm.
inline mx::array rms_norm(const mx::array& x, const MaybeArray& weight, float eps, mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  mx::Dtype dtype = weight ? mx::result_type(x, *weight) : x.dtype();
  kern_rms_norm_args args{};
  args.width = args.out_stride = x.shape(-1);
  args.rows = row_count(x);
  args.eps = eps;
  args.type = float_type(dtype, "rms_norm");
  args.weight_type = weight ? float_type(weight->dtype(), "rms_norm") : KERN_F32;
  Arrays inputs{mx::astype(x, dtype, stream)};
  if (weight) inputs.push_back(packed(*weight, stream));
  auto fill = [](kern_rms_norm_args& a, const Arrays& in, Arrays& out) {
    Rows x = rows_of(in[0], out[0]);
    a.x = x.data;
    a.x_stride = x.stride;
    a.weight = in.size() > 1 ? data(in[1]) : nullptr;
    take_over(in[0], out[0]);
    a.out = data(out[0]);
  };
  return make<kern_rms_norm_args>(x.shape(), dtype, stream, "KernRMSNorm", args, fill, kern_rms_norm,
                                  std::move(inputs));
}

// As mx.fast.layer_norm.
inline mx::array layer_norm(const mx::array& x, const MaybeArray& weight, const MaybeArray& bias, float eps,
                            mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  mx::Dtype dtype = x.dtype();
  for (const MaybeArray* p : {&weight, &bias})
    if (*p) dtype = mx::promote_types(dtype, (*p)->dtype());
  kern_layer_norm_args args{};
  args.width = args.out_stride = x.shape(-1);
  args.rows = row_count(x);
  args.eps = eps;
  args.type = args.weight_type = float_type(dtype, "layer_norm");
  Arrays inputs{mx::astype(x, dtype, stream)};
  for (const MaybeArray* p : {&weight, &bias})
    inputs.push_back(*p ? packed(mx::astype(**p, dtype, stream), stream) : mx::array(0.0f));
  auto fill = [](kern_layer_norm_args& a, const Arrays& in, Arrays& out) {
    Rows x = rows_of(in[0], out[0]);
    a.x = x.data;
    a.x_stride = x.stride;
    a.weight = in[1].ndim() > 0 ? data(in[1]) : nullptr;
    a.bias = in[2].ndim() > 0 ? data(in[2]) : nullptr;
    take_over(in[0], out[0]);
    a.out = data(out[0]);
  };
  return make<kern_layer_norm_args>(x.shape(), dtype, stream, "KernLayerNorm", args, fill, kern_layer_norm,
                                    std::move(inputs));
}

}  // namespace phalanx_cpu
