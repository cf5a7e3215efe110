// x @ w without transposition: the rows of w, quantised along the outputs, are decoded a piece of columns at a time and
// added up, weighted by x. Used for the values of a quantised cache and where a projection is absorbed.
#pragma once
#include "quant_slots.h"

namespace kern::KERN_NS {

// c[m][0 .. N * W) += sum over k of x[m][k] * panel[k].
template <int M, int N>
__attribute__((noinline)) void add_tile(const float* x, int64_t ld_x, const float* panel, int64_t ld_panel,
                                        int64_t depth, float* c, int64_t ld_c) {
  vf total[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) total[m][n] = load(c + m * ld_c + n * W);
  for (int64_t k = 0; k < depth; k++) {
    vf row[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) row[n] = load(panel + k * ld_panel + n * W);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const vf weight = splat(x[m * ld_x + k]);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) total[m][n] = weight * row[n] + total[m][n];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(c + m * ld_c + n * W, total[m][n]);
}

template <class F>
struct Plain {
  static constexpr int64_t kColumns = 512;  // a multiple of every block and group
  static constexpr int64_t kDepth = 32;

  const kern_quant_matmul_args& args;
  const kern_quant& w = args.w;
  float* x = nullptr;  // [slots of the block, w.rows]

  void prepare(const Slots& slots, int64_t first, int64_t count) {
    x = static_cast<float*>(scratch(SLOT_SHARED, static_cast<size_t>(count * w.rows) * sizeof(float)));
    chunks(count, most(1, 16384 / w.rows), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        read_row(args.x, args.x_type, slots.in[first + i] * w.rows, w.rows, x + i * w.rows);
    });
  }

  void add_panel(const float* panel, int64_t ld_panel, const float* rows, int64_t count, int64_t depth,
                 float* c) const {
    for (int64_t n = 0; n < ld_panel; n += 2 * W) {  // blocks are multiples of 2 W
      int64_t m = 0;
      for (; m + 4 <= count; m += 4)
        add_tile<4, 2>(rows + m * w.rows, w.rows, panel + n, ld_panel, depth, c + m * ld_panel + n, ld_panel);
      for (; m < count; m++)
        add_tile<1, 2>(rows + m * w.rows, w.rows, panel + n, ld_panel, depth, c + m * ld_panel + n, ld_panel);
    }
  }

  // Columns [n, n + columns) of the segment's product.
  void columns_of(const Slots& slots, const Segment& s, int64_t slot, int64_t n, int64_t columns) const {
    const int64_t blocks = (columns + F::block - 1) / F::block, padded = blocks * F::block;
    const int64_t room = scale_room(kColumns / w.group + 1), code = n * w.bits / 8;
    float* c = static_cast<float*>(
        scratch(SLOT_CHUNK, static_cast<size_t>((s.count + kDepth + 1) * padded + 2 * room) * sizeof(float)));
    float *panel = c + s.count * padded, *natural = panel + kDepth * padded, *scales = natural + padded;
    float* biases = w.mode == KERN_AFFINE ? scales + room : nullptr;
    memset(c, 0, static_cast<size_t>(s.count * padded) * sizeof(float));
    for (int64_t k = 0; k < w.rows; k += kDepth) {
      const int64_t depth = least(kDepth, w.rows - k);
      for (int64_t i = 0; i < depth; i++) {
        const int64_t first = (s.matrix * w.rows + k + i) * groups(w) + n / w.group;
        read_scales(w, first, columns / w.group, F::unit, scales, biases);
        decode<F>(row_codes(w, s.matrix, k + i) + code, row_bytes(w) - code, blocks, w.group, scales, biases,
                  panel + i * padded);
      }
      add_panel(panel, padded, x + slot * w.rows + k, s.count, depth, c);
    }
    for (int64_t m = 0; m < s.count; m++) {
      restore<F>(c + m * padded, blocks, natural);
      write_row(natural, columns, args.out, args.out_type, slots.out[s.first + m] * w.width + n);
    }
  }

  void run(const Slots& slots) {
    const int64_t pieces = (w.width + kColumns - 1) / kColumns;
    each_slot_block(slots, [&](int64_t begin, int64_t end, int64_t first, int64_t count) {
      prepare(slots, first, count);
      chunks((end - begin) * pieces, 1, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
          const Segment& s = slots.segments[begin + i / pieces];
          const int64_t n = i % pieces * kColumns;
          columns_of(slots, s, s.first - first, n, least(kColumns, w.width - n));
        }
      });
    });
  }
};

}  // namespace kern::KERN_NS
