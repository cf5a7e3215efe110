// Kernels of kern/checksum.h for one instruction set.
#pragma once
#include "elements.h"
#include "kern/checksum.h"

namespace kern::KERN_NS {

// What a wire has behind its elements: the checksum, the magnitude, the tag.
template <class T>
constexpr int64_t kChecksums = sizeof(T) == sizeof(float) ? 1 : 2;

template <class T>
KERN_INLINE void checksum_load_row(const kern_checksum_load_args* a, int64_t r) {
  const T* y = static_cast<const T*>(a->y) + r * a->y_stride;
  T* wire = static_cast<T*>(a->wire) + r * (a->width + kChecksums<T> + 2);
  vf products = {}, squares = {};
  vectors(a->width, [&](int64_t i, int n) {
    vf v = get(y + i, n);
    products += v * get(a->weights + i, n);
    squares += v * v;
  });
  memcpy(wire, y, static_cast<size_t>(a->width) * sizeof(T));
  float checksum = sum(products);
  T high = from_float<T>(checksum);
  wire[a->width] = high;
  if (kChecksums<T> == 2) wire[a->width + 1] = from_float<T>(checksum - to_float(high));
  wire[a->width + kChecksums<T>] = from_float<T>(sqrtf(sum(squares)) / static_cast<float>(a->width));
  wire[a->width + kChecksums<T> + 1] = from_float<T>(*a->tag);
}

inline int checksum_load(const kern_checksum_load_args* a) {
  return with_type(a->type, [&](auto of) {
    each_row(a->rows, a->width, [&](int64_t r) { checksum_load_row<typename decltype(of)::type>(a, r); });
    return KERN_OK;
  });
}

template <class T>
KERN_INLINE void checksum_read_row(const kern_checksum_read_args* a, int64_t r) {
  const T* wire = static_cast<const T*>(a->wire) + r * a->wire_stride;
  vf products = {};
  vectors(a->width, [&](int64_t i, int n) { products += get(wire + i, n) * get(a->weights + i, n); });
  float seen = sum(products), checksum = to_float(wire[a->width]);
  if (kChecksums<T> == 2) checksum += to_float(wire[a->width + 1]);
  float residual = seen - checksum, magnitude = to_float(wire[a->width + kChecksums<T>]);
  memcpy(static_cast<T*>(a->sums) + r * a->width, wire, static_cast<size_t>(a->width) * sizeof(T));
  a->figures[3 * r] = residual;
  a->figures[3 * r + 1] = magnitude;
  a->figures[3 * r + 2] = to_float(wire[a->width + kChecksums<T> + 1]) + 0.0f * residual + 0.0f * magnitude;
}

inline int checksum_read(const kern_checksum_read_args* a) {
  return with_type(a->type, [&](auto of) {
    each_row(a->rows, a->width, [&](int64_t r) { checksum_read_row<typename decltype(of)::type>(a, r); });
    return KERN_OK;
  });
}

inline int checksum_judge(const kern_checksum_judge_args* a) {
  for (int64_t s = 0; s < a->sites; s++) {
    bool right = true;
    for (int64_t i = s * a->rows; i < (s + 1) * a->rows; i++) {
      const float* row = a->figures + 3 * i;
      const float limit = a->limits[2 * s] * row[1] + a->limits[2 * s + 1];
      right = right && fabsf(row[0]) <= limit && row[2] == *a->tag;
    }
    a->flags[s] = right ? 0.0f : a->flag;
  }
  return KERN_OK;
}

}  // namespace kern::KERN_NS
