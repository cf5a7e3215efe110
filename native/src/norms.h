// Kernels of kern/norms.h for one instruction set.
#pragma once
#include "elements.h"
#include "kern/norms.h"

namespace kern::KERN_NS {

template <class T, class P>
KERN_INLINE void rms_norm_row(const T* x, const P* weight, T* out, int64_t width, float eps) {
  vf s0 = {}, s1 = {};
  int64_t i = 0;
  for (; i + 2 * W <= width; i += 2 * W) {
    vf a = load(x + i), b = load(x + i + W);
    s0 += a * a;
    s1 += b * b;
  }
  for (; i + W <= width; i += W) {
    vf a = load(x + i);
    s0 += a * a;
  }
  int rest = static_cast<int>(width - i);
  vf last = load_some(x + i, rest);
  s1 += last * last;
  float scale = 1.0f / sqrtf(sum(s0 + s1) / static_cast<float>(width) + eps);
  for (i = 0; i + W <= width; i += W) {
    vf v = load(x + i) * scale;
    store(out + i, weight != nullptr ? v * load(weight + i) : v);
  }
  vf v = last * scale;
  store_some(out + i, weight != nullptr ? v * load_some(weight + i, rest) : v, rest);
}

inline int rms_norm(const kern_rms_norm_args* a) {
  return with_type(a->type, [&](auto of) {
    using T = typename decltype(of)::type;
    return with_type(a->weight_type, [&](auto of_weight) {
      using P = typename decltype(of_weight)::type;
      each_row(a->rows, a->width, [&](int64_t r) {
        rms_norm_row(static_cast<const T*>(a->x) + r * a->x_stride, static_cast<const P*>(a->weight),
                     static_cast<T*>(a->out) + r * a->out_stride, a->width, a->eps);
      });
      return KERN_OK;
    });
  });
}

template <class T, class P>
KERN_INLINE void layer_norm_row(const T* x, const P* weight, const P* bias, T* out, int64_t width, float eps) {
  vf total = {};
  vectors(width, [&](int64_t i, int n) { total += get(x + i, n); });
  float mean = sum(total) / static_cast<float>(width);
  vf squares = {};
  vectors(width, [&](int64_t i, int n) {
    vf d = get(x + i, n, mean) - mean;
    squares += d * d;
  });
  float scale = 1.0f / sqrtf(sum(squares) / static_cast<float>(width) + eps);
  vectors(width, [&](int64_t i, int n) {
    vf v = (get(x + i, n) - mean) * scale;
    if (weight != nullptr) v = v * get(weight + i, n);
    if (bias != nullptr) v = v + get(bias + i, n);
    put(out + i, v, n);
  });
}

inline int layer_norm(const kern_layer_norm_args* a) {
  return with_type(a->type, [&](auto of) {
    using T = typename decltype(of)::type;
    return with_type(a->weight_type, [&](auto of_weight) {
      using P = typename decltype(of_weight)::type;
      each_row(a->rows, a->width, [&](int64_t r) {
        layer_norm_row(static_cast<const T*>(a->x) + r * a->x_stride, static_cast<const P*>(a->weight),
                       static_cast<const P*>(a->bias), static_cast<T*>(a->out) + r * a->out_stride, a->width, a->eps);
      });
      return KERN_OK;
    });
  });
}

}  // namespace kern::KERN_NS
