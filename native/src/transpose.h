// Vectors that change places with their lanes.
#pragma once
#include "simd.h"

namespace kern::KERN_NS {

// Which lanes of two vectors have a number without STEP, and which one with it.
template <int STEP>
struct Halves {
  int32_t low[W], high[W];
  constexpr Halves() : low{}, high{} {
    for (int lane = 0; lane < W; lane++) {
      low[lane] = (lane & STEP) == 0 ? lane : lane - STEP + W;
      high[lane] = (lane & STEP) == 0 ? lane + STEP : lane + W;
    }
  }
};

// Of W vectors: lanes that lie STEP apart change places with vectors that do.
template <int STEP>
KERN_INLINE void swap_lanes(vi* v) {
  static constexpr Halves<STEP> halves;
  vi low, high;
  memcpy(&low, halves.low, sizeof low);
  memcpy(&high, halves.high, sizeof high);
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    if ((i & STEP) != 0) continue;
    const vi first = v[i], second = v[i + STEP];
    v[i] = __builtin_shuffle(first, second, low);
    v[i + STEP] = __builtin_shuffle(first, second, high);
  }
}

// Turns W vectors: lane n of v[i] is then lane i of what v[n] was.
template <int STEP = W / 2>
KERN_INLINE void transpose(vi* v) {
  swap_lanes<STEP>(v);
  if constexpr (STEP > 1) transpose<STEP / 2>(v);
}

}  // namespace kern::KERN_NS
