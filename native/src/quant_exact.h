// x @ w.T in float32.
//
// Few rows of x (decode; with AVX-512 only those that `quant_stream.h` does not take): each row of w streams through
// registers once, its codes meet activations that were permuted into the order of the decoded blocks. A group's bias
// meets the sum of the group's activations.
// Many rows (prefill): a panel of w is decoded to floats, in the same order, and tiles of dot products run over it.
// Either way a result depends on one row of x and one of w only, and on how K is cut, not on threads or other rows.
#pragma once
#include "quant_slots.h"

namespace kern::KERN_NS {

// -- activations -----------------------------------------------------------------------------------------------------

KERN_INLINE float power_of_two(int exponent) { return bit_cast<float>(static_cast<uint32_t>(127 + exponent) << 23); }

// x in the order of decoded blocks, filled up with zeros to whole blocks; scaled for in_place() where asked.
template <class F>
KERN_INLINE void permute(const float* x, int64_t blocks, bool scaled, float* out) {
  if constexpr (in_lanes<F>) {
    float factors[F::per_lane];
    for (int j = 0; j < F::per_lane; j++) factors[j] = scaled ? power_of_two(-F::exponent(j)) : 1.0f;
    to_lanes(x, blocks, F::per_lane, factors, out);
  } else {
    memcpy(out, x, static_cast<size_t>(blocks * F::block) * sizeof(float));
  }
}

// The sum of each group, and zeros up to `room`.
inline void group_sums(const float* x, int64_t count, int group, int64_t room, float* sums) {
  for (int64_t g = 0; g < count; g++) {
    vf total{};
    for (int k = 0; k < group; k += W) total = total + load(x + g * group + k);
    sums[g] = sum(total);
  }
  memset(sums + count, 0, static_cast<size_t>(room - count) * sizeof(float));
}

// -- few rows --------------------------------------------------------------------------------------------------------

// Part of one row of w with M rows of x, `ld` apart: total[m] += the products, lane by lane. Behind the codes by
// `ahead` lie those to be fetched meanwhile.
template <class F, int M>
__attribute__((noinline)) void dot_row(const uint8_t* codes, int64_t bytes, int64_t blocks, int64_t ahead, int group,
                                       const float* scales, const float* x, int64_t ld, vf* totals) {
  const Spread<F> spread(group);
  vf total[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) total[m] = totals[m];
  each_block<F>(codes, bytes, blocks, [&](const uint8_t* p, int64_t b) __attribute__((always_inline)) {
    const auto w = F::load(p);
    __builtin_prefetch(p + ahead);
    const float* at[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) at[m] = base(x + m * ld + b * F::block);
    vf part[M][2] = {};  // two chains: each step waits for the one before
#pragma GCC unroll 32
    for (int j = 0; j < F::per_lane; j++) {
      const vf code = F::in_place(w, j);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) part[m][j & 1] = code * load(at[m] + j * W) + part[m][j & 1];
    }
    const vf scale = spread(scales, b);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) total[m] = (part[m][0] + part[m][1]) * scale + total[m];
  });
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) totals[m] = total[m];
}

// The lanes together, and each group's bias times the sum of its activations.
inline float finish(vf total, const float* biases, const float* sums, int64_t groups) {
  if (biases != nullptr)
    for (int64_t g = 0; g < groups; g += W) total = load(biases + g) * load(sums + g) + total;
  return sum(total);
}

// -- many rows -------------------------------------------------------------------------------------------------------

#if KERN_W == 16
constexpr int kTileM = 6, kTileN = 4;  // 24 of 32 registers accumulate
#else
constexpr int kTileM = 4, kTileN = 3;  // 12 of 16 registers accumulate
#endif
constexpr int kPanelN = 48;  // rows of w in a panel: with kDepth floats each it stays in the second-level cache

// c[m][n] += dot(x[m], w[n]) over `depth` floats.
template <int M, int N>
__attribute__((noinline)) void dot_tile(const float* x, int64_t ld_x, const float* w, int64_t ld_w, int64_t depth,
                                        float* c, int64_t ld_c) {
  vf total[M][N] = {};
  for (int64_t k = 0; k < depth; k += W) {
    vf rows[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) rows[n] = load(w + n * ld_w + k);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const vf row = load(x + m * ld_x + k);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) total[m][n] = row * rows[n] + total[m][n];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) c[m * ld_c + n] += sum(total[m][n]);
}

template <int M>
KERN_INLINE void dot_tiles(const float* x, int64_t ld_x, const float* w, int64_t ld_w, int64_t depth, int64_t columns,
                           float* c, int64_t ld_c) {
  int64_t n = 0;
  for (int64_t k = 0; n + kTileN <= columns; n += kTileN, k += 32) {
    for (int m = M; k < depth && m < 2 * M; m++) {  // the rows that come next, two lines of each at a time
      __builtin_prefetch(x + m * ld_x + k);
      __builtin_prefetch(x + m * ld_x + k + 16);
    }
    dot_tile<M, kTileN>(x, ld_x, w + n * ld_w, ld_w, depth, c + n, ld_c);
  }
  for (; n < columns; n++) dot_tile<M, 1>(x, ld_x, w + n * ld_w, ld_w, depth, c + n, ld_c);
}

constexpr int64_t kChunk = 128 << 10;  // bytes of codes: they keep the streams long and the threads busy

// Panels in a chunk.
KERN_INLINE int64_t panel_step(const kern_quant& w, int64_t columns, int64_t x_rows) {
  return most(1, kChunk / (columns * row_bytes(w) * most(1, x_rows / 8)));
}

// -- the product -----------------------------------------------------------------------------------------------------

template <class F>
struct Exact {
  static constexpr int64_t kFew = 12;  // up to so many rows stream w
  static constexpr int64_t kPiece = 1024;  // elements: 4 rows of x take half of the first-level cache
  static constexpr int64_t kDepth = 512;

  const kern_quant_matmul_args& args;
  const int64_t less, max_rows;  // segments of up to `less` rows and of more than `max_rows` are left to others
  const kern_quant& w = args.w;
  int64_t blocks = (w.width + F::block - 1) / F::block;
  int64_t width = blocks * F::block;
  int64_t ld = width + 16;  // of a prepared row: never a power of two, whose multiples share cache sets
  int64_t group_count = groups(w);
  int64_t room = scale_room(group_count);
  float* x = nullptr;     // [slots of the block, ld]
  float* sums = nullptr;  // [slots of the block, room]

  void prepare(const Slots& slots, int64_t first, int64_t count) {
    x = static_cast<float*>(scratch(SLOT_SHARED, static_cast<size_t>(count * (ld + room)) * sizeof(float)));
    sums = x + count * ld;
    chunks(count, most(1, 16384 / width), [&](int64_t begin, int64_t end) {
      float* row = static_cast<float*>(scratch(SLOT_CHUNK, static_cast<size_t>(width) * sizeof(float)));
      memset(row + w.width, 0, static_cast<size_t>(width - w.width) * sizeof(float));
      for (int64_t i = begin; i < end; i++) {
        const int64_t together = slots.segments[slots.of[first + i]].count;
        if (together <= less || together > max_rows) continue;
        const bool few = together <= kFew;
        read_row(args.x, args.x_type, slots.in[first + i] * w.width, w.width, row);
        permute<F>(row, blocks, few, x + i * ld);
        if (few && w.mode == KERN_AFFINE) group_sums(row, group_count, w.group, room, sums + i * room);
      }
    });
  }

  // Whether so many rows of x pass by each row of w whole: where processors have AVX-512, the first-level cache holds
  // some 10,000 floats. What AVX2 does was measured where it holds 8,000.
  bool streams(int64_t rows) const { return KERN_W == 16 ? rows * width <= 10240 : rows == 2; }

  // The first group of a row of w, counted over all matrices.
  int64_t first_group(const Segment& s, int64_t row) const { return (s.matrix * w.rows + row) * group_count; }

  // c[m][n], kPanelN apart, for rows [n, n + columns) of the segment's matrix and M rows of x, the block's from `slot`.
  template <int M>
  void stream(const Segment& s, int64_t slot, int64_t n, int64_t columns, float* c) const {
    float* scales = static_cast<float*>(scratch(SLOT_CHUNK, static_cast<size_t>(2 * room) * sizeof(float)));
    float* biases = w.mode == KERN_AFFINE ? scales + room : nullptr;
    for (int64_t i = 0; i < columns; i++) {
      read_scales(w, first_group(s, n + i), group_count, F::unit, scales, biases);
      vf totals[M] = {};
      dot_row<F, M>(row_codes(w, s.matrix, n + i), row_bytes(w), blocks, 4096, w.group, scales, x + slot * ld, ld,
                    totals);
      for (int m = 0; m < M; m++)
        c[m * kPanelN + i] = finish(totals[m], biases, sums + (slot + m) * room, group_count);
    }
  }

  // The same for up to kFew rows of x, in pieces that stay in the first-level cache.
  void few(const Segment& s, int64_t slot, int64_t n, int64_t columns, float* c) const {
    vf* totals = static_cast<vf*>(
        scratch(SLOT_CHUNK, static_cast<size_t>(kPanelN * kFew) * sizeof(vf) + static_cast<size_t>(2 * room) * 4));
    float* scales = reinterpret_cast<float*>(totals + kPanelN * kFew);
    float* biases = w.mode == KERN_AFFINE ? scales + room : nullptr;
    memset(totals, 0, static_cast<size_t>(kPanelN * kFew) * sizeof(vf));
    for (int64_t k = 0; k < w.width; k += kPiece) {
      const int64_t b = k / F::block, at = b * F::block_bytes, g = k / w.group;
      const int64_t piece_blocks = least(kPiece / F::block, blocks - b);
      const int64_t piece_groups = least(kPiece / w.group, group_count - g);
      for (int64_t m = 0, step; m < s.count; m += step) {
        step = KERN_W == 16 && s.count - m >= 8 ? 8 : 4;  // 24 of 32 registers add up
        for (int64_t i = 0; i < columns; i++) {
          read_scales(w, first_group(s, n + i) + g, piece_groups, F::unit, scales, nullptr);
          auto run = [&](auto kernel, int64_t row) {
            kernel(row_codes(w, s.matrix, n + i) + at, row_bytes(w) - at, piece_blocks, 4 * row_bytes(w), w.group,
                   scales, x + (slot + row) * ld + k, ld, totals + i * kFew + row);
          };
          const int64_t rows = least(step, s.count - m);
          if (rows == 8)
            run(dot_row<F, 8>, m);
          else if (rows == 4)
            run(dot_row<F, 4>, m);
          else if (rows >= 2)
            run(dot_row<F, 2>, m);
          if (rows % 2 == 1) run(dot_row<F, 1>, m + rows - 1);
        }
      }
    }
    for (int64_t i = 0; i < columns; i++) {
      if (biases != nullptr) read_scales(w, first_group(s, n + i), group_count, F::unit, nullptr, biases);
      for (int64_t m = 0; m < s.count; m++)
        c[m * kPanelN + i] = finish(totals[i * kFew + m], biases, sums + (slot + m) * room, group_count);
    }
  }

  void many(const Segment& s, int64_t slot, int64_t n, int64_t columns, float* c) const {
    const int64_t piece_room = scale_room(kDepth / w.group);
    float* panel = static_cast<float*>(
        scratch(SLOT_CHUNK, static_cast<size_t>(kPanelN * kDepth + 2 * piece_room) * sizeof(float)));
    float* scales = panel + kPanelN * kDepth;
    float* biases = w.mode == KERN_AFFINE ? scales + piece_room : nullptr;
    memset(c, 0, static_cast<size_t>(s.count * kPanelN) * sizeof(float));
    for (int64_t k = 0; k < w.width; k += kDepth) {
      const int64_t depth = least(kDepth, width - k), b = k / F::block;
      for (int64_t i = 0; i < columns; i++) {
        read_scales(w, first_group(s, n + i) + k / w.group, least(depth, w.width - k) / w.group, F::unit, scales,
                    biases);
        decode<F>(row_codes(w, s.matrix, n + i) + b * F::block_bytes, row_bytes(w) - b * F::block_bytes,
                  depth / F::block, w.group, scales, biases, panel + i * kDepth);
      }
      const float* rows = x + slot * ld + k;
      int64_t m = 0;
      for (; m + kTileM <= s.count; m += kTileM)
        dot_tiles<kTileM>(rows + m * ld, ld, panel, kDepth, depth, columns, c + m * kPanelN, kPanelN);
      for (; m + kTileM / 2 <= s.count; m += kTileM / 2)
        dot_tiles<kTileM / 2>(rows + m * ld, ld, panel, kDepth, depth, columns, c + m * kPanelN, kPanelN);
      for (; m < s.count; m++)
        dot_tiles<1>(rows + m * ld, ld, panel, kDepth, depth, columns, c + m * kPanelN, kPanelN);
    }
  }

  void run(const Slots& slots) {
    const int64_t panels = (w.rows + kPanelN - 1) / kPanelN;
    each_slot_block(slots, [&](int64_t begin, int64_t end, int64_t first, int64_t count) {
      prepare(slots, first, count);
      chunks((end - begin) * panels, panel_step(w, kPanelN, count), [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
          const Segment& s = slots.segments[begin + i / panels];
          if (s.count <= less || s.count > max_rows) continue;
          const int64_t n = i % panels * kPanelN, columns = least(kPanelN, w.rows - n);
          float* c = static_cast<float*>(scratch(SLOT_CHUNK_2, static_cast<size_t>(s.count * kPanelN) * sizeof(float)));
          if (s.count == 1)
            stream<1>(s, s.first - first, n, columns, c);
          else if (s.count == 2 && streams(2))
            stream<2>(s, s.first - first, n, columns, c);
          else if (s.count == 3 && streams(3))
            stream<3>(s, s.first - first, n, columns, c);
          else if (s.count == 4 && streams(4))
            stream<4>(s, s.first - first, n, columns, c);
          else if (s.count <= kFew)
            few(s, s.first - first, n, columns, c);
          else
            many(s, s.first - first, n, columns, c);
          for (int64_t m = 0; m < s.count; m++)
            write_row(c + m * kPanelN, columns, args.out, args.out_type, slots.out[s.first + m] * w.rows + n);
        }
      });
    });
  }
};

}  // namespace kern::KERN_NS
