// x @ w.T for some rows of x, W rows of w at a time.
//
// `quant_stream.h` multiplies one row of w at a time and has a partial sum in each lane: for two products of four codes
// it needs three instructions that only combine lanes. Here W rows of w are repacked, so that lane n has codes of row
// n. No sums over lanes are needed, one vector has the scales of W rows, and the codes that four activations multiply
// are one vector. Repacking takes as long as three rows of x, so it pays only for more. If w is repacked in memory, one
// row of x is enough, and its result does not depend on the number of other rows.
//
// Of a layout it wants
//   words_of()         a block of a row of w as words, one per lane
//   vectors, vector()  what each word is multiplied as
//   late               whether that is made of it where it is multiplied: cheap, and the words are less to keep
//   digits             words of x for each vector
//   Sums               of the products of a group with some rows of x: add() those with a vector, finish() them
//   bias               what times its scale each element of w has besides
#pragma once
#include <type_traits>

#include "quant_digits.h"
#include "quant_pairs.h"
#include "transpose.h"

#if defined(KERN_AVX512)

namespace kern {

extern const bool foresees;  // the hardware prefetcher is faster than software prefetches

}  // namespace kern

namespace kern::KERN_NS {

template <int M>
using Rows = std::integral_constant<int, M>;

template <class X>
struct Repacked {
  using F = typename X::Format;
  static constexpr int words = X::digits * X::vectors;      // of a row of x for each lane of a block
  static constexpr int kept = X::late ? 1 : X::vectors;     // vectors for each lane of a block
  static constexpr int64_t blocks_at_once = 8 / X::vectors;  // of W rows of w: 8 KB at most
  static constexpr int64_t panels = kPanelN / W;
  static constexpr int64_t kMost = 8;          // rows of x in a tile
  static constexpr int64_t kScalesAhead = 24;  // groups
  static constexpr int kAny = -1;              // type of scales
  static constexpr int kLight = 2;             // words of x with each lane, up to which memory is all that counts

  // Scales and biases of W rows of w, [group], lane n of each being row n: stored ones, of `type`. NULL: no biases.
  // Factored ones begin at a multiple of 8 groups.
  struct Scales {
    const uint8_t *scales, *biases;
    int type;
    int64_t step;  // bytes of a group

    KERN_INLINE vf scale(int64_t g) const { return at(scales, g); }
    KERN_INLINE vf bias(int64_t g) const { return at(biases, g); }
    KERN_INLINE vf at(const uint8_t* numbers, int64_t g) const {
      if (type != KERN_FACTORED) return scales_at(numbers + g * step, type, 0, W);
      const kern_factored& block = reinterpret_cast<const kern_factored*>(numbers)[g / 8];
      const __m128i factors = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block.factors[g % 8]));
      const __m256i units = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block.units));
      return to_floats((vi)_mm512_cvtepi8_epi32(factors)) * (vf)_mm512_cvtph_ps(units);
    }
    KERN_INLINE Scales from(int64_t g) const {
      return {scales + g * step, biases != nullptr ? biases + g * step : nullptr, type, step};
    }
    KERN_INLINE void fetch(int64_t g) const {
      __builtin_prefetch(scales + g * step, 0, 2);
      if (biases != nullptr) __builtin_prefetch(biases + g * step, 0, 2);
    }
  };

  // Adds the products of M rows of x with the next SOME lanes of W rows of w. If FETCH, each lane fetches what is at
  // `soon`, which moves on by `step` bytes.
  template <int M, int SOME, bool FETCH>
  static KERN_INLINE void add_lanes(const int32_t*& codes, const int32_t*& words_of_x,
                                    typename X::template Sums<M>& sums, const uint8_t*& soon, int64_t step) {
#pragma GCC unroll 8
    for (int i = 0; i < SOME; i++, codes += kept * W, words_of_x += words * M) {
      if constexpr (FETCH) {
        __builtin_prefetch(soon, 0, 2);
        soon += step;
      }
      const vi word = load_words(codes);
#pragma GCC unroll 8
      for (int v = 0; v < X::vectors; v++) {
        vi some = X::late ? X::vector({word, vi{}}, v) : load_words(codes + v * W);
        keep(some);
        sums.add(some, v, words_of_x + v * M);
      }
    }
  }

  // Adds a group's products to those of the groups before it.
  template <int M>
  static KERN_INLINE void add_group(const typename X::template Sums<M>& sums, const Scales& scales, int64_t g,
                                    const BesideRows& x, vf* total) {
    vf scale = scales.scale(g), bias{};
    if (X::bias != 0.0f) bias = scale * X::bias;
    if (X::bias == 0.0f && scales.biases != nullptr) bias = scales.bias(g);
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

  // c[m][lane] += M rows of x from a group on times `count` groups of W rows of w.
  template <int M>
  static __attribute__((noinline)) void tile(const int32_t* codes, int64_t lanes, int64_t count, BesideRows x,
                                             Scales scales, const uint8_t* soon, int64_t step, float* c, int64_t ld) {
    const int32_t* at = x.words;
    vf total[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) total[m] = load(c + m * ld);
    for (int64_t g = 0; g < count; g++) {
      typename X::template Sums<M> sums;
      for (int64_t lane = 0; lane < lanes; lane++) add_lanes<M, 1, true>(codes, at, sums, soon, step);
      add_group<M>(sums, scales, g, x, total);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) store(c + m * ld, total[m]);
  }

  // c[m][n] for M rows of x and `strips` times W rows of w that are repacked, SOME lanes at a time. Where there is little to
  // do for a group, scales of a TYPE that is known, and biases, go without a branch.
  template <int M, int SOME, bool FETCH, int TYPE>
  static __attribute__((noinline)) void stream(const int32_t* codes, int64_t lanes, int64_t count, BesideRows x,
                                               Scales scales, int64_t strips, float* c, int64_t ld) {
    if (TYPE != kAny) {
      scales.type = TYPE;
      if (scales.biases == nullptr) __builtin_unreachable();
    }
    const uint8_t* soon = reinterpret_cast<const uint8_t*>(codes) + kAhead;
    for (int64_t s = 0; s < strips; s++, c += W) {
      const int32_t* at = x.words;
      vf total[M] = {};
      for (int64_t g = 0; g < count; g++) {
        typename X::template Sums<M> sums;
        for (int64_t left = lanes; left > 0; left -= SOME) add_lanes<M, SOME, FETCH>(codes, at, sums, soon, sizeof(vi));
        if (g % 2 == 0) scales.fetch(g + kScalesAhead);
        add_group<M>(sums, scales, g, x, total);
      }
      scales = scales.from(count);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) store(c + m * ld, total[m]);
    }
  }

  // With little arithmetic per lane, the hardware prefetcher of some processors is faster than software prefetches,
  // because the codes are read in memory order. With more arithmetic, and for the few scales, software prefetches are
  // faster on all of them.
  template <int M, int SOME, int TYPE>
  static auto stream_here() {
    if constexpr (M * words <= kLight)
      if (foresees) return stream<M, SOME, false, TYPE>;
    return stream<M, SOME, true, TYPE>;
  }

  template <int M>
  static auto stream_of(int64_t lanes, const Scales& scales) {
    if constexpr (M == 1)
      if (lanes % 4 == 0 && scales.type == KERN_FACTORED) return stream_here<M, 4, KERN_FACTORED>();
    if constexpr (M == 1)
      if (lanes % 8 == 0) {
        if (scales.biases != nullptr && scales.type == KERN_F16) return stream_here<M, 8, KERN_F16>();
        if (scales.biases != nullptr && scales.type == KERN_BF16) return stream_here<M, 8, KERN_BF16>();
        return stream_here<M, 8, kAny>();
      }
    return stream_here<M, 2, kAny>();  // groups have an even number
  }

  static Scales as_floats(const vf* scales, const vf* biases) {
    return {reinterpret_cast<const uint8_t*>(scales), reinterpret_cast<const uint8_t*>(biases), KERN_F32, sizeof(vf)};
  }

  // Calls body(M, first) for tiles of M of `count` rows of x, M being a constant.
  template <class Body>
  static KERN_INLINE void each_tile(int64_t count, const Body& body) {
    int64_t m = 0;
    for (; m + kMost <= count; m += kMost) body(Rows<kMost>(), m);
    switch (count - m) {
      case 7: return body(Rows<7>(), m);
      case 6: return body(Rows<6>(), m);
      case 5: return body(Rows<5>(), m);
      case 4: return body(Rows<4>(), m);
      case 3: return body(Rows<3>(), m);
      case 2: return body(Rows<2>(), m);
      case 1: return body(Rows<1>(), m);
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
    __attribute__((noinline)) void repack(int64_t first, int64_t last, vi* out) const {
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
  static __attribute__((noinline)) void repack_scales(const kern_quant& w, const void* values, int64_t row, int64_t rows,
                                                    int64_t g, vf* out) {
    const int64_t count = groups(w);
    const int type = scale_type(w);
    vi repacked[W];
#pragma GCC unroll 1
    for (int r = 0; r < W; r++)
      repacked[r] = (vi)scales_at(values, type, (row + least(r, rows - 1)) * count + g, count - g);
    transpose(repacked);
    memcpy(out, repacked, sizeof repacked);
  }

  // Of rows that are repacked, from number `at` on.
  static Scales lying_scales(const kern_quant& w, int64_t at) {
    const int64_t step = is_factored(w) ? static_cast<int64_t>(sizeof(kern_factored)) / 8 : W * scale_bytes(w);
    const auto begin = [&](const void* of) {
      return of != nullptr ? static_cast<const uint8_t*>(of) + at / W * step : nullptr;
    };
    return {begin(w.scales), begin(w.biases), scale_type(w), step};
  }

  // As run(), for up to kMost rows of x and those of w that are repacked.
  static void run_few(const kern_quant& w, int64_t row, int64_t rows, const Beside& x, int64_t slot, int64_t count,
                      float* c, int64_t ld) {
    const int64_t lanes = w.group / F::per_lane, at = row * groups(w);
    each_tile(count, [&](auto size, int64_t) {
      const Scales scales = lying_scales(w, at);
      stream_of<size>(lanes, scales)(static_cast<const int32_t*>(w.codes) + at * lanes, lanes, groups(w),
                                     x.rows(slot, size, 0, 0), scales, rows / W, c, ld);
    });
  }

  // As run(), for rows of w that are repacked.
  static void run_repacked(const kern_quant& w, int64_t row, int64_t rows, const Beside& x, int64_t slot, int64_t count,
                         float* c) {
    vf scales[panels * W], biases[panels * W];
    const int64_t lanes = w.group / F::per_lane, used = (rows + W - 1) / W;
    memset(c, 0, static_cast<size_t>(count * kPanelN) * sizeof(float));
    for (int64_t g = 0; g < groups(w); g += W) {
      const int64_t some = least(W, groups(w) - g);
      Scales found[panels];
      for (int64_t p = 0; p < used; p++) {
        const Scales stored = lying_scales(w, (row + p * W) * groups(w) + g * W);
        found[p] = as_floats(scales + p * W, stored.biases != nullptr ? biases + p * W : nullptr);
        for (int64_t i = 0; i < some; i++) {
          scales[p * W + i] = stored.scale(i);
          if (stored.biases != nullptr) biases[p * W + i] = stored.bias(i);
        }
      }
      each_tile(count, [&](auto size, int64_t m) {
        const BesideRows rows_of_x = x.rows(slot + m, size, g * lanes * words, g);
        for (int64_t p = 0; p < used; p++) {
          const int32_t* codes = static_cast<const int32_t*>(w.codes) + ((row + p * W) * groups(w) + g * W) * lanes;
          tile<size>(codes, lanes, some, rows_of_x, found[p], reinterpret_cast<const uint8_t*>(codes) + kAhead,
                     m == 0 ? W * int64_t{4} : 0, c + m * kPanelN + p * W, kPanelN);
        }
      });
    }
  }

  // c[m][n], `ld` apart, for `count` rows of x and rows [row, row + rows) of w, counted over all matrices. But for few
  // rows of x and those of w that are repacked kPanelN apart, and no more than that.
  static void run(const kern_quant& w, int64_t row, int64_t rows, const Beside& x, int64_t slot, int64_t count,
                  float* c, int64_t ld) {
    if constexpr (X::late) {
      if (w.repacked && count <= kMost) return run_few(w, row, rows, x, slot, count, c, ld);
      if (w.repacked) return run_repacked(w, row, rows, x, slot, count, c);
    }
    vi codes[panels][blocks_at_once * kept * W];
    vf scales[panels][W], biases[panels][W];
    const int64_t lanes = w.group / F::per_lane, in_piece = blocks_at_once * W / lanes;  // groups
    const int64_t used = (rows + W - 1) / W;
    const Panel panel[] = {{w, row, rows}, {w, row + W, rows - W}, {w, row + 2 * W, rows - 2 * W}};
    memset(c, 0, static_cast<size_t>(count * kPanelN) * sizeof(float));
    for (int64_t g = 0; g < groups(w); g += W) {
      for (int64_t p = 0; p < used; p++) {
        repack_scales(w, w.scales, row + p * W, rows - p * W, g, scales[p]);
        if (w.biases != nullptr) repack_scales(w, w.biases, row + p * W, rows - p * W, g, biases[p]);
      }
      for (int64_t from = g, end = least(groups(w), g + W); from < end; from += in_piece) {
        const int64_t some = least(in_piece, end - from), block = from * lanes / W;
        for (int64_t p = 0; p < used; p++) panel[p].repack(block, ((from + some) * lanes + W - 1) / W, codes[p]);
        each_tile(count, [&](auto size, int64_t m) {
          // the rows of w that come next, in the order in which they lie: as many of them as are multiplied meanwhile
          const uint8_t* soon = panel[0].codes[0] + kPanelN * panel[0].bytes + block * panels * W * F::block_bytes;
          const BesideRows rows_of_x = x.rows(slot + m, size, from * lanes * words, from);
          for (int64_t p = 0; p < used; p++)
            tile<size>(reinterpret_cast<const int32_t*>(codes[p]), lanes, some, rows_of_x,
                       as_floats(scales[p] + (from - g), w.biases != nullptr ? biases[p] + (from - g) : nullptr),
                       soon + p * blocks_at_once * W * F::block_bytes, m == 0 ? F::block_bytes : 0,
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
    each_tile(count, [&](auto together, int64_t first) {
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

}  // namespace kern::KERN_NS

#endif
