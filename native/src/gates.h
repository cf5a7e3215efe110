// Kernels of kern/gates.h for one instruction set.
#pragma once
#include "elements.h"
#include "kern/gates.h"

namespace kern::KERN_NS {

// 1 - erf(v) for v >= 0, to a few 1e-7 of itself (Numerical Recipes, "erfcc").
KERN_INLINE vf verfc(vf v) {
  vf t = 1.0f / (v * 0.5f + 1.0f);
  vf p = t * 0.17087277f - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  return t * vexp(p - v * v);
}

template <int Activation>
KERN_INLINE vf gated(vf g, vf u, const kern_gate_args* a) {
  if constexpr (Activation == KERN_SILU) return g / (vexp(-g) + 1.0f) * u;
  if constexpr (Activation == KERN_SIGMOID) return u / (vexp(-g) + 1.0f);
  if constexpr (Activation == KERN_GELU) {
    vf tail = verfc(vabs(g) * 0.707106781186547524f) * 0.5f;
    return g * (g > 0.0f ? 1.0f - tail : tail) * u;
  }
  if constexpr (Activation == KERN_GELU_TANH)  // (1 + tanh(y)) / 2 = 1 / (1 + e^-2y)
    return g / (vexp((g * g * 0.0713548162726f + 1.59576912161f) * -g) + 1.0f) * u;
  vf limit = splat(a->limit);
  g = vmin(limit, g);
  u = vmax(-limit, vmin(limit, u));
  return g / (vexp(g * -a->alpha) + 1.0f) * (u + 1.0f);
}

template <int Activation>
inline int gate_of(const kern_gate_args* a) {
  constexpr int64_t piece = kRowWork / 2;  // of a row: few rows are long ones
  int64_t pieces = (a->width + piece - 1) / piece;
  return with_type(a->type, [&](auto of) {
    using T = typename decltype(of)::type;
    each_row(a->rows * pieces, least(piece, a->width) * 2, [&](int64_t i) {
      int64_t row = i / pieces, from = i % pieces * piece, width = least(piece, a->width - from);
      const T* gate = static_cast<const T*>(a->gate) + row * a->gate_stride + from;
      const T* up = a->up == nullptr ? nullptr : static_cast<const T*>(a->up) + row * a->up_stride + from;
      T* out = static_cast<T*>(a->out) + row * a->out_stride + from;
      vf without = splat(Activation == KERN_SWIGLU_OAI ? 0.0f : 1.0f);
      vectors(width, [&](int64_t j, int n) {
        put(out + j, gated<Activation>(get(gate + j, n), up == nullptr ? without : get(up + j, n), a), n);
      });
    });
    return KERN_OK;
  });
}

inline int gate(const kern_gate_args* a) {
  switch (a->activation) {
    case KERN_SILU: return gate_of<KERN_SILU>(a);
    case KERN_GELU: return gate_of<KERN_GELU>(a);
    case KERN_GELU_TANH: return gate_of<KERN_GELU_TANH>(a);
    case KERN_SWIGLU_OAI: return gate_of<KERN_SWIGLU_OAI>(a);
    case KERN_SIGMOID: return gate_of<KERN_SIGMOID>(a);
    default: return KERN_UNSUPPORTED;
  }
}

}  // namespace kern::KERN_NS
