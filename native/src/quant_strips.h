// Products of decoded bands with tiles of x in vectors: what processors with pairs of bfloat16 do that have no tiles.
#pragma once
#include "quant_pairs.h"

#if defined(KERN_AVX512)

namespace kern::KERN_NS {

// Up to 16 rows of x from an element on.
struct TileX {
  const uint8_t* parts;  // pairs of bfloat16 [step][part][16][row]
  const float* sums;     // [group][16 rows]
  int64_t rows;
};

// Scales and biases of a band from a group on: [group][64]. What groups have come to: sums [64][16], of one; totals
// [64][16], of all so far.
struct Totals {
  const float *scales, *biases;
  float *sums, *totals;
};

// totals += (x @ w.T) * scale + bias * sum of x, of N tiles of x and `rows` rows of a decoded band, for `groups` groups
// of `steps` steps. The totals of a tile lie behind those of the one before.
template <int PARTS, bool BIASED, int N>
__attribute__((noinline)) void multiply_strips(const TileX* x, const uint8_t* decoded, int64_t rows, int64_t groups,
                                               int64_t steps, const Totals& t) {
  constexpr int kRows = 8;  // of w: with two tiles of x 16 of 32 registers add up
  static_assert(kBand % kRows == 0);
  for (int64_t r0 = 0; r0 < rows; r0 += kRows) {
    const uint8_t* parts[N];
    for (int n = 0; n < N; n++) parts[n] = x[n].parts;
    const uint8_t* w = decoded + r0 * 64;
    for (int64_t g = 0; g < groups; g++) {
      vf sums[kRows][N] = {};
      for (int64_t s = 0; s < steps; s++, w += kStepBytes) {
        for (int part = 0; part < PARTS; part++) {
#pragma GCC unroll 2
          for (int i = 0; i < W; i++) {
            __m512i pairs[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
              pairs[n] = _mm512_loadu_si512(parts[n]);
              parts[n] += x[n].rows * 4;
            }
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++) {
              int32_t pair;
              memcpy(&pair, w + r * 64 + i * 4, sizeof pair);
              const __m512i of_w = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
              for (int n = 0; n < N; n++) sums[r][n] = add_pairs(sums[r][n], of_w, pairs[n]);
            }
          }
        }
      }
      const float *scales = t.scales + g * kBand + r0, *biases = t.biases + g * kBand + r0;
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        const vf of_x = BIASED ? load(x[n].sums + g * W) : vf{};
        float* totals = t.totals + (n * kBand + r0) * W;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) {
          vf total = load(totals + r * W);
          if constexpr (BIASED) total = of_x * biases[r] + total;
          store(totals + r * W, sums[r][n] * scales[r] + total);
        }
      }
    }
  }
}

}  // namespace kern::KERN_NS

#endif
