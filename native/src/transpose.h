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
#if defined(KERN_AVX512)
// By permutations that need no indices: what lies beside each other in quarters of a vector, then the quarters.
KERN_INLINE void transpose(vi* v) {
  typedef int64_t vl __attribute__((vector_size(64)));
  constexpr vi low{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
  constexpr vi high{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
  constexpr vl even{0, 1, 4, 5, 8, 9, 12, 13}, odd{2, 3, 6, 7, 10, 11, 14, 15};
  constexpr vl first{0, 8, 2, 10, 4, 12, 6, 14}, second{1, 9, 3, 11, 5, 13, 7, 15};
  vl pairs[W], fours[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; i += 2) {
    pairs[i] = (vl)__builtin_shuffle(v[i], v[i + 1], low);
    pairs[i + 1] = (vl)__builtin_shuffle(v[i], v[i + 1], high);
  }
#pragma GCC unroll 8
  for (int i = 0; i < W; i += 2) {
    const int from = i / 4 * 4 + i % 4 / 2;
    fours[i] = __builtin_shuffle(pairs[from], pairs[from + 2], first);
    fours[i + 1] = __builtin_shuffle(pairs[from], pairs[from + 2], second);
  }
  // quarter k of fours[4 i + j]: lane 4 k + j of the vectors 4 i to 4 i + 3
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const vl even_low = __builtin_shuffle(fours[j], fours[4 + j], even);
    const vl even_high = __builtin_shuffle(fours[8 + j], fours[12 + j], even);
    const vl odd_low = __builtin_shuffle(fours[j], fours[4 + j], odd);
    const vl odd_high = __builtin_shuffle(fours[8 + j], fours[12 + j], odd);
    v[j] = (vi)__builtin_shuffle(even_low, even_high, even);
    v[4 + j] = (vi)__builtin_shuffle(odd_low, odd_high, even);
    v[8 + j] = (vi)__builtin_shuffle(even_low, even_high, odd);
    v[12 + j] = (vi)__builtin_shuffle(odd_low, odd_high, odd);
  }
}
#else
template <int STEP = W / 2>
KERN_INLINE void transpose(vi* v) {
  swap_lanes<STEP>(v);
  if constexpr (STEP > 1) transpose<STEP / 2>(v);
}
#endif

}  // namespace kern::KERN_NS
