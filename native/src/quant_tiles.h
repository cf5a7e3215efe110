// x @ w.T in float32, tiles of x with bands of w: in the tile registers of processors that have AMX.
//
// They multiply bfloat16 and add up in float32. A code has at most 8 significant bits, so it is a bfloat16; a float32 is
// exactly the sum of three, its bits from the top. So three products of tiles, all added up in float32, are a product in
// float32, and a group's sums meet its scale and bias as everywhere. What this cannot do is numbers below 2**-103, whose
// last parts the tiles take for zero.
//
// Five rows of x and more are multiplied alike: the result is the same among so many and among hundreds. Fewer are not
// worth the decoding of w; quant_stream.h takes them.
#pragma once
#include "amx.h"
#include "quant_digits.h"
#include "quant_pairs.h"
#include "transpose.h"

#if defined(KERN_AVX512)

namespace kern::KERN_NS {

constexpr int kTileParts = 3;  // bfloat16 whose sum is a float32

// -- products of tiles -----------------------------------------------------------------------------------------------

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

// Four of sums, three of x, for `rows` rows of it, and one of w.
KERN_INLINE Tiles exact_tiles(int64_t rows) {
  const Tiles::Shape of_x{16, 4 * rows};
  return Tiles({of_x, of_x, of_x, of_x, of_x, of_x, of_x, {16, 64}});
}

// totals += sums * scale + bias * sum of x, for 16 rows of w.
template <bool BIASED>
KERN_INLINE void scale_strip(const Totals& t, int64_t group, int64_t strip, vf x_sums) {
  const int64_t at = strip * W;
  const float *scales = t.scales + group * kBand + at, *biases = t.biases + group * kBand + at;
  const float* sums = t.sums + at * W;
  float* totals = t.totals + at * W;
#pragma GCC unroll 16
  for (int r = 0; r < W; r++) {
    vf total = load(totals + r * W);
    if constexpr (BIASED) total = x_sums * biases[r] + total;
    store(totals + r * W, load(sums + r * W) * scales[r] + total);
  }
}

// What the compiler must not move past the tiles, whose intrinsics do not say what they read.
KERN_INLINE void tiles_have_read() { asm volatile("" : : : "memory"); }

// The totals of x @ w.T for `groups` groups of `steps` steps of a decoded band. Tiles and vectors wait for each other
// unless they take small turns: `beside(step, strip)` is done after each product, and the strip is not read again.
template <bool BIASED, class Beside>
KERN_INLINE void multiply_tiles(const TileX& x, const uint8_t* decoded, int64_t groups, int64_t steps,
                                const Totals& totals, const Beside& beside) {
  const int64_t ld = 4 * x.rows, part_bytes = 16 * ld;
  const uint8_t *parts = x.parts, *w = decoded;
  const float* x_sums = x.sums;
  const Totals t = totals;
  int64_t step = 0;
  tiles_have_read();
  for (int64_t g = 0; g < groups; g++) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const vf of_x = BIASED && g > 0 ? load(x_sums + (g - 1) * W) : vf{};
    for (int64_t s = 0; s < steps; s++, step++, w += kStepBytes, parts += kTileParts * part_bytes) {
      const bool last = s + 1 == steps && g > 0;
      auto meanwhile = [&](int64_t strip) __attribute__((always_inline)) {
        tiles_have_read();
        beside(step, strip);
        if (last) scale_strip<BIASED>(t, g - 1, strip, of_x);
        tiles_have_read();
      };
      _tile_loadd(4, parts, ld);
      _tile_loadd(5, parts + part_bytes, ld);
      _tile_loadd(6, parts + 2 * part_bytes, ld);
      _tile_loadd(7, w, 64);
      _tile_dpbf16ps(0, 7, 4);
      _tile_dpbf16ps(0, 7, 5);
      _tile_dpbf16ps(0, 7, 6);
      meanwhile(0);
      _tile_loadd(7, w + kTileBytes, 64);
      _tile_dpbf16ps(1, 7, 4);
      _tile_dpbf16ps(1, 7, 5);
      _tile_dpbf16ps(1, 7, 6);
      meanwhile(1);
      _tile_loadd(7, w + 2 * kTileBytes, 64);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(2, 7, 5);
      _tile_dpbf16ps(2, 7, 6);
      meanwhile(2);
      _tile_loadd(7, w + 3 * kTileBytes, 64);
      _tile_dpbf16ps(3, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
      _tile_dpbf16ps(3, 7, 6);
      meanwhile(3);
    }
    _tile_stored(0, t.sums, 4 * W);
    _tile_stored(1, t.sums + 16 * W, 4 * W);
    _tile_stored(2, t.sums + 32 * W, 4 * W);
    _tile_stored(3, t.sums + 48 * W, 4 * W);
  }
  const vf of_x = BIASED ? load(x_sums + (groups - 1) * W) : vf{};
  for (int64_t strip = 0; strip < kStrips; strip++) scale_strip<BIASED>(t, groups - 1, strip, of_x);
}

template <bool BIASED>
__attribute__((noinline)) void multiply_decoded(const TileX& x, const uint8_t* decoded, int64_t groups, int64_t steps,
                                                const Totals& totals) {
  multiply_tiles<BIASED>(x, decoded, groups, steps, totals, [](int64_t, int64_t) {});
}

// What is to become of a band while another one is multiplied, and of one after it.
struct Ahead {
  const uint8_t* fetched;  // its codes take the place of the decoded band
  int64_t steps;
  Band after;  // is fetched
  uint8_t* fetched_after;
  Band later;  // is called for
};

template <class F, bool BIASED>
__attribute__((noinline)) void multiply_and_decode(const TileX& x, uint8_t* decoded, int64_t groups, int64_t steps,
                                                   const Totals& totals, const Ahead& ahead) {
  static_assert(kStrips * kBandSteps * 4 == kBand);
  auto beside = [&](int64_t step, int64_t strip) __attribute__((always_inline)) {
    if (step < ahead.steps) Decoder<F>::decode(ahead.fetched, step, strip, decoded);
    const int64_t first = (step * kStrips + strip) * 4;
    Decoder<F>::fetch(ahead.after, first, ahead.fetched_after);
    Decoder<F>::prefetch(ahead.later, first);
  };
  multiply_tiles<BIASED>(x, decoded, groups, steps, totals, beside);
  for (int64_t step = groups * steps; step < kBandSteps; step++)
    for (int64_t strip = 0; strip < kStrips; strip++) beside(step, strip);
}

// -- the product -----------------------------------------------------------------------------------------------------

template <class F>
struct InTiles {
  static constexpr int64_t fewer = 4;
  static constexpr int64_t kBands = 4;  // that a piece of x meets one after the other
  static constexpr int64_t kFetched = Decoder<F>::kFetched;
  static constexpr int64_t kLater = 8;  // depths of a band: memory is not further away

  const kern_quant_matmul_args& args;
  const kern_quant& w = args.w;
  const bool biased = w.mode == KERN_AFFINE;
  int64_t group_count = groups(w);
  int64_t room = scale_room(group_count);
  int64_t steps = w.width / kStep;
  int64_t slot_bytes = steps * kTileParts * 16 * 4;  // of x
  uint8_t* x = nullptr;   // pairs [step][part][16][row] for each tile of up to 16 slots of a segment
  float* sums = nullptr;  // [slots of the block][group] vectors: of the rows of a tile, by the slot of its first

  // The bits of each float from the top that a bfloat16 has; `v` keeps the others.
  static KERN_INLINE vf take_part(vf& v) {
    const vf part = (vf)((vi)v & static_cast<int32_t>(0xffff0000));
    v = v - part;
    return part;
  }

  // A tile of `count` rows of x, from a slot on.
  void place(const Slots& slots, int64_t slot, int64_t count, uint8_t* out, float* of_groups) const {
    static constexpr Places upper{[](int place) { return 2 * Step<F>::element(place) + 1; }};
    const int64_t ld = w.width + W;
    float* rows = static_cast<float*>(scratch(SLOT_CHUNK, static_cast<size_t>(count * ld + room) * sizeof(float)));
    float* of_row = rows + count * ld;
    memset(of_groups, 0, static_cast<size_t>(group_count * W) * sizeof(float));  // arithmetic with leftovers is slow
    for (int64_t m = 0; m < count; m++) {
      read_row(args.x, args.x_type, slots.in[slot + m] * w.width, w.width, rows + m * ld);
      if (!biased) continue;
      group_sums(rows + m * ld, group_count, w.group, room, of_row);
      for (int64_t g = 0; g < group_count; g++) of_groups[g * W + m] = of_row[g];
    }
    const auto some = static_cast<__mmask16>((1u << count) - 1);
    for (int64_t s = 0; s < steps; s++) {
      vi parts[kTileParts][W] = {};
      for (int64_t m = 0; m < count; m++) {
        vf low = load(rows + m * ld + s * kStep), high = load(rows + m * ld + s * kStep + W);
        for (int p = 0; p < kTileParts; p++) {
          const vf of_low = take_part(low), of_high = take_part(high);
          parts[p][m] = (vi)_mm512_permutex2var_epi16((__m512i)of_low, upper, (__m512i)of_high);
        }
      }
      for (int p = 0; p < kTileParts; p++) {
        if (count == 1) {
          memcpy(out, &parts[p][0], sizeof(vi));
          out += sizeof(vi);
        } else {
          transpose(parts[p]);
          for (int i = 0; i < W; i++, out += count * 4) _mm512_mask_storeu_epi32(out, some, (__m512i)parts[p][i]);
        }
      }
    }
  }

  void prepare(const Slots& slots, int64_t first, int64_t count) {
    const int64_t bytes = count * slot_bytes;
    x = static_cast<uint8_t*>(scratch(SLOT_SHARED, static_cast<size_t>(bytes + count * group_count * W * 4)));
    sums = reinterpret_cast<float*>(x + bytes);
    chunks(count, most(W, 16384 / w.width), [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++) {
        const Segment& s = slots.segments[slots.of[first + i]];
        const int64_t m = first + i - s.first;
        if (s.count > fewer && m % W == 0)
          place(slots, first + i, least(W, s.count - m), x + i * slot_bytes, sums + i * group_count * W);
      }
    });
  }

  // Scales and biases of rows [n, n + rows) as [group][64].
  void repack_scales(const Segment& s, int64_t n, int64_t rows, float* scales, float* biases) const {
    const int64_t first = (s.matrix * w.rows + n) * group_count;
    if (biased)
      with_type(w.scale_type, [&]<class T>(Of<T>) {
        repack_rows(static_cast<const T*>(w.scales) + first, group_count, rows, scales);
        repack_rows(static_cast<const T*>(w.biases) + first, group_count, rows, biases);
        return 0;
      });
    if (biased) return;
    float* of_rows = static_cast<float*>(scratch(SLOT_CHUNK_3, static_cast<size_t>(rows * room) * sizeof(float)));
    for (int64_t r = 0; r < rows; r++)
      read_scales(w, first + r * group_count, group_count, F::unit, of_rows + r * room, nullptr);
    repack_rows(of_rows, room, rows, scales);
  }

  template <class T>
  void repack_rows(const T* from, int64_t ld, int64_t rows, float* to) const {
    for (int64_t strip = 0; strip < rows; strip += W)
      for (int64_t g = 0; g < group_count; g += W) {
        const int64_t some_rows = least(W, rows - strip), some = least(W, group_count - g);
        vf block[W] = {};
        for (int64_t r = 0; r < some_rows; r++) {
          const T* at = from + (strip + r) * ld + g;
          block[r] = some == W ? load(at) : load_some(at, static_cast<int>(some));
        }
        vi repacked[W];
        memcpy(repacked, block, sizeof repacked);
        transpose(repacked);
        for (int64_t i = 0; i < some; i++) memcpy(to + (g + i) * kBand + strip, &repacked[i], sizeof repacked[i]);
      }
  }

  // Rows [n, n + columns) of a segment's matrix, in bands of 64, with all rows of x from `slot` on.
  // totals: [band][tile of x][64][16].
  void multiply(const Segment& s, int64_t slot, int64_t n, int64_t columns, float* totals) const {
    const int64_t bands = (columns + kBand - 1) / kBand, of_scales = group_count * kBand, tiles = (s.count + W - 1) / W;
    const int64_t decoded_bytes = (tiles == 1 ? 1 : bands) * kDecoded;
    const int64_t floats = kBand * W + bands * 2 * of_scales;
    uint8_t* decoded =
        static_cast<uint8_t*>(scratch(SLOT_CHUNK, static_cast<size_t>(decoded_bytes + 2 * kFetched + floats * 4)));
    uint8_t* fetched = decoded + decoded_bytes;
    float* of_group = reinterpret_cast<float*>(fetched + 2 * kFetched);
    float *scales = of_group + kBand * W, *biases = scales + bands * of_scales;
    memset(of_group, 0, static_cast<size_t>(kBand * W) * sizeof(float));
    memset(totals, 0, static_cast<size_t>(bands * tiles * kBand * W) * sizeof(float));
    for (int64_t i = 0; i < bands; i++)
      repack_scales(s, n + i * kBand, least(kBand, columns - i * kBand), scales + i * of_scales, biases + i * of_scales);
    const int64_t pieces = (w.width + kBandDepth - 1) / kBandDepth, group_steps = w.group / kStep;
    auto depth = [&](int64_t piece) { return least(kBandDepth, w.width - piece * kBandDepth); };
    auto band = [&](int64_t i, int64_t piece) {
      if (i >= bands) return Band{};
      return Band{row_codes(w, s.matrix, n + i * kBand) + piece * kBandDepth * F::bits / 8, row_bytes(w),
                  least(kBand, columns - i * kBand), depth(piece) / kStep};
    };
    auto rows_of_x = [&](int64_t m, int64_t piece) {
      const int64_t k = piece * kBandDepth, rows = least(W, s.count - m);
      return TileX{x + (slot + m) * slot_bytes + k / kStep * kTileParts * 16 * rows * 4,
                   sums + ((slot + m) * group_count + k / w.group) * W, rows};
    };
    auto of = [&](int64_t b, int64_t tile, int64_t piece) {
      const int64_t g = (b * group_count + piece * kBandDepth / w.group) * kBand;
      return Totals{scales + g, biases + g, of_group, totals + (b * tiles + tile) * kBand * W};
    };
    if (tiles == 1) {
      const Tiles registers = exact_tiles(s.count);
      const auto kernel = biased ? multiply_and_decode<F, true> : multiply_and_decode<F, false>;
      auto at = [&](int64_t i) { return band(i / pieces, i % pieces); };
      Decoder<F>::fetch_all(at(0), fetched);
      Decoder<F>::decode_all(at(0), fetched, decoded);
      Decoder<F>::fetch_all(at(1), fetched + kFetched);
      for (int64_t i = 0; i < bands * pieces; i++) {
        const int64_t b = i / pieces, piece = i % pieces;
        kernel(rows_of_x(0, piece), decoded, depth(piece) / w.group, group_steps, of(b, 0, piece),
               {fetched + (i + 1) % 2 * kFetched, at(i + 1).steps, at(i + 2), fetched + i % 2 * kFetched,
                at(i + kLater)});
      }
      return;
    }
    for (int64_t piece = 0; piece < pieces; piece++) {
      for (int64_t b = 0; b < bands; b++) {
        Decoder<F>::fetch_all(band(b, piece), fetched);
        Decoder<F>::decode_all(band(b, piece), fetched, decoded + b * kDecoded);
      }
      const int64_t piece_groups = depth(piece) / w.group;
      const auto kernel = biased ? multiply_decoded<true> : multiply_decoded<false>;
      auto run = [&](int64_t from, int64_t to, int64_t count) {
        if (from == to) return;
        const Tiles registers = exact_tiles(count);
        for (int64_t b = 0; b < bands; b++)
          for (int64_t tile = from; tile < to; tile++)
            kernel(rows_of_x(tile * W, piece), decoded + b * kDecoded, piece_groups, group_steps, of(b, tile, piece));
      };
      run(0, s.count / W, W);
      run(s.count / W, tiles, s.count % W);
    }
  }

  void write(const Slots& slots, const Segment& s, int64_t n, int64_t columns, const float* totals) const {
    const int64_t tiles = (s.count + W - 1) / W;
    for (int64_t i = 0; i < columns; i += W) {
      for (int64_t tile = 0; tile < tiles; tile++) {
        vi block[W];
        memcpy(block, totals + ((i / kBand * tiles + tile) * kBand + i % kBand) * W, sizeof block);
        transpose(block);
        for (int64_t m = tile * W; m < least(s.count, tile * W + W); m++) {
          float row[W];
          memcpy(row, &block[m % W], sizeof row);
          write_row(row, least(W, columns - i), args.out, args.out_type, slots.out[s.first + m] * w.rows + n + i);
        }
      }
    }
  }

  void run(const Slots& slots) {
    const int64_t bands = (w.rows + kBand - 1) / kBand;
    each_slot_block(slots, [&](int64_t begin, int64_t end, int64_t first, int64_t count) {
      prepare(slots, first, count);
      chunks((end - begin) * bands, least(kBands, panel_step(w, kBand, 1)), [&](int64_t from, int64_t to) {
        for (int64_t i = from, some; i < to; i += some) {
          const Segment& s = slots.segments[begin + i / bands];
          some = least(to - i, bands - i % bands);
          if (s.count <= fewer) continue;
          const int64_t n = i % bands * kBand, columns = least(some * kBand, w.rows - n), tiles = (s.count + W - 1) / W;
          float* totals = static_cast<float*>(
              scratch(SLOT_CHUNK_2, static_cast<size_t>(some * tiles * kBand * W) * sizeof(float)));
          multiply(s, s.first - first, n, columns, totals);
          write(slots, s, n, columns, totals);
        }
      });
    });
  }
};

}  // namespace kern::KERN_NS

#endif

namespace kern::KERN_NS {

// Who takes segments of how many rows: few stream w, and more go to tiles, where there are any, or floats. No format
// has groups that end within a step of tiles but that of 16.
template <class F>
KERN_INLINE void run_exact(const kern_quant_matmul_args& args, const Slots& slots) {
  int64_t less = 0, max_rows = slots.count;
#if defined(KERN_AVX512)
  if (has_pairs && args.x_type == KERN_BF16) {
    Streamed<Pairs<F>>{args, kBlockRows}.run(slots);
    return;
  }
  const bool tiles = has_tiles && args.w.group % kStep == 0;
  if constexpr (has_digits<F>) {
    less = tiles ? InTiles<F>::fewer : kBlockRows;
    if (slots.smallest() <= less) Streamed<Digits<F, 3>>{args, less}.run(slots);
  }
  if (tiles) {
    max_rows = InTiles<F>::fewer;
    if (slots.largest() > max_rows) InTiles<F>{args}.run(slots);
  }
  if (slots.smallest() > max_rows || slots.largest() <= less || less == max_rows) return;
#endif
  Exact<F>{args, less, max_rows}.run(slots);
}

}  // namespace kern::KERN_NS
