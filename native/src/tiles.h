// Register blocks that attention is made of: products of small fp32 matrices, and changes of their form.
#pragma once
#include <utility>

#include "simd.h"

namespace kern::KERN_NS {

typedef float quad __attribute__((vector_size(16)));

constexpr int kTile = 4;  // rows of a register block
#if defined(KERN_AVX512) || defined(KERN_NEON)
constexpr int kStrip = 4;  // its vectors per row: 16 sums of 32 registers
#else
constexpr int kStrip = 2;  // 8 of 16: as many as two units with a latency of 4 keep in flight
#endif

// Four vectors' sums.
KERN_INLINE quad sum4(vf a, vf b, vf c, vf d) {
#if KERN_W == 16
  auto fold = [](vf v) {
    typedef float half __attribute__((vector_size(32)));
    half h = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
  };
#elif KERN_W == 8
  auto fold = [](vf v) {
    return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
  };
#else
  auto fold = [](vf v) { return v; };
#endif
  quad qa = fold(a), qb = fold(b), qc = fold(c), qd = fold(d);
  quad ab = __builtin_shufflevector(qa, qb, 0, 4, 1, 5) + __builtin_shufflevector(qa, qb, 2, 6, 3, 7);
  quad cd = __builtin_shufflevector(qc, qd, 0, 4, 1, 5) + __builtin_shufflevector(qc, qd, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

struct Nothing {
  void operator()(int64_t) const {}
};

// out[r][0, N * W) = (add ? what is there : 0) + sum over i < depth of x[r][i] * y[i][0, N * W).
// Calls meanwhile(i) as it goes.
template <int R, int N, class T, class Meanwhile = Nothing>
KERN_INLINE void product_tile(const float* x, int64_t x_stride, const T* y, int64_t y_stride, int64_t depth, float* out,
                              int64_t out_stride, bool add, Meanwhile meanwhile = {}) {
  vf sums[R][N];
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) sums[r][n] = add ? load(out + r * out_stride + n * W) : vf{};
  for (int64_t i = 0; i < depth; i++) {
    vf b[N];
    for (int n = 0; n < N; n++) b[n] = load(y + i * y_stride + n * W);
    meanwhile(i);
    for (int r = 0; r < R; r++) {
      vf a = splat(x[r * x_stride + i]);
      for (int n = 0; n < N; n++) sums[r][n] += a * b[n];
    }
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) store(out + r * out_stride + n * W, sums[r][n]);
}

// out[r][c] = sum over i < width of x[r][i] * y[c][i]; width is a multiple of W.
template <int R, int C, class T>
KERN_INLINE void dot_tile(const float* x, int64_t x_stride, const T* y, int64_t y_stride, int64_t width, float* out,
                          int64_t out_stride) {
  vf sums[R][C] = {};
  for (int64_t i = 0; i < width; i += W) {
    vf b[C];
    for (int c = 0; c < C; c++) b[c] = load(y + c * y_stride + i);
    for (int r = 0; r < R; r++) {
      vf a = load(x + r * x_stride + i);
      for (int c = 0; c < C; c++) sums[r][c] += a * b[c];
    }
  }
  if constexpr (R == 4) {
    for (int c = 0; c < C; c++) {
      quad s = sum4(sums[0][c], sums[1][c], sums[2][c], sums[3][c]);
      for (int r = 0; r < R; r++) out[r * out_stride + c] = s[r];
    }
  } else if constexpr (C == 4) {
    for (int r = 0; r < R; r++) {
      quad s = sum4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
      memcpy(out + r * out_stride, &s, sizeof s);
    }
  } else {
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) out[r * out_stride + c] = sum(sums[r][c]);
  }
}

// Rows of any type as fp32, `padded` long (a multiple of W) and filled up with zeros.
template <class T>
KERN_INLINE void widen(const T* in, int64_t in_stride, int64_t rows, int64_t width, float* out, int64_t padded,
                       float scale = 1.0f) {
  for (int64_t r = 0; r < rows; r++) {
    const T* from = in + r * in_stride;
    float* to = out + r * padded;
    int64_t i = 0;
    for (; i + W <= width; i += W) store(to + i, load(from + i) * scale);
    if (i < width) store(to + i, load_some(from + i, static_cast<int>(width - i)) * scale);
  }
}

// Shuffles within each four lanes: those that processors do in one step.
template <int First, int Second, size_t... I>
KERN_INLINE vf pick(vf a, vf b, std::index_sequence<I...>) {
  // lanes First, First + 1 of a and b: alternating (Second == 1), or a's two before b's (Second == 2)
  return __builtin_shufflevector(
      a, b, static_cast<int>(I / 4 * 4 + First + (Second == 1 ? I % 4 / 2 + I % 2 * W : I % 2 + I % 4 / 2 * W))...);
}

// out[c][0, W) = in[0, W)[c] for c < 4.
KERN_INLINE void transpose_4(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  constexpr auto lanes = std::make_index_sequence<W>();
  vf row[4];
  for (int i = 0; i < 4; i++) {
    quad part[W / 4];
    for (int g = 0; g < W / 4; g++) memcpy(&part[g], in + (4 * g + i) * in_stride, sizeof(quad));
#if KERN_W == 16
    auto low = __builtin_shufflevector(part[0], part[1], 0, 1, 2, 3, 4, 5, 6, 7);
    auto high = __builtin_shufflevector(part[2], part[3], 0, 1, 2, 3, 4, 5, 6, 7);
    row[i] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif KERN_W == 8
    row[i] = __builtin_shufflevector(part[0], part[1], 0, 1, 2, 3, 4, 5, 6, 7);
#else
    row[i] = part[0];
#endif
  }
  vf t0 = pick<0, 1>(row[0], row[1], lanes), t1 = pick<2, 1>(row[0], row[1], lanes);
  vf t2 = pick<0, 1>(row[2], row[3], lanes), t3 = pick<2, 1>(row[2], row[3], lanes);
  store(out, pick<0, 2>(t0, t2, lanes));
  store(out + out_stride, pick<2, 2>(t0, t2, lanes));
  store(out + 2 * out_stride, pick<0, 2>(t1, t3, lanes));
  store(out + 3 * out_stride, pick<2, 2>(t1, t3, lanes));
}

}  // namespace kern::KERN_NS
