// x @ w.T for some rows of x, W rows of w at a time.
//
// A row of w that streams by (`quant_stream.h`) leaves a sum in each lane, which meets the group's scale lane by lane:
// beside two products of four codes stand three instructions that only put them together. Here W rows of w are turned,
// so that lane n has codes of row n: nothing is summed over lanes, a group's scale meets W rows at once, and what four
// activations are multiplied with is one vector. Turning takes as long as three rows of x, so it needs some.
//
// Of a layout it wants
//   words_of()         a block of a row of w as words, one per lane
//   vectors, vector()  what each word is multiplied as
//   late               whether that is made of it where it is multiplied: cheap, and the words are less to keep
//   digits             how often x meets all of them
//   multiply_turned()  the products of a group
//   bias               what times its scale each element of w has besides
#pragma once
#include "quant_digits.h"
#include "quant_pairs.h"
#include "transpose.h"

namespace kern::KERN_NS {

#if defined(KERN_AVX512)

template <class X>
struct Turned {
  using F = typename X::Format;
  static constexpr int words = X::digits * X::vectors * W;  // of a row of x in a block
  static constexpr int kept = X::late ? 1 : X::vectors;     // vectors for each lane of a block
  static constexpr int64_t blocks_at_once = 8 / X::vectors;  // of W rows of w: 8 KB at most
  static constexpr int64_t panels = kPanelN / W;

  // c[m][lane] += M rows of x from a block on times `count` groups of W rows of w.
  template <int M>
  static __attribute__((noinline)) void tile(const vi* codes, int64_t lanes, int64_t count, BesideRows x,
                                             const vf* scales, const vf* biases, const uint8_t* soon, int64_t step,
                                             float* c, int64_t ld) {
    vf total[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) total[m] = load(c + m * ld);
    for (int64_t g = 0; g < count; g++) {
      vf product[M];
      X::template multiply_turned<M>([&](int digit, const auto& add) __attribute__((always_inline)) {
        for (int64_t lane = g * lanes, end = lane + lanes; lane < end; lane += W) {
          const int64_t block = lane / W;
          const vi* from = codes + block * kept * W + lane % W;
          const int32_t* at = base(x.words + (block * words + digit * X::vectors * W + lane % W) * M);
          for (const vi* stop = from + least(W, end - lane); from < stop; from++, at += M) {
            if (digit == 0) {
              __builtin_prefetch(soon, 0, 2);
              soon += step;
            }
#pragma GCC unroll 8
            for (int v = 0; v < X::vectors; v++) {
              vi some = X::late ? X::vector({from[0], vi{}}, v) : from[v * W];
              keep(some);
              add(some, at + v * W * M);
            }
          }
        }
      }, product);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        if (biases != nullptr) total[m] = add_product(biases[g], splat(x.sums[g * M + m]), total[m]);
        const vf scale = X::counted ? scales[g] * x.factors[g * M + m] : scales[g];
        total[m] = add_product(product[m], scale, total[m]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) store(c + m * ld, total[m]);
  }

  // Calls body(kernel, first, M) for tiles of `count` rows of x.
  template <class Body>
  static KERN_INLINE void each_tile(int64_t count, const Body& body) {
    int64_t m = 0;
    for (; m + 8 <= count; m += 8) body(tile<8>, m, 8);
    if (m + 4 <= count) body(tile<4>, m, 4), m += 4;
    if (m + 2 <= count) body(tile<2>, m, 2), m += 2;
    if (m < count) body(tile<1>, m, 1);
  }

  // W rows of w, or the last one instead of those that there are not.
  struct Panel {
    const uint8_t* codes[W];
    alignas(64) uint8_t tail[W][2 * F::block_bytes + F::over];
    int64_t whole, bytes, blocks;

    Panel(const kern_quant& w, int64_t row, int64_t rows) : bytes(row_bytes(w)) {
      blocks = (w.width + F::block - 1) / F::block;
      whole = least(blocks, most(0, (bytes - F::over) / F::block_bytes));
      for (int r = 0; r < W; r++) {
        codes[r] = static_cast<const uint8_t*>(w.codes) + (row + least(r, rows - 1)) * bytes;
        if (whole == blocks) continue;
        memset(tail[r], 0, sizeof tail[r]);
        memcpy(tail[r], codes[r] + whole * F::block_bytes,
               static_cast<size_t>(least(2 * F::block_bytes, bytes - whole * F::block_bytes)));
      }
    }

    // Blocks [first, last): [block][of `kept`][lane of a block], lane n of each being row n.
    __attribute__((noinline)) void turn(int64_t first, int64_t last, vi* out) const {
      for (int64_t b = first; b < last; b++, out += kept * W) {
        vi low[W], high[F::bits == 5 ? W : 1];
#pragma GCC unroll 16
        for (int r = 0; r < W; r++) {
          const Words words =
              X::words_of(b < whole ? codes[r] + b * F::block_bytes : tail[r] + (b - whole) * F::block_bytes);
          low[r] = words.low;
          if constexpr (F::bits == 5) high[r] = words.high;
        }
        transpose(low);
        if constexpr (F::bits == 5) transpose(high);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++)
#pragma GCC unroll 4
          for (int v = 0; v < kept; v++)
            out[v * W + i] = X::late ? low[i] : X::vector({low[i], high[F::bits == 5 ? i : 0]}, v);
      }
    }
  };

  // W groups from `g` on of W rows of w: [group], lane n of each being row n.
  static __attribute__((noinline)) void turn_scales(const kern_quant& w, const void* values, int64_t row, int64_t rows,
                                                    int64_t g, vf* out) {
    const int64_t count = groups(w);
    const int type = w.mode == KERN_AFFINE ? w.scale_type : w.mode == KERN_NVFP4 ? kE4M3 : kE8M0;
    vi turned[W];
#pragma GCC unroll 1
    for (int r = 0; r < W; r++)
      turned[r] = (vi)scales_at(values, type, (row + least(r, rows - 1)) * count + g, count - g);
    transpose(turned);
    memcpy(out, turned, sizeof turned);
  }

  // c[m][n], kPanelN apart, for `count` rows of x and rows [row, row + rows) of w, counted over all matrices; no more
  // than kPanelN.
  static void run(const kern_quant& w, int64_t row, int64_t rows, const Beside& x, int64_t slot, int64_t count,
                  float* c) {
    vi codes[panels][blocks_at_once * kept * W];
    vf scales[panels][W], biases[panels][W];
    const int64_t lanes = w.group / F::per_lane, in_piece = blocks_at_once * W / lanes;  // groups
    const bool biased = w.biases != nullptr || X::bias != 0.0f;
    const int64_t used = (rows + W - 1) / W;
    const Panel panel[] = {{w, row, rows}, {w, row + W, rows - W}, {w, row + 2 * W, rows - 2 * W}};
    memset(c, 0, static_cast<size_t>(count * kPanelN) * sizeof(float));
    for (int64_t g = 0; g < groups(w); g += W) {
      for (int64_t p = 0; p < used; p++) {
        turn_scales(w, w.scales, row + p * W, rows - p * W, g, scales[p]);
        if (w.biases != nullptr) turn_scales(w, w.biases, row + p * W, rows - p * W, g, biases[p]);
        for (int i = 0; X::bias != 0.0f && i < W; i++) biases[p][i] = scales[p][i] * X::bias;
        for (int i = 0; !X::counted && F::unit != 1.0f && i < W; i++) scales[p][i] = scales[p][i] * F::unit;
      }
      for (int64_t from = g, end = least(groups(w), g + W); from < end; from += in_piece) {
        const int64_t some = least(in_piece, end - from), block = from * lanes / W;
        for (int64_t p = 0; p < used; p++) panel[p].turn(block, ((from + some) * lanes + W - 1) / W, codes[p]);
        each_tile(count, [&](auto kernel, int64_t m, int64_t together) {
          // the rows of w that come next, in the order in which they lie: as many of them as are multiplied meanwhile
          const uint8_t* soon = panel[0].codes[0] + kPanelN * panel[0].bytes + block * panels * W * F::block_bytes;
          const BesideRows rows_of_x = x.rows(slot + m, together, block * words, from);
          for (int64_t p = 0; p < used; p++)
            kernel(codes[p], lanes, some, rows_of_x, scales[p] + (from - g), biased ? biases[p] + (from - g) : nullptr,
                   soon + p * blocks_at_once * W * F::block_bytes,
                   m == 0 ? F::block_bytes : 0, c + m * kPanelN + p * W, kPanelN);
        });
      }
    }
  }

  // Puts `count` rows of x from a slot on beside each other, tile by tile; those tiles that begin within [begin, end).
  template <class Row>
  static void put(const kern_quant& w, const Row& row, const Beside& x, int64_t slot, int64_t count, int64_t begin,
                  int64_t end) {
    const int64_t blocks = (w.width + F::block - 1) / F::block;
    each_tile(count, [&](auto, int64_t first, int64_t together) {
      if (slot + first < begin || slot + first >= end) return;
      const BesideRows to = x.rows(slot + first, together, 0, 0);
      for (int64_t m = 0; m < together; m++) {
        const StreamRow from = row(slot + first + m);
        for (int64_t b = 0; b < blocks; b++)
          for (int64_t i = 0; i < words; i++) to.words[(b * words + i) * together + m] = from.x[b * X::words + i];
        for (int64_t g = 0; g < groups(w); g++) {
          if (X::counted) to.factors[g * together + m] = from.factors[g];
          to.sums[g * together + m] = from.sums[g];
        }
      }
    });
  }
};

#endif

}  // namespace kern::KERN_NS
