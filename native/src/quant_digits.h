// x @ w.T for few rows of x, in integers.
//
// Each group of activations is counted in steps, and each whole number written as signed bytes: four for float32 and
// three for 16 bits keep what float32 keeps, one is what `fast` rounds to. What codes and bytes add up to is exact, and
// becomes a float once per lane and block. So less is rounded than in float32, and fewer instructions do it than decode
// the codes to floats.
// A result depends on one row of x and one of w only, not on threads or other rows.
#pragma once
#include "quant_exact.h"
#include "quant_quads.h"

namespace kern::KERN_NS {

#if defined(KERN_AVX512)

template <class F>
constexpr bool has_digits = has_quads<F>;

// -- activations -----------------------------------------------------------------------------------------------------

// `groups` groups of x in steps of 2**(3 - 8 D) of their largest power of two: words of D signed bytes, lowest first.
// No bit is lost of a float32 with four bytes down to 2**-6 of its group's largest, with three of a float16 down to
// 2**-11 and of a bfloat16 down to 2**-14; what is smaller rounds to a step. `factors` are what a step is worth, far
// enough from the end of float32 that scales down to 2**-33 lose nothing by them. False where a group is not finite or
// far from 1: floats have to do it.
template <int D>
inline bool count_steps(const float* x, int64_t groups, int group, int32_t* words, float* factors) {
  constexpr int kFar = 64, kBits = 8 * D - 3;
  constexpr int32_t kHalves = D == 4 ? 0x00808080 : 0x00008080;  // of all bytes but the highest
  for (int64_t g = 0; g < groups; g++, x += group, words += group) {
    vf high{}, poison{};
    for (int k = 0; k < group; k += W) {
      const vf v = load(x + k);
      high = vmax(vabs(v), high);
      poison = poison + v * 0.0f;
    }
    const float peak = largest(high);
    const int exponent = static_cast<int>(bit_cast<uint32_t>(peak) >> 23) - 127;
    if (sum(poison) != 0.0f || (peak != 0.0f && (exponent < -kFar || exponent >= kFar))) return false;
    factors[g] = peak != 0.0f ? power_of_two(exponent - kBits) : 0.0f;
    const float inverse = peak != 0.0f ? power_of_two(kBits - exponent) : 0.0f;
    for (int k = 0; k < group; k += W) {
      const vi number = (vi)_mm512_cvtps_epi32((__m512)(load(x + k) * inverse));
      const vi bytes = (number + kHalves) ^ kHalves;
      memcpy(words + k, &bytes, sizeof bytes);
    }
  }
  return true;
}

KERN_INLINE vi load_words(const int32_t* p) { return load_lanes<4>(reinterpret_cast<const uint8_t*>(p)); }

// A row of x as `D` bytes per number, the highest first: [block][digit][quad][lane][4]. For formats whose codes have an
// offset [digit][lane] follows in each block: what takes it off.
template <class F, int D>
struct Digits {
  using Q = Quads<F>;
  static constexpr int quads = D * Q::count * W;  // words
  static constexpr int words = quads + (Q::offset != 0 ? D * W : 0);
  // Whether the products of a lane fit an int32 with all digits, not only with two.
  static constexpr bool together = D == 1 || (D == 3 && F::bits < 8);

  static void place(const int32_t* numbers, int64_t blocks, int32_t* out) {
    for (int64_t b = 0; b < blocks; b++, numbers += F::block, out += words)
      for (int digit = 0; digit < D; digit++) {
        alignas(64) uint8_t bytes[F::block];
        for (int i = 0; i < F::block; i += W) {
          const __m128i some = _mm512_cvtepi32_epi8((__m512i)(load_words(numbers + i) >> (8 * (D - 1 - digit))));
          memcpy(bytes + i, &some, sizeof some);
        }
        int32_t* to = out + digit * Q::count * W;
        if constexpr (Q::element(0, 1) == 2) {  // every second byte
          for (int i = 0; i < F::block; i += 64) {
            const __m512i pairs = _mm512_load_si512(bytes + i);
            const __m256i even = _mm512_cvtepi16_epi8(pairs), odd = _mm512_cvtepi16_epi8(_mm512_srli_epi16(pairs, 8));
            memcpy(to + i / 8, &even, sizeof even);
            memcpy(to + W + i / 8, &odd, sizeof odd);
          }
        } else {
          for (int lane = 0; lane < W; lane++)
            for (int q = 0; q < Q::count; q++) memcpy(to + q * W + lane, bytes + (lane * Q::count + q) * 4, 4);
        }
        if constexpr (Q::offset != 0) {
          vi start{};
          for (int q = 0; q < Q::count; q++)
            start = add_products(start, splat_int(Q::offset * 0x01010101), load_words(to + q * W));
          start = -start;
          memcpy(out + quads + digit * W, &start, sizeof start);
        }
      }
  }
};

// -- scales ----------------------------------------------------------------------------------------------------------

enum { kE8M0 = KERN_BF16 + 1, kE4M3 };  // types of scales that no activation has

// The next W of `left` scales from number `at` on; 0 where there are no more.
KERN_INLINE vf scales_at(const void* scales, int type, int64_t at, int64_t left) {
  const auto some = static_cast<__mmask16>(_bzhi_u32(0xffff, static_cast<uint32_t>(left)));
  const auto halves = [&] { return _mm256_maskz_loadu_epi16(some, static_cast<const uint16_t*>(scales) + at); };
  const auto bytes = [&] { return _mm_maskz_loadu_epi8(some, static_cast<const uint8_t*>(scales) + at); };
  switch (type) {
    case KERN_F32: return (vf)_mm512_maskz_loadu_ps(some, static_cast<const float*>(scales) + at);
    case KERN_F16: return (vf)_mm512_cvtph_ps(halves());
    case KERN_BF16: return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves()), 16);
    case kE8M0: {
      const vi codes = (vi)_mm512_cvtepu8_epi32(bytes());
      return (vf)(codes == 0 ? splat_int(0x00400000) : codes << 23);
    }
    default: {
      alignas(16) uint8_t codes[W];
      _mm_store_si128(reinterpret_cast<__m128i*>(codes), bytes());
      return Fp8::value({codes}, 0) * Fp8::unit;
    }
  }
}

// -- rows of w -------------------------------------------------------------------------------------------------------

// A row of x, and where its products go: out[n] belongs to row n of w. `factors` and `sums` belong to groups.
struct DigitRow {
  const int32_t* digits;
  const float *factors, *sums;
  float* out;
};

// A block's codes of R rows of w times digits [FIRST, LAST) of x, lane by lane.
template <class F, int D, int R, int FIRST, int LAST>
KERN_INLINE void add_digits(const Words* code, const int32_t* digits, vi* sum) {
  using Q = Quads<F>;
#pragma GCC unroll 4
  for (int d = FIRST; d < LAST; d++) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      if (d == FIRST)
        sum[r] = Q::offset != 0 ? load_words(digits + Digits<F, D>::quads + d * W) : vi{};
      else
        sum[r] = Q::offset != 0 ? (sum[r] << 8) + load_words(digits + Digits<F, D>::quads + d * W) : sum[r] << 8;
    }
#pragma GCC unroll 4
    for (int q = 0; q < Q::count; q++) {
      const vi four = load_words(digits + (d * Q::count + q) * W);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sum[r] = add_products(sum[r], Q::quad(code[r], q), four);
    }
  }
}

// Codes that come soon are fetched in the order in which they lie, whatever the order of reading, and into the second
// level: the first can wait for few lines at a time. Two rows of w a kilobyte apart, each fetched for itself, came at
// half the speed.
constexpr int64_t kAhead = 6144;

// out[n] = x @ w[row + n] for M rows of x and so many rows of w, counted over all matrices; R of them at a time.
template <class F, int D, int M, int R>
__attribute__((noinline)) void dot_rows(const kern_quant& w, int64_t row, int64_t rows, const DigitRow* x) {
  using Q = Quads<F>;
  using Layout = Digits<F, D>;
  constexpr int words = Layout::words;
  constexpr int kTail = 2 * F::block_bytes;
  const int64_t bytes = row_bytes(w), blocks = (w.width + F::block - 1) / F::block, count = groups(w);
  const int64_t whole = least(blocks, most(0, (bytes - F::over) / F::block_bytes));
  const int64_t span = W * w.group / F::block;  // blocks that W scales are for
  const int type = w.mode == KERN_AFFINE ? w.scale_type : w.mode == KERN_MXFP4 ? kE8M0 : kE4M3;
  const int64_t scale_bytes = type == KERN_F32 ? 4 : type == KERN_F16 || type == KERN_BF16 ? 2 : 1;
  const int shift = __builtin_ctz(static_cast<unsigned>(w.group));
  vi lanes;
  for (int i = 0; i < W; i++) lanes[i] = i * F::per_lane;
  alignas(64) uint8_t tail[R][kTail + F::over];
  memset(tail, 0, sizeof tail);
  for (int64_t n = 0; n < rows; n += R) {
    const uint8_t* codes[R];
    int64_t first[R];  // group
    for (int r = 0; r < R; r++) {
      const int64_t at = row + least(n + r, rows - 1);
      codes[r] = static_cast<const uint8_t*>(w.codes) + at * bytes;
      first[r] = at * count;
      if (whole < blocks)
        memcpy(tail[r], codes[r] + whole * F::block_bytes,
               static_cast<size_t>(least(kTail, bytes - whole * F::block_bytes)));
    }
    vf total[M][R] = {};
    for (int64_t g = 0, b = 0; g < count; g += W) {
      vf scales[M][R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const vf scale = scales_at(w.scales, type, first[r] + g, count - g);
        const int64_t ahead = (first[r] + g + 8 * count) * scale_bytes;
        __builtin_prefetch(static_cast<const uint8_t*>(w.scales) + ahead);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) scales[m][r] = scale * load(x[m].factors + g);
        if (w.biases == nullptr) continue;
        const vf bias = scales_at(w.biases, type, first[r] + g, count - g);
        __builtin_prefetch(static_cast<const uint8_t*>(w.biases) + ahead);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) total[m][r] = bias * load(x[m].sums + g) + total[m][r];
      }
      vi at = lanes;
      for (const int64_t end = least(blocks, b + span); b < end; b++, at = at + F::block) {
        const vi lane = at >> shift;
        Words code[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const uint8_t* p = base(b < whole ? codes[r] + b * F::block_bytes : tail[r] + (b - whole) * F::block_bytes);
          code[r] = Q::load(p);
          __builtin_prefetch(codes[0] + (b * R + r) * F::block_bytes + kAhead, 0, 2);
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          const int32_t* digits = base(x[m].digits + b * words);
          vf product[R];
          if constexpr (Layout::together) {
            vi whole[R];
            add_digits<F, D, R, 0, D>(code, digits, whole);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) product[r] = to_floats(whole[r]);
          } else {
            vi high[R], low[R];
            add_digits<F, D, R, 0, 2>(code, digits, high);
            add_digits<F, D, R, 2, D>(code, digits, low);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
              product[r] = to_floats(high[r]) * static_cast<float>(1 << 8 * (D - 2)) + to_floats(low[r]);
          }
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) total[m][r] = product[r] * __builtin_shuffle(scales[m][r], lane) + total[m][r];
        }
      }
    }
    for (int r = 0; r < R && n + r < rows; r++)
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) x[m].out[n + r] = sum(total[m][r]);
  }
}

// The same for any number of rows of x. What is loaded of x serves two rows of w; with one digit and one row of x there
// is so little to do that memory is all that counts, and one row of w at a time is what it gives fastest.
template <class F, int D>
KERN_INLINE void dot_rows(const kern_quant& w, int64_t row, int64_t rows, const DigitRow* x, int64_t count) {
  for (; count >= 4; count -= 4, x += 4) dot_rows<F, D, 4, 2>(w, row, rows, x);
  if (count == 3) dot_rows<F, D, 3, 2>(w, row, rows, x);
  if (count == 2) dot_rows<F, D, 2, 2>(w, row, rows, x);
  if (count == 1) dot_rows<F, D, 1, D == 1 ? 1 : 2>(w, row, rows, x);
}

// -- the product -----------------------------------------------------------------------------------------------------

constexpr int64_t kFewDigits = 12;  // up to so many rows are faster than as floats

// Segments of up to `most_rows` rows; what has more is left to others.
template <class F, int D>
struct InDigits {
  using Layout = Digits<F, D>;
  static constexpr int64_t kMost = 16;  // that `most_rows` may be
  static_assert(kFewDigits <= kMost);

  const kern_quant_matmul_args& args;
  const int64_t most_rows;
  const kern_quant& w = args.w;
  int64_t blocks = (w.width + F::block - 1) / F::block;
  int64_t width = blocks * F::block;
  int64_t ld = most(blocks * Layout::words, width) + 16;  // of a prepared row: never a power of two
  int64_t group_count = groups(w);
  int64_t room = scale_room(group_count);
  int32_t* x = nullptr;      // [prepared, ld]: digits, or floats
  float* factors = nullptr;  // [prepared, room]; the first is Inf where there are floats
  float* sums = nullptr;     // [prepared, room]
  // Prepared are a block's slots. Where x has fewer rows, each of those once: then this is the row of each slot.
  const int64_t* row_of = nullptr;

  void prepare(const Slots& slots, int64_t first, int64_t slot_count) {
    const int64_t rows = args.blocks * args.rows, count = least(rows, slot_count);
    row_of = rows < slot_count ? slots.in + first : nullptr;
    x = static_cast<int32_t*>(scratch(SLOT_SHARED, static_cast<size_t>(count * (ld + 2 * room)) * sizeof(float)));
    factors = reinterpret_cast<float*>(x + count * ld);
    sums = factors + count * room;
    chunks(count, most(1, 16384 / width), [&](int64_t begin, int64_t end) {
      float* row = static_cast<float*>(scratch(SLOT_CHUNK, static_cast<size_t>(2 * width) * sizeof(float)));
      int32_t* numbers = reinterpret_cast<int32_t*>(row + width);
      memset(row + w.width, 0, static_cast<size_t>(width - w.width) * sizeof *row);
      memset(numbers + w.width, 0, static_cast<size_t>(width - w.width) * sizeof *numbers);
      for (int64_t i = begin; i < end; i++) {
        if (row_of == nullptr && slots.segments[slots.of[first + i]].count > most_rows) continue;
        read_row(args.x, args.x_type, (row_of != nullptr ? i : slots.in[first + i]) * w.width, w.width, row);
        float *factor = factors + i * room, *total = sums + i * room;
        bool counted = true;
        if constexpr (D == 1) {
          for (int64_t g = 0; g < group_count; g++)
            factor[g] = round_group(row + g * w.group, w.group, numbers + g * w.group, total + g);
          memset(total + group_count, 0, static_cast<size_t>(room - group_count) * sizeof(float));
        } else {
          counted = count_steps<D>(row, group_count, w.group, numbers, factor);
          if (w.mode == KERN_AFFINE || !counted) group_sums(row, group_count, w.group, room, total);
        }
        if (counted) {
          for (int64_t g = 0; F::unit != 1.0f && g < group_count; g++) factor[g] *= F::unit;
          memset(factor + group_count, 0, static_cast<size_t>(room - group_count) * sizeof(float));
          Layout::place(numbers, blocks, x + i * ld);
        } else {
          factor[0] = INFINITY;
          permute<F>(row, blocks, true, reinterpret_cast<float*>(x + i * ld));
        }
      }
    });
  }

  // c[m][n], kPanelN apart, for rows [n, n + columns) of the segment's matrix.
  void multiply(const Segment& s, int64_t slot, int64_t n, int64_t columns, float* c) const {
    DigitRow rows[kMost];
    int64_t count = 0;
    for (int64_t m = 0; m < s.count; m++) {
      const int64_t at = row_of != nullptr ? row_of[slot + m] : slot + m;
      const float *factor = factors + at * room, *total = sums + at * room;
      if (factor[0] == INFINITY)
        multiply_floats(s, reinterpret_cast<const float*>(x + at * ld), total, n, columns, c + m * kPanelN);
      else
        rows[count++] = {x + at * ld, factor, total, c + m * kPanelN};
    }
    dot_rows<F, D>(w, s.matrix * w.rows + n, columns, rows, count);
  }

  void multiply_floats(const Segment& s, const float* row, const float* total, int64_t n, int64_t columns,
                       float* out) const {
    float* scales = static_cast<float*>(scratch(SLOT_CHUNK, static_cast<size_t>(2 * room) * sizeof(float)));
    float* biases = w.mode == KERN_AFFINE ? scales + room : nullptr;
    for (int64_t i = 0; i < columns; i++) {
      read_scales(w, (s.matrix * w.rows + n + i) * group_count, group_count, F::unit, scales, biases);
      vf products{};
      dot_row<F, 1>(row_codes(w, s.matrix, n + i), row_bytes(w), blocks, 4096, w.group, scales, row, 0, &products);
      out[i] = finish(products, biases, total, group_count);
    }
  }

  void run(const Slots& slots) {
    const int64_t panels = (w.rows + kPanelN - 1) / kPanelN;
    each_slot_block(slots, [&](int64_t begin, int64_t end, int64_t first, int64_t count) {
      prepare(slots, first, count);
      chunks((end - begin) * panels, panel_step(w, kPanelN, 1), [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
          const Segment& s = slots.segments[begin + i / panels];
          if (s.count > most_rows) continue;
          const int64_t n = i % panels * kPanelN, columns = least(kPanelN, w.rows - n);
          float c[kMost * kPanelN];
          multiply(s, s.first - first, n, columns, c);
          for (int64_t m = 0; m < s.count; m++)
            write_row(c + m * kPanelN, columns, args.out, args.out_type, slots.out[s.first + m] * w.rows + n);
        }
      });
    });
  }
};

#else

template <class F>
constexpr bool has_digits = false;

#endif

}  // namespace kern::KERN_NS
