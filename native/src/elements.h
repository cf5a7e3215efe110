// Going through a row a vector at a time.
#pragma once
#include "simd.h"

namespace kern::KERN_NS {

constexpr int64_t kRowWork = 32768;  // elements: below, one thread is faster than waking others

// The first n <= W elements at p.
template <class T>
KERN_INLINE vf get(const T* p, int n, float fill = 0.0f) {
  return n == W ? load(p) : load_some(p, n, fill);
}
template <class T>
KERN_INLINE void put(T* p, vf v, int n) {
  if (n == W)
    store(p, v);
  else
    store_some(p, v, n);
}

// Calls body(i, n) for all of [0, width): n is W, less at the end. (Inlined twice, so that W is a constant in one.)
template <class Body>
KERN_INLINE void vectors(int64_t width, const Body& body) {
  int64_t i = 0;
  for (; i + W <= width; i += W) body(i, W);
  if (i < width) body(i, static_cast<int>(width - i));
}

// Calls body(row) for all of [0, rows), on several threads where there is work for them.
template <class Body>
KERN_INLINE void each_row(int64_t rows, int64_t width, const Body& body) {
  chunks(rows, most(1, kRowWork / most(1, width)), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) body(r);
  });
}

}  // namespace kern::KERN_NS
