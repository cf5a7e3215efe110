// Integer products of up to 16 rows of x at once in the tile registers of processors that have AMX.
#pragma once
#include "amx.h"
#include "quant_format.h"

#if defined(KERN_AVX512)

namespace kern::KERN_NS {

constexpr int kAmxRows = 16;  // of a tile: rows of x, or quads of w

// As quad_tile(), in the same order of sums, for as many rows as the tiles have.
template <int M>
__attribute__((noinline)) void amx_tile(const int8_t* x, int64_t ld_x, const float* steps, const float* sums,
                                        int64_t ld_steps, int64_t ld_sums, const uint8_t* panel, const float* scales,
                                        const float* biases, int64_t groups, int quads, float* c, int64_t ld_c) {
  alignas(64) int32_t products[2][M][W];
  for (int n = 0; n < 2; n++) {
    auto multiply = [&](int64_t g) {
      _tile_zero(0);
      for (int64_t q = g * quads; q < (g + 1) * quads; q += kAmxRows) {
        _tile_loadd(1, x + q * 4, ld_x);
        _tile_loadd(2, panel + (q * 2 + n) * W * 4, 8 * W);
        _tile_dpbsud(0, 1, 2);
      }
      _tile_stored(0, products[g % 2], sizeof products[0][0]);
    };
    vf total[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) total[m] = load(c + m * ld_c + n * W);
    multiply(0);
    for (int64_t g = 0; g < groups; g++) {
      if (g + 1 < groups) multiply(g + 1);  // while this group's sums meet their scales
      const vf scale = load(scales + (g * 2 + n) * W), bias = load(biases + (g * 2 + n) * W);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        vi whole;
        memcpy(&whole, products[g % 2][m], sizeof whole);
        const vf product = to_floats(whole) * (scale * steps[m * ld_steps + g]);
        total[m] = product + (bias * sums[m * ld_sums + g] + total[m]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) store(c + m * ld_c + n * W, total[m]);
  }
}

}  // namespace kern::KERN_NS

#endif
