// Operations of kern/gates.h.
#pragma once
#include <optional>

#include "kern/gates.h"
#include "layout.h"

namespace phalanx_cpu {

// activation(gate) * up, of equal shapes; see kern/gates.h for the activations.
inline mx::array gate(const char* name, int activation, const mx::array& gate, const std::optional<mx::array>& up,
                      float alpha, float limit, mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  if (up && up->shape() != gate.shape()) throw std::invalid_argument(std::string(name) + ": shapes differ");
  mx::Dtype dtype = up ? mx::promote_types(gate.dtype(), up->dtype()) : gate.dtype();
  kern_gate_args args{};
  args.width = args.out_stride = gate.shape(-1);
  args.rows = row_count(gate);
  args.alpha = alpha;
  args.limit = limit;
  args.type = float_type(dtype, name);
  args.activation = activation;
  Arrays inputs{mx::astype(gate, dtype, stream)};
  if (up) inputs.push_back(mx::astype(*up, dtype, stream));
  auto fill = [](kern_gate_args& a, const Arrays& in, Arrays& out) {
    Rows gate = rows_of(in[0], out[0]);
    a.gate = gate.data;
    a.gate_stride = gate.stride;
    if (in.size() > 1) {
      Rows up = rows_of(in[1], out[0]);
      a.up = up.data;
      a.up_stride = up.stride;
    }
    for (const mx::array& input : in)
      if (take_over(input, out[0])) break;
    a.out = data(out[0]);
  };
  return make<kern_gate_args>(gate.shape(), dtype, stream, name, args, fill, kern_gate, std::move(inputs));
}

inline mx::array silu(const mx::array& g, const std::optional<mx::array>& up, mx::StreamOrDevice s) {
  return gate("KernSiLU", KERN_SILU, g, up, 0.0f, 0.0f, s);
}
inline mx::array gelu(const mx::array& g, const std::optional<mx::array>& up, mx::StreamOrDevice s) {
  return gate("KernGELU", KERN_GELU, g, up, 0.0f, 0.0f, s);
}
inline mx::array gelu_approx(const mx::array& g, const std::optional<mx::array>& up, mx::StreamOrDevice s) {
  return gate("KernGELUApprox", KERN_GELU_TANH, g, up, 0.0f, 0.0f, s);
}
inline mx::array sigmoid(const mx::array& x, mx::StreamOrDevice s) {
  return gate("KernSigmoid", KERN_SIGMOID, x, std::nullopt, 0.0f, 0.0f, s);
}
inline mx::array swiglu_oai(const mx::array& g, const mx::array& up, float alpha, float limit, mx::StreamOrDevice s) {
  return gate("KernSwiGLUOAI", KERN_SWIGLU_OAI, g, up, alpha, limit, s);
}

}  // namespace phalanx_cpu
