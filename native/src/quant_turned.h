// x @ w.T for some rows of x, W rows of w at a time.
//
// A row of w that streams by (`quant_stream.h`) leaves a sum in each lane, which meets the group's scale lane by lane:
// beside two products of four codes stand three instructions that only put them together. Here W rows of w are turned,
// so that lane n has codes of row n: nothing is summed over lanes, a group's scale meets W rows at once, and what four
// activations are multiplied with is one vector. Turning takes as long as three rows of x, so it needs some; where rows
// of w lie turned already, one is enough, and a row of x has the same result among any number of others.
//
// Of a layout it wants
//   words_of()         a block of a row of w as words, one per lane
//   vectors, vector()  what each word is multiplied as
//   late               whether that is made of it where it is multiplied: cheap, and the words are less to keep
//   digits             words of x for each vector
//   Sums               of the products of a group with some rows of x: add() those with a vector, finish() them
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
  static constexpr int words = X::digits * X::vectors;      // of a row of x for each lane of a block
  static constexpr int kept = X::late ? 1 : X::vectors;     // vectors for each lane of a block
  static constexpr int64_t blocks_at_once = 8 / X::vectors;  // of W rows of w: 8 KB at most
  static constexpr int64_t panels = kPanelN / W;

  // Scales and biases of W rows of w, [group], lane n of each being row n: stored ones, of `type`. NULL: no biases.
  struct Scales {
    const void *scales, *biases;
    int type;
  };

  // What to fetch: codes, a step with each lane's words, and scales, a step with each group.
  struct Soon {
    const uint8_t *codes, *scales, *biases;
    int64_t step, scale_step;
  };

  // c[m][lane] += M rows of x from a group on times `count` groups of W rows of w.
  template <int M>
  static __attribute__((noinline)) void tile(const int32_t* codes, int64_t lanes, int64_t count, BesideRows x,
                                             Scales scales, Soon soon, float* c, int64_t ld) {
    const int32_t* at = x.words;
    vf total[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) total[m] = load(c + m * ld);
    for (int64_t g = 0; g < count; g++) {
      typename X::template Sums<M> sums;
      for (int64_t lane = 0; lane < lanes; lane++, codes += kept * W, at += words * M) {
        __builtin_prefetch(soon.codes, 0, 2);
        soon.codes += soon.step;
        const vi word = load_words(codes);
#pragma GCC unroll 8
        for (int v = 0; v < X::vectors; v++) {
          vi some = X::late ? X::vector({word, vi{}}, v) : load_words(codes + v * W);
          keep(some);
          sums.add(some, v, at + v * M);
        }
      }
      if (g % 2 == 0) {
        __builtin_prefetch(soon.scales, 0, 2);
        __builtin_prefetch(soon.biases, 0, 2);
      }
      soon.scales += soon.scale_step;
      soon.biases += soon.scale_step;
      vf scale = scales_at(scales.scales, scales.type, g * W, W), bias{};
      if (X::bias != 0.0f) bias = scale * X::bias;
      if (X::bias == 0.0f && scales.biases != nullptr) bias = scales_at(scales.biases, scales.type, g * W, W);
      if (!X::counted && F::unit != 1.0f) scale = scale * F::unit;
      vf product[M];
      sums.finish(product);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        if (X::bias != 0.0f || scales.biases != nullptr)
          total[m] = add_product(bias, splat(x.sums[g * M + m]), total[m]);
        total[m] = add_product(product[m], X::counted ? scale * x.factors[g * M + m] : scale, total[m]);
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
    switch (count - m) {
      case 7: return body(tile<7>, m, 7);
      case 6: return body(tile<6>, m, 6);
      case 5: return body(tile<5>, m, 5);
      case 4: return body(tile<4>, m, 4);
      case 3: return body(tile<3>, m, 3);
      case 2: return body(tile<2>, m, 2);
      case 1: return body(tile<1>, m, 1);
    }
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

    // Blocks [first, last): [block][lane of a block][of `kept`], lane n of each being row n.
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
            out[i * kept + v] = X::late ? low[i] : X::vector({low[i], high[F::bits == 5 ? i : 0]}, v);
      }
    }
  };

  // W groups from `g` on of W rows of w: [group], lane n of each being row n.
  static __attribute__((noinline)) void turn_scales(const kern_quant& w, const void* values, int64_t row, int64_t rows,
                                                    int64_t g, vf* out) {
    const int64_t count = groups(w);
    const int type = scale_type(w);
    vi turned[W];
#pragma GCC unroll 1
    for (int r = 0; r < W; r++)
      turned[r] = (vi)scales_at(values, type, (row + least(r, rows - 1)) * count + g, count - g);
    transpose(turned);
    memcpy(out, turned, sizeof turned);
  }

  static constexpr int64_t kScalesAhead = 24;  // groups

  // As run(), for rows that lie turned.
  static void run_turned(const kern_quant& w, int64_t row, int64_t rows, const Beside& x, int64_t slot, int64_t count,
                         float* c) {
    vf scales[panels * W], biases[panels * W];
    const int64_t lanes = w.group / F::per_lane, used = (rows + W - 1) / W, bytes = scale_bytes(w);
    memset(c, 0, static_cast<size_t>(count * kPanelN) * sizeof(float));
    auto codes_at = [&](int64_t at) { return static_cast<const int32_t*>(w.codes) + at * lanes; };
    auto scales_from = [&](int64_t at) {
      return Scales{static_cast<const uint8_t*>(w.scales) + at * bytes,
                    w.biases != nullptr ? static_cast<const uint8_t*>(w.biases) + at * bytes : nullptr,
                    scale_type(w)};
    };
    if (count <= 8) {  // all are one tile, which meets W rows of w after the other, as they lie
      for (int64_t p = 0; p < used; p++) {
        const int64_t at = (row + p * W) * groups(w);
        const Scales found = scales_from(at), later = scales_from(at + kScalesAhead * W);
        const int32_t* codes = codes_at(at);
        const auto* biased = static_cast<const uint8_t*>(w.biases != nullptr ? later.biases : later.scales);
        const Soon soon{reinterpret_cast<const uint8_t*>(codes) + kAhead, static_cast<const uint8_t*>(later.scales),
                        biased, W * sizeof(int32_t), W * bytes};
        each_tile(count, [&](auto kernel, int64_t, int64_t together) {
          kernel(codes, lanes, groups(w), x.rows(slot, together, 0, 0), found, soon, c + p * W, kPanelN);
        });
      }
      return;
    }
    for (int64_t g = 0; g < groups(w); g += W) {
      const int64_t some = least(W, groups(w) - g);
      Scales found[panels];
      for (int64_t p = 0; p < used; p++) {
        const Scales stored = scales_from((row + p * W) * groups(w) + g * W);
        found[p] = {scales + p * W, stored.biases != nullptr ? biases + p * W : nullptr, KERN_F32};
        for (int64_t i = 0; i < some; i++) {
          scales[p * W + i] = scales_at(stored.scales, stored.type, i * W, W);
          if (stored.biases != nullptr) biases[p * W + i] = scales_at(stored.biases, stored.type, i * W, W);
        }
      }
      each_tile(count, [&](auto kernel, int64_t m, int64_t together) {
        const BesideRows rows_of_x = x.rows(slot + m, together, g * lanes * words, g);
        for (int64_t p = 0; p < used; p++) {
          const int32_t* codes = codes_at((row + p * W) * groups(w) + g * W);
          const uint8_t* soon = reinterpret_cast<const uint8_t*>(codes) + kAhead;
          kernel(codes, lanes, some, rows_of_x, found[p], {soon, soon, soon, m == 0 ? W * int64_t{4} : 0, 0},
                 c + m * kPanelN + p * W, kPanelN);
        }
      });
    }
  }

  // c[m][n], kPanelN apart, for `count` rows of x and rows [row, row + rows) of w, counted over all matrices; no more
  // than kPanelN.
  static void run(const kern_quant& w, int64_t row, int64_t rows, const Beside& x, int64_t slot, int64_t count,
                  float* c) {
    if constexpr (X::late)
      if (w.turned) return run_turned(w, row, rows, x, slot, count, c);
    vi codes[panels][blocks_at_once * kept * W];
    vf scales[panels][W], biases[panels][W];
    const int64_t lanes = w.group / F::per_lane, in_piece = blocks_at_once * W / lanes;  // groups
    const int64_t used = (rows + W - 1) / W;
    const Panel panel[] = {{w, row, rows}, {w, row + W, rows - W}, {w, row + 2 * W, rows - 2 * W}};
    memset(c, 0, static_cast<size_t>(count * kPanelN) * sizeof(float));
    for (int64_t g = 0; g < groups(w); g += W) {
      for (int64_t p = 0; p < used; p++) {
        turn_scales(w, w.scales, row + p * W, rows - p * W, g, scales[p]);
        if (w.biases != nullptr) turn_scales(w, w.biases, row + p * W, rows - p * W, g, biases[p]);
      }
      for (int64_t from = g, end = least(groups(w), g + W); from < end; from += in_piece) {
        const int64_t some = least(in_piece, end - from), block = from * lanes / W;
        for (int64_t p = 0; p < used; p++) panel[p].turn(block, ((from + some) * lanes + W - 1) / W, codes[p]);
        each_tile(count, [&](auto kernel, int64_t m, int64_t together) {
          // the rows of w that come next, in the order in which they lie: as many of them as are multiplied meanwhile
          const uint8_t* soon = panel[0].codes[0] + kPanelN * panel[0].bytes + block * panels * W * F::block_bytes;
          const BesideRows rows_of_x = x.rows(slot + m, together, from * lanes * words, from);
          for (int64_t p = 0; p < used; p++)
            kernel(reinterpret_cast<const int32_t*>(codes[p]), lanes, some, rows_of_x,
                   {scales[p] + (from - g), w.biases != nullptr ? biases[p] + (from - g) : nullptr, KERN_F32},
                   {soon + p * blocks_at_once * W * F::block_bytes, soon, soon, m == 0 ? F::block_bytes : 0, 0},
                   c + m * kPanelN + p * W, kPanelN);
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
          for (int64_t lane = 0; lane < W; lane++)
            for (int64_t i = 0; i < words; i++)
              to.words[((b * W + lane) * words + i) * together + m] = from.x[b * X::words + i * W + lane];
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
