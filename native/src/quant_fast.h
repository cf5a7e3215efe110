// x @ w.T with integer products: each group of activations is rounded to int8, and the products of a group are summed
// exactly before they meet the scales. With AVX-512 for all integer codes, as one digit (`quant_digits.h`), many rows in
// tile registers where there are any; with AVX2 for those of up to 4 bits, whose sums fit int16: int16 activations
// against wider codes were measured no faster than float32. Elsewhere the exact kernels do it.
#pragma once
#include "quant_amx.h"
#include "quant_digits.h"
#include "transpose.h"

namespace kern::KERN_NS {

#if defined(KERN_AVX512) || defined(KERN_AVX2)

// -- few rows --------------------------------------------------------------------------------------------------------

// As dot_row() of the exact kernels, where there are no digits; x are bytes, `ld` apart, and steps those of each lane
// of each block.
template <class F, int M>
__attribute__((noinline)) void dot_row_fast(const uint8_t* codes, int64_t bytes, int64_t blocks, int group,
                                            const float* scales, const int8_t* x, int64_t ld, const float* steps,
                                            int64_t ld_steps, vf* totals) {
  using Q = Quads<F>;
  const Spread<F> spread(group);
  vf total[M];
#pragma GCC unroll 4
  for (int m = 0; m < M; m++) total[m] = totals[m];
  each_block<F>(codes, bytes, blocks, [&](const uint8_t* p, int64_t b) __attribute__((always_inline)) {
    const Words w = Q::load(p);
    __builtin_prefetch(p + 4096);
    const uint8_t* at[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) at[m] = base(reinterpret_cast<const uint8_t*>(x) + m * ld + b * F::block);
    vi sums[M] = {};
#pragma GCC unroll 8
    for (int q = 0; q < Q::count; q++) {
      const vi quad = Q::quad(w, q);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) sums[m] = add_products(sums[m], quad, load_lanes<4>(at[m] + q * W * 4));
    }
    const vf scale = spread(scales, b);
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
      total[m] = to_floats(total_products(sums[m])) * (scale * load(steps + m * ld_steps + b * W)) + total[m];
  });
#pragma GCC unroll 4
  for (int m = 0; m < M; m++) totals[m] = total[m];
}

// -- many rows -------------------------------------------------------------------------------------------------------

// c[m][2 W] += the product of M rows of quads with a panel of 2 W rows of w, [quads][2 W][4]. `steps` and `sums` of x
// and `scales` and `biases` [2 W] of w belong to groups of `quads` quads.
template <class F, int M>
__attribute__((noinline)) void quad_tile(const int8_t* x, int64_t ld_x, const float* steps, const float* sums,
                                         int64_t ld_steps, int64_t ld_sums, const uint8_t* panel, const float* scales,
                                         const float* biases, int64_t groups, int quads, float* c, int64_t ld_c) {
  using Q = Quads<F>;
  const int run = W == 16 ? quads : static_cast<int>(least(quads, Q::most_adds));
  for (int64_t g = 0; g < groups; g++) {
    vi whole[M][2] = {};
    for (int first = 0; first < quads; first += run) {
      vi part[M][2] = {};
#pragma GCC unroll 1
      for (int i = 0; i < run; i++, panel += 8 * W) {
        const vi codes[2] = {load_lanes<4>(panel), load_lanes<4>(panel + 4 * W)};
        const int64_t at = g * quads + first + i;
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          int32_t four;
          memcpy(&four, x + m * ld_x + at * 4, sizeof four);
#pragma GCC unroll 2
          for (int n = 0; n < 2; n++) {
            part[m][n] = add_products(part[m][n], codes[n], splat_int(four));
            keep(part[m][n]);
          }
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) whole[m][n] = whole[m][n] + total_products(part[m][n]);
    }
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
      const vf scale = load(scales + (g * 2 + n) * W), bias = load(biases + (g * 2 + n) * W);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        float* to = c + m * ld_c + n * W;
        const vf product = to_floats(whole[m][n]) * (scale * steps[m * ld_steps + g]);
        store(to, product + (bias * sums[m * ld_sums + g] + load(to)));
      }
    }
  }
}

// -- the product -----------------------------------------------------------------------------------------------------

template <class F>
struct Fast {
  using Q = Quads<F>;
  static constexpr int64_t kFew = 16;              // up to so many rows of x stream w
  static constexpr int64_t kPanel = 2 * W;         // rows of w in a panel
  static constexpr int64_t kColumns = 3 * kPanel;  // and in panels that a piece of x meets one after the other
  static constexpr int64_t kDepth = 512;

  const kern_quant_matmul_args& args;
  const kern_quant& w = args.w;
  int64_t blocks = (w.width + F::block - 1) / F::block;
  int64_t width = blocks * F::block;
  int64_t ld = width + 64;  // of a prepared row: never a power of two
  int64_t group_count = groups(w);
  int64_t room = scale_room(group_count);
  int64_t lanes = width / F::per_lane + 16;
  int8_t* x = nullptr;      // [slots of the block, ld]
  float* steps = nullptr;   // [slots of the block, lanes]: of groups, or of lanes where rows are few
  float* sums = nullptr;    // [slots of the block, room]

  static int64_t few_rows(const kern_quant& w) {
#if defined(KERN_AVX512)
    return has_tiles && w.group % 32 == 0 ? 12 : kBlockRows;
#endif
    (void)w;
    return kFew;
  }
  bool is_few(const Segment& s) const { return s.count <= few_rows(w); }

  // Few rows meet whole blocks: byte t of quad q of lane i lies at [q][i][t]. Many meet panels: [i][q][t].
  void place(const int32_t* q, bool few, int8_t* out) const {
    for (int64_t b = 0; b < blocks; b++, q += F::block)
      for (int lane = 0; lane < W; lane++)
        for (int quad = 0; quad < Q::count; quad++)
          for (int t = 0; t < 4; t++) {
            const int64_t at = b * F::block + (few ? (quad * W + lane) : (lane * Q::count + quad)) * 4;
            out[at + t] = static_cast<int8_t>(q[lane * F::per_lane + Q::element(quad, t)]);
          }
  }

  void prepare(const Slots& slots, int64_t first, int64_t count) {
    const size_t floats = static_cast<size_t>(count * (lanes + room));
    x = static_cast<int8_t*>(scratch(SLOT_SHARED, static_cast<size_t>(count * ld) + floats * sizeof(float)));
    steps = reinterpret_cast<float*>(x + count * ld);
    sums = steps + count * lanes;
    chunks(count, most(1, 8192 / width), [&](int64_t begin, int64_t end) {
      float* row = static_cast<float*>(scratch(SLOT_CHUNK, static_cast<size_t>(2 * width) * sizeof(float)));
      int32_t* rounded = reinterpret_cast<int32_t*>(row + width);
      memset(rounded, 0, static_cast<size_t>(width) * sizeof(int32_t));
      for (int64_t i = begin; i < end; i++) {
        const bool few = is_few(slots.segments[slots.of[first + i]]);
        if (few && has_digits<F>) continue;
        read_row(args.x, args.x_type, slots.in[first + i] * w.width, w.width, row);
        float *step = steps + i * lanes, *sum = sums + i * room;
        for (int64_t g = 0; g < group_count; g++) {
          const float of_group = round_group(row + g * w.group, w.group, rounded + g * w.group, sum + g);
          if (!few) step[g] = of_group;
          const int64_t per_group = w.group / F::per_lane;
          for (int64_t lane = 0; few && lane < per_group; lane++) step[g * per_group + lane] = of_group;
        }
        memset(sum + group_count, 0, static_cast<size_t>(room - group_count) * sizeof(float));
        for (int64_t lane = w.width / F::per_lane; few && lane < lanes; lane++) step[lane] = 0.0f;
        place(rounded, few, x + i * ld);
      }
    });
  }

  // Scales and biases of `count` groups of a row of w as the integer products need them.
  void read(const Segment& s, int64_t n, int64_t first, int64_t count, float* scales, float* biases) const {
    read_scales(w, (s.matrix * w.rows + n) * group_count + first, count, F::unit, scales, biases);
    for (int64_t g = 0; Q::offset != 0 && g < scale_room(count); g++) biases[g] = -Q::offset * scales[g];
  }

  // c[m][n], kColumns apart, for rows [n, n + columns) of the segment's matrix.
  void few(const Segment& s, int64_t slot, int64_t n, int64_t columns, float* c) const {
    float* scales = static_cast<float*>(scratch(SLOT_CHUNK, static_cast<size_t>(2 * room) * sizeof(float)));
    float* biases = scales + room;
    for (int64_t i = 0; i < columns; i++) {
      read(s, n + i, 0, group_count, scales, biases);
      vf totals[kFew];
      for (int64_t m = 0; m < s.count; m++) totals[m] = vf{};
      auto run = [&](auto kernel, int64_t m) {
        kernel(row_codes(w, s.matrix, n + i), row_bytes(w), blocks, w.group, scales, x + (slot + m) * ld, ld,
               steps + (slot + m) * lanes, lanes, totals + m);
      };
      int64_t m = 0;
      for (; m + 4 <= s.count; m += 4) run(dot_row_fast<F, 4>, m);
      for (; m + 2 <= s.count; m += 2) run(dot_row_fast<F, 2>, m);
      if (m < s.count) run(dot_row_fast<F, 1>, m);
      for (m = 0; m < s.count; m++)
        c[m * kColumns + i] = finish(totals[m], biases, sums + (slot + m) * room, group_count);
    }
  }

  // Rows [n, n + columns) of w from element k on as a panel of quads, with their scales and biases by group.
  void pack(const Segment& s, int64_t n, int64_t columns, int64_t k, int64_t depth, uint8_t* panel, float* scales,
            float* biases) const {
    constexpr int64_t kVectors = kDepth / F::block * Q::count;
    constexpr int64_t kRoom = scale_room(kDepth / 16);
    vi codes[W][kVectors];
    float scale[kRoom], bias[kRoom];
    const int64_t pieces = (depth + F::block - 1) / F::block, at = k / F::block * F::block_bytes;
    for (int64_t half = 0; half < 2; half++) {
      for (int64_t i = 0; i < W; i++) {
        const int64_t row = half * W + i, panel_groups = depth / w.group;
        memset(codes[i], 0, sizeof codes[i]);
        if (row < columns) {
          const uint8_t* from = row_codes(w, s.matrix, n + row) + at;
          each_block<F>(from, row_bytes(w) - at, pieces, [&](const uint8_t* p, int64_t b) {
            const Words words = Q::load(p);
            for (int q = 0; q < Q::count; q++) codes[i][b * Q::count + q] = Q::quad(words, q);
          });
          read(s, n + row, k / w.group, panel_groups, scale, bias);
        }
        for (int64_t g = 0; g < panel_groups; g++) {
          scales[g * kPanel + row] = row < columns ? scale[g] : 0.0f;
          biases[g * kPanel + row] = row < columns ? bias[g] : 0.0f;
        }
      }
      for (int64_t b = 0; b < pieces; b++)
        for (int q = 0; q < Q::count; q++) {
          vi quads[W];
          for (int i = 0; i < W; i++) quads[i] = codes[i][b * Q::count + q];
          transpose(quads);
          for (int i = 0; i < W; i++)
            memcpy(panel + (((b * W + i) * Q::count + q) * kPanel + half * W) * 4, &quads[i], sizeof quads[i]);
        }
    }
  }

  void many(const Segment& s, int64_t slot, int64_t n, int64_t columns, float* c) const {
    constexpr int64_t kScales = kDepth / 16 * kPanel;  // of a panel
    float* scales = static_cast<float*>(
        scratch(SLOT_CHUNK, static_cast<size_t>(2 * kScales * 3) * sizeof(float) + kDepth * kColumns));
    float* biases = scales + kScales * 3;
    uint8_t* codes = reinterpret_cast<uint8_t*>(biases + kScales * 3);
    const int64_t panels = (columns + kPanel - 1) / kPanel;
    memset(c, 0, static_cast<size_t>(s.count * kColumns) * sizeof(float));
    for (int64_t k = 0; k < w.width; k += kDepth) {
      const int64_t depth = least(kDepth, w.width - k), g = k / w.group;
      for (int64_t p = 0; p < panels; p++)
        pack(s, n + p * kPanel, least(kPanel, columns - p * kPanel), k, depth, codes + p * kDepth * kPanel,
             scales + p * kScales, biases + p * kScales);
      auto run = [&](auto kernel, int64_t m) {
        for (int64_t p = 0; p < panels; p++)
          kernel(x + (slot + m) * ld + k, ld, steps + (slot + m) * lanes + g, sums + (slot + m) * room + g, lanes, room,
                 codes + p * kDepth * kPanel, scales + p * kScales, biases + p * kScales, depth / w.group, w.group / 4,
                 c + m * kColumns + p * kPanel, kColumns);
      };
      int64_t m = 0;
#if defined(KERN_AVX512)
      if (has_tiles && w.group % 32 == 0) {
        auto tile = [&](auto kernel, int64_t rows) {
          if (m + rows > s.count) return;
          const int64_t depth = least(kAmxRows, w.group / 4);
          const Tiles tiles({{rows, 64}, {rows, 4 * depth}, {depth, 64}});
          for (; m + rows <= s.count; m += rows) run(kernel, m);
        };
        tile(amx_tile<16>, 16);
        tile(amx_tile<8>, 8);
        tile(amx_tile<4>, 4);
      }
#endif
      for (; m + 4 <= s.count; m += 4) run(quad_tile<F, 4>, m);
      for (; m < s.count; m++) run(quad_tile<F, 1>, m);
    }
  }

  void run(const Slots& slots) {
    const int64_t panels = (w.rows + kColumns - 1) / kColumns;
    each_slot_block(slots, [&](int64_t begin, int64_t end, int64_t first, int64_t count) {
      prepare(slots, first, count);
      chunks((end - begin) * panels, panel_step(w, kColumns, count), [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
          const Segment& s = slots.segments[begin + i / panels];
          if (is_few(s) && has_digits<F>) continue;
          const int64_t n = i % panels * kColumns, columns = least(kColumns, w.rows - n);
          float* c =
              static_cast<float*>(scratch(SLOT_CHUNK_2, static_cast<size_t>(s.count * kColumns) * sizeof(float)));
          if (!is_few(s)) many(s, s.first - first, n, columns, c);
          if constexpr (!has_digits<F>)
            if (is_few(s)) few(s, s.first - first, n, columns, c);
          for (int64_t m = 0; m < s.count; m++)
            write_row(c + m * kColumns, columns, args.out, args.out_type, slots.out[s.first + m] * w.rows + n);
        }
      });
    });
  }
};

#endif

// False where there are no integer products for a format.
template <class F>
KERN_INLINE bool run_fast(const kern_quant_matmul_args& args, const Slots& slots) {
#if defined(KERN_AVX512) || defined(KERN_AVX2)
  if constexpr (has_quads<F>)
    if (args.precision == KERN_FAST) {
      const int64_t few = Fast<F>::few_rows(args.w);
#if defined(KERN_AVX512)
      if (slots.smallest() <= few) Streamed<Digits<F, 1>>{args, few}.run(slots);
      if (slots.largest() <= few) return true;
#endif
      (void)few;
      Fast<F>{args}.run(slots);
      return true;
    }
#endif
  (void)args, (void)slots;
  return false;
}

}  // namespace kern::KERN_NS
