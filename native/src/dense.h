// Kernels of kern/dense.h for one instruction set.
//
// Few rows and a transposed b (a layer that decodes): b streams from memory once, each of its rows meets all rows of a.
// Otherwise blocks: a slab of op(a) is packed for all threads, each takes blocks of columns of op(b), packs them, and
// runs a register-blocked micro-kernel over both. Sums are float32 in an order that does not depend on threads.
#pragma once
#include "kern/dense.h"
#include "simd.h"

namespace kern::KERN_NS {

constexpr int kTileRows = KERN_W == 16 ? 12 : 6;  // accumulators: two vectors of columns for each, in 32 or 16 registers
constexpr int kTileColumns = 2 * W;
constexpr int64_t kDepth = 256;        // of a packed block of op(b): it and a tile of op(a) stay in the inner caches
constexpr int64_t kSlab = 4 << 20;     // elements of op(a) packed at once
constexpr int64_t kFewRows = 8;        // up to here weights are streamed instead of packed
constexpr int64_t kStream = 128 << 10; // bytes of b per chunk when streaming
constexpr int64_t kGemmWork = 1 << 16; // multiplications: below, one thread is faster than waking others

// -- few rows --------------------------------------------------------------------------------------------------------

// out[i] = a[i] . b for ROWS rows of a, all of length k.
template <int ROWS, class B>
KERN_INLINE void dots(const float* a, int64_t a_stride, const B* b, int64_t k, float* out) {
  vf s[ROWS][2] = {};
  int64_t i = 0;
  for (; i + 2 * W <= k; i += 2 * W) {
    vf b0 = load(b + i), b1 = load(b + i + W);
    __builtin_prefetch(b + i + 4096 / sizeof(B));
    for (int r = 0; r < ROWS; r++) {
      s[r][0] += load(a + r * a_stride + i) * b0;
      s[r][1] += load(a + r * a_stride + i + W) * b1;
    }
  }
  for (; i < k; i += W) {  // rows of a are padded with zeros, b is not
    int n = static_cast<int>(least(W, k - i));
    vf v = n == W ? load(b + i) : load_some(b + i, n);
    for (int r = 0; r < ROWS; r++) s[r][0] += (n == W ? load(a + r * a_stride + i) : load_some(a + r * a_stride + i, n)) * v;
  }
  for (int r = 0; r < ROWS; r++) out[r] = sum(s[r][0] + s[r][1]);
}

template <class B>
KERN_INLINE void dots_of(int64_t rows, const float* a, int64_t a_stride, const B* b, int64_t k, float* out) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) dots<4>(a + r * a_stride, a_stride, b, k, out + r);
  for (; r + 2 <= rows; r += 2) dots<2>(a + r * a_stride, a_stride, b, k, out + r);
  for (; r < rows; r++) dots<1>(a + r * a_stride, a_stride, b, k, out + r);
}

// out[n] += a * b[n], columns of a matrix that is not transposed; for ROWS rows of a.
template <class B>
KERN_INLINE void accumulate_columns(const float* a, int64_t a_stride, int64_t rows, const B* b, int64_t b_stride,
                                    int64_t k, int64_t columns, float* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t j = 0;
    for (; j + 4 * W <= columns; j += 4 * W) {
      vf s[4] = {};
      for (int64_t i = 0; i < k; i++) {
        float x = a[r * a_stride + i];
        for (int u = 0; u < 4; u++) s[u] += x * load(b + i * b_stride + j + u * W);
      }
      for (int u = 0; u < 4; u++) store(out + r * out_stride + j + u * W, s[u]);
    }
    for (; j < columns; j += W) {
      int n = static_cast<int>(least(W, columns - j));
      vf s = {};
      for (int64_t i = 0; i < k; i++) {
        const B* p = b + i * b_stride + j;
        s += a[r * a_stride + i] * (n == W ? load(p) : load_some(p, n));
      }
      store_some(out + r * out_stride + j, s, n);
    }
  }
}

// -- blocks ----------------------------------------------------------------------------------------------------------

// acc[kTileRows][stride] += a tile x b tile, both packed with the depth outermost.
KERN_INLINE void micro_tile(const float* a, const float* b, int64_t depth, float* acc, int64_t stride) {
  vf s[kTileRows][2];
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; r++) {
    s[r][0] = load(acc + r * stride);
    s[r][1] = load(acc + r * stride + W);
  }
  for (int64_t i = 0; i < depth; i++) {
    vf b0 = load(b + i * kTileColumns), b1 = load(b + i * kTileColumns + W);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; r++) {
      vf x = splat(a[i * kTileRows + r]);
      s[r][0] += x * b0;
      s[r][1] += x * b1;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; r++) {
    store(acc + r * stride, s[r][0]);
    store(acc + r * stride + W, s[r][1]);
  }
}

// `lanes` rows (or columns) of a matrix, from its depth [0, depth), laid out [depth][lanes] and padded with zeros.
// Element (lane, i) is at src[lane * lane_stride + i * depth_stride].
template <class T>
KERN_INLINE void pack(const T* src, int64_t lane_stride, int64_t depth_stride, int64_t lanes, int64_t width, int64_t depth,
                      float* out) {
  if (lane_stride == 1 && lanes == width && width % W == 0) {
    for (int64_t i = 0; i < depth; i++)
      for (int64_t j = 0; j < width; j += W) store(out + i * width + j, load(src + i * depth_stride + j));
    return;
  }
  for (int64_t j = 0; j < width; j++) {
    if (j < lanes) {
      const T* p = src + j * lane_stride;
      for (int64_t i = 0; i < depth; i++) out[i * width + j] = to_float(p[i * depth_stride]);
    } else {
      for (int64_t i = 0; i < depth; i++) out[i * width + j] = 0.0f;
    }
  }
}

template <class Out>
KERN_INLINE void write_row(const float* acc, Out* out, const float* bias, int64_t n, float alpha, float beta) {
  for (int64_t j = 0; j < n; j += W) {
    int w = static_cast<int>(least(W, n - j));
    vf v = (w == W ? load(acc + j) : load_some(acc + j, w)) * alpha;
    if (beta != 0.0f) v += beta * (w == W ? load(out + j) : load_some(out + j, w));
    if (bias != nullptr) v += w == W ? load(bias + j) : load_some(bias + j, w);
    if (w == W) store(out + j, v);
    else store_some(out + j, v, w);
  }
}

template <class A, class B>
inline void gemm_few(const kern_gemm_args& g, const float* bias) {
  const A* a = static_cast<const A*>(g.a);
  const B* b = static_cast<const B*>(g.b);
  const int64_t stride = (g.k + W - 1) / W * W;
  float* rows = static_cast<float*>(scratch(SLOT_SHARED, sizeof(float) * static_cast<size_t>(g.m * stride)));
  for (int64_t r = 0; r < g.m; r++)
    for (int64_t i = 0; i < g.k; i++)
      rows[r * stride + i] = to_float(g.a_transposed ? a[i * g.a_stride + r] : a[r * g.a_stride + i]);
  A* out = static_cast<A*>(g.out);
  const bool alone = g.m * g.n * g.k < kGemmWork;
  if (g.b_transposed) {
    auto body = [&](int64_t first, int64_t last) {
      for (int64_t j = first; j < last; j++) {
        float dot[kFewRows];
        dots_of(g.m, rows, stride, b + j * g.b_stride, g.k, dot);
        for (int64_t r = 0; r < g.m; r++)
          write_row(dot + r, out + r * g.out_stride + j, bias == nullptr ? bias : bias + j, 1, g.alpha, g.beta);
      }
    };
    const int64_t step = most(1, kStream / most(1, g.k * static_cast<int64_t>(sizeof(B))));
    chunks(g.n, alone ? g.n : step, body);
    return;
  }
  const int64_t columns = 4 * W * (g.k < 512 ? 4 : 1);
  auto body = [&](int64_t first, int64_t last) {
    float acc[kFewRows * 16 * W];
    accumulate_columns(rows, stride, g.m, b + first, g.b_stride, g.k, last - first, acc, columns);
    for (int64_t r = 0; r < g.m; r++)
      write_row(acc + r * columns, out + r * g.out_stride + first, bias == nullptr ? bias : bias + first, last - first,
                g.alpha, g.beta);
  };
  if (alone)
    for (int64_t j = 0; j < g.n; j += columns) body(j, least(g.n, j + columns));
  else
    chunks(g.n, columns, body);
}

template <class A, class B>
inline void gemm_blocks(const kern_gemm_args& g, const float* bias) {
  const A* a = static_cast<const A*>(g.a);
  const B* b = static_cast<const B*>(g.b);
  A* out = static_cast<A*>(g.out);
  const int64_t a_lane = g.a_transposed ? 1 : g.a_stride, a_depth = g.a_transposed ? g.a_stride : 1;
  const int64_t b_lane = g.b_transposed ? g.b_stride : 1, b_depth = g.b_transposed ? 1 : g.b_stride;
  const int64_t tiles_at_once = most(1, least((g.m + kTileRows - 1) / kTileRows, kSlab / (kTileRows * most(1, g.k))));
  const int64_t rows_at_once = tiles_at_once * kTileRows;
  const int64_t column_tiles = (g.n + kTileColumns - 1) / kTileColumns;
  const bool alone = g.m * g.n * g.k < kGemmWork;
  float* packed_a = static_cast<float*>(
      scratch(SLOT_SHARED, sizeof(float) * static_cast<size_t>(rows_at_once * g.k)));
  for (int64_t m0 = 0; m0 < g.m; m0 += rows_at_once) {
    const int64_t rows = least(rows_at_once, g.m - m0), tiles = (rows + kTileRows - 1) / kTileRows;
    auto pack_a = [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++)
        pack(a + (m0 + t * kTileRows) * a_lane, a_lane, a_depth, least(kTileRows, rows - t * kTileRows), kTileRows, g.k,
             packed_a + t * kTileRows * g.k);
    };
    chunks(tiles, alone ? tiles : most(1, kGemmWork / most(1, kTileRows * g.k)), pack_a);
    // A piece of work: some tiles of rows by up to four tiles of columns; enough pieces for all threads.
    const int64_t wide = column_tiles >= 16 ? 4 : 1;
    const int64_t across = (column_tiles + wide - 1) / wide;
    const int64_t down = across >= 8 ? 1 : least(tiles, (8 + across - 1) / across);
    const int64_t tall = (tiles + down - 1) / down;
    auto multiply = [&](int64_t first, int64_t last) {
      for (int64_t piece = first; piece < last; piece++) {
        const int64_t j0 = piece / down * wide * kTileColumns, t0 = piece % down * tall;
        const int64_t columns = least(wide * kTileColumns, g.n - j0), t1 = least(tiles, t0 + tall);
        if (t0 >= t1) continue;
        const int64_t stride = wide * kTileColumns;
        float* acc = static_cast<float*>(
            scratch(SLOT_CHUNK, sizeof(float) * static_cast<size_t>((t1 - t0) * kTileRows * stride)));
        float* packed_b = static_cast<float*>(scratch(SLOT_CHUNK_2, sizeof(float) * static_cast<size_t>(kDepth * stride)));
        memset(acc, 0, sizeof(float) * static_cast<size_t>((t1 - t0) * kTileRows * stride));
        for (int64_t k0 = 0; k0 < g.k; k0 += kDepth) {
          const int64_t depth = least(kDepth, g.k - k0);
          for (int64_t j = 0; j < columns; j += kTileColumns)
            pack(b + (j0 + j) * b_lane + k0 * b_depth, b_lane, b_depth, least(kTileColumns, columns - j), kTileColumns,
                 depth, packed_b + j * kDepth);
          for (int64_t t = t0; t < t1; t++)
            for (int64_t j = 0; j < columns; j += kTileColumns)
              micro_tile(packed_a + t * kTileRows * g.k + k0 * kTileRows, packed_b + j * kDepth, depth,
                         acc + (t - t0) * kTileRows * stride + j, stride);
        }
        for (int64_t r = t0 * kTileRows; r < least(rows, t1 * kTileRows); r++)
          write_row(acc + (r - t0 * kTileRows) * stride, out + (m0 + r) * g.out_stride + j0,
                    bias == nullptr ? bias : bias + j0, columns, g.alpha, g.beta);
      }
    };
    const int64_t pieces = across * down;
    chunks(pieces, alone ? pieces : 1, multiply);
  }
}

// The bias as float32, or null.
inline const float* float_bias(const kern_gemm_args& g) {
  if (g.bias == nullptr || g.bias_type == KERN_F32) return static_cast<const float*>(g.bias);
  float* bias = static_cast<float*>(scratch(SLOT_SHARED_2, sizeof(float) * static_cast<size_t>(g.n)));
  with_type(g.bias_type, [&](auto of) {
    using T = typename decltype(of)::type;
    for (int64_t j = 0; j < g.n; j++) bias[j] = to_float(static_cast<const T*>(g.bias)[j]);
    return KERN_OK;
  });
  return bias;
}

inline int gemm(const kern_gemm_args* g) {
  if (g->m <= 0 || g->n <= 0) return KERN_OK;
  if (g->bias != nullptr && (g->bias_type < KERN_F32 || g->bias_type > KERN_BF16)) return KERN_UNSUPPORTED;
  return with_type(g->type, [&](auto of_a) {
    using A = typename decltype(of_a)::type;
    return with_type(g->b_type, [&](auto of_b) {
      using B = typename decltype(of_b)::type;
      const float* bias = float_bias(*g);
      if (g->m <= kFewRows) gemm_few<A, B>(*g, bias);
      else gemm_blocks<A, B>(*g, bias);
      return KERN_OK;
    });
  });
}

inline int gather_gemm(const kern_gather_gemm_args* g) {
  const kern_gemm_args& one = g->one;
  if (one.type < KERN_F32 || one.type > KERN_BF16 || one.a_transposed) return KERN_UNSUPPORTED;
  if (g->pairs <= 0 || one.m <= 0 || one.n <= 0) return KERN_OK;
  // Pairs in the order of their right-hand matrices, by counting.
  int64_t* first = static_cast<int64_t*>(
      scratch(SLOT_SHARED_3, sizeof(int64_t) * static_cast<size_t>(g->rhs_count + 1 + g->pairs)));
  int64_t* order = first + g->rhs_count + 1;
  memset(first, 0, sizeof(int64_t) * static_cast<size_t>(g->rhs_count + 1));
  for (int64_t p = 0; p < g->pairs; p++) {
    if (g->rhs[p] >= g->rhs_count || g->lhs[p] >= g->lhs_count) return KERN_UNSUPPORTED;
    first[g->rhs[p] + 1]++;
  }
  for (int64_t e = 0; e < g->rhs_count; e++) first[e + 1] += first[e];
  for (int64_t p = 0; p < g->pairs; p++) order[first[g->rhs[p]]++] = p;  // now first[e] is where e ends
  const int64_t size = one.type == KERN_F32 ? 4 : 2;
  for (int64_t e = 0, from = 0; e < g->rhs_count; from = first[e++]) {
    const int64_t count = first[e] - from;
    if (count == 0) continue;
    const size_t in_bytes = static_cast<size_t>(one.m * one.k * size), out_bytes = static_cast<size_t>(one.m * one.n * size);
    char* rows = static_cast<char*>(scratch(SLOT_SHARED_2, static_cast<size_t>(count) * (in_bytes + out_bytes)));
    char* results = rows + static_cast<size_t>(count) * in_bytes;
    for (int64_t i = 0; i < count * one.m; i++) {
      const int64_t pair = order[from + i / one.m];
      const int64_t at = g->lhs[pair] * g->a_matrix + i % one.m * one.a_stride;
      memcpy(rows + i * one.k * size, static_cast<const char*>(one.a) + at * size, static_cast<size_t>(one.k * size));
    }
    kern_gemm_args args = one;
    args.a = rows;
    args.b = static_cast<const char*>(one.b) + e * g->b_matrix * (one.b_type == KERN_F32 ? 4 : 2);
    args.bias = nullptr;
    args.out = results;
    args.m = count * one.m;
    args.a_stride = one.k;
    args.out_stride = one.n;
    args.beta = 0.0f;
    if (int status = gemm(&args); status != KERN_OK) return status;
    for (int64_t i = 0; i < count * one.m; i++) {
      const int64_t at = order[from + i / one.m] * g->out_matrix + i % one.m * one.out_stride;
      memcpy(static_cast<char*>(one.out) + at * size, results + i * one.n * size, static_cast<size_t>(one.n * size));
    }
  }
  return KERN_OK;
}

}  // namespace kern::KERN_NS
