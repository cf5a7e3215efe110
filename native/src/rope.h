// Kernels of kern/rope.h for one instruction set.
#pragma once
#include <utility>

#include "elements.h"
#include "kern/rope.h"

namespace kern::KERN_NS {

// Sine and cosine to about 1e-7; Cephes' polynomials (Moshier). For |v| < 6e6.
KERN_INLINE void vsincos(vf v, vf* sine, vf* cosine) {
  vf n = v * 0.636619772367581343f + 12582912.0f;  // rounds to an integer in the low bits
  vi quarter = (vi)n - 0x4b400000;
  n = n - 12582912.0f;
  vf r = v - n * 1.5703125f;  // pi / 2 in three parts, short ones first: their products are exact
  r = r - n * 4.837512969970703125e-4f;
  r = r - n * 7.54978995489188216e-8f;
  vf z = r * r;
  vf s = (z * -1.9515295891e-4f + 8.3321608736e-3f) * z - 1.6666654611e-1f;
  s = s * z * r + r;
  vf c = (z * 2.443315711809948e-5f - 1.388731625493765e-3f) * z + 4.166664568298827e-2f;
  c = c * (z * z) - z * 0.5f + 1.0f;
  vi odd = (quarter & 1) != 0;
  vf first = odd ? c : s, second = odd ? s : c;
  *sine = (vf)((vi)first ^ ((quarter & 2) << 30));
  *cosine = (vf)((vi)second ^ (((quarter + 1) & 2) << 30));
}

// Neighbours change places.
template <size_t... I>
KERN_INLINE vf swap_pairs(vf v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, static_cast<int>(I ^ 1)...);
}

// The factors of a position: [dims / 2] each for halves, [dims] each, with the signs, for neighbours.
struct Turn {
  float *cosine, *sine;
};

inline void fill_turn(const kern_rope_args* a, int64_t row, int64_t position, Turn turn) {
  int64_t half = a->dims / 2;
  float place = static_cast<float>(a->offsets[row * a->offset_stride] + position) * a->scale;
  vectors(half, [&](int64_t i, int n) {
    vf f = get(a->freqs + i, n, 1.0f), s, c;
    vsincos(place * (a->wavelengths ? 1.0f / f : f), &s, &c);
    put(turn.sine + i, s, n);
    put(turn.cosine + i, c, n);
  });
  if (!a->traditional) return;
  for (int64_t i = half - 1; i >= 0; i--) {
    turn.cosine[2 * i] = turn.cosine[2 * i + 1] = turn.cosine[i];
    float s = turn.sine[i];
    turn.sine[2 * i] = -s;
    turn.sine[2 * i + 1] = s;
  }
}

template <class T>
KERN_INLINE void rotate_halves(const T* x, T* out, int64_t half, Turn turn) {
  vectors(half, [&](int64_t i, int n) {
    vf a = get(x + i, n), b = get(x + half + i, n), c = get(turn.cosine + i, n), s = get(turn.sine + i, n);
    put(out + i, a * c - b * s, n);
    put(out + half + i, a * s + b * c, n);
  });
}

template <class T>
KERN_INLINE void rotate_neighbours(const T* x, T* out, int64_t dims, Turn turn) {
  vectors(dims, [&](int64_t i, int n) {
    vf a = get(x + i, n), c = get(turn.cosine + i, n), s = get(turn.sine + i, n);
    put(out + i, a * c + swap_pairs(a, std::make_index_sequence<W>()) * s, n);
  });
}

inline int rope(const kern_rope_args* a) {
  if (a->dims % 2 != 0 || a->dims > a->dim) return KERN_UNSUPPORTED;
  return with_type(a->type, [&](auto of) {
    using T = typename decltype(of)::type;
    each_row(a->rows * a->positions, a->heads * a->dim, [&](int64_t i) {
      int64_t row = i / a->positions, position = i % a->positions;
      float* memory = static_cast<float*>(scratch(SLOT_CHUNK, static_cast<size_t>(2 * a->dims) * sizeof(float)));
      Turn turn{memory, memory + a->dims};
      fill_turn(a, row, position, turn);
      for (int64_t h = 0; h < a->heads; h++) {
        const T* x = static_cast<const T*>(a->x) + row * a->x_strides[0] + h * a->x_strides[1] +
                     position * a->x_strides[2];
        T* out = static_cast<T*>(a->out) + row * a->out_strides[0] + h * a->out_strides[1] +
                 position * a->out_strides[2];
        if (a->traditional)
          rotate_neighbours(x, out, a->dims, turn);
        else
          rotate_halves(x, out, a->dims / 2, turn);
        memcpy(out + a->dims, x + a->dims, static_cast<size_t>(a->dim - a->dims) * sizeof(T));
      }
    });
    return KERN_OK;
  });
}

}  // namespace kern::KERN_NS
