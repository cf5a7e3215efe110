// Rows of x as whole numbers, whose products with codes are integers.
//
// Each group of activations is counted in steps, and each whole number written as signed bytes: three keep what float32
// arithmetic keeps, one is what `fast` rounds to. What codes and bytes add up to is exact, and becomes a float once per
// lane and block. So less is rounded than by products and sums in float32, and fewer instructions do it than decode the
// codes to floats.
#pragma once
#include "quant_quads.h"
#include "quant_stream.h"

namespace kern::KERN_NS {

#if defined(KERN_AVX512)

template <class F>
constexpr bool has_digits = has_quads<F>;

// `groups` groups of x in steps of 2**-22 of their largest power of two, a few of 2**-21: words of three signed bytes,
// lowest first, and what they add up to, exactly until it is a float. `factors` are what a step is worth, far enough from
// the end of float32 that scales down to 2**-40 lose nothing by them. False where a group is not finite or far from 1:
// floats have to do it.
inline bool count_steps(const float* x, int64_t groups, int group, int32_t* words, float* factors, float* sums) {
  constexpr int kFar = 64, kBits = 22;
  constexpr float kLargest = 0x7f7f7f;     // whose bytes are all 127
  constexpr int32_t kHalves = 0x00008080;  // of all bytes but the highest
  for (int64_t g = 0; g < groups; g++, x += group, words += group) {
    vf high{}, poison{};
    for (int k = 0; k < group; k += W) {
      const vf v = load(x + k);
      high = vmax(vabs(v), high);
      poison = poison + v * 0.0f;
    }
    const float peak = largest(high);
    int exponent = static_cast<int>(bit_cast<uint32_t>(peak) >> 23) - 127;
    if (sum(poison) != 0.0f || (peak != 0.0f && (exponent < -kFar || exponent >= kFar))) return false;
    if (peak != 0.0f && peak > kLargest * power_of_two(exponent - kBits)) exponent++;
    factors[g] = peak != 0.0f ? power_of_two(exponent - kBits) : 0.0f;
    const float inverse = peak != 0.0f ? power_of_two(kBits - exponent) : 0.0f;
    vi total{};
    for (int k = 0; k < group; k += W) {
      const vi number = (vi)_mm512_cvtps_epi32((__m512)(load(x + k) * inverse));
      total = total + number;
      const vi bytes = (number + kHalves) ^ kHalves;
      memcpy(words + k, &bytes, sizeof bytes);
    }
    sums[g] = factors[g] * static_cast<float>(_mm512_reduce_add_epi32((__m512i)total));
  }
  return true;
}

// A row of x as `D` bytes per number, one or three, the highest first: [block][digit][quad][lane][4]. For formats whose
// codes have an offset [digit][lane] follows in each block: what takes it off.
template <class F, int D>
struct Digits {
  using Q = Quads<F>;
  static constexpr int quads = D * Q::count * W;  // words
  static constexpr int words = quads + (Q::offset != 0 ? D * W : 0);
  // Whether the products of a lane with all digits fit an int32, not only those with two.
  static constexpr bool fits = D == 1 || F::per_lane * ((1 << F::bits) - 1) < 256;

  using Format = F;
  using Code = Words;
  static constexpr bool counted = true;
  // One digit is so little to do that memory is all that counts: a row of w at a time is what it gives fastest.
  static constexpr int alone = D == 1 ? 1 : 2;
  static KERN_INLINE Words load(const uint8_t* p) { return Q::load(p); }

  static constexpr int digits = D, vectors = Q::count;
  static constexpr float bias = -Q::offset * F::unit;
  static constexpr bool late = 32 % F::bits == 0;
  static KERN_INLINE Words words_of(const uint8_t* p) { return Q::load(p); }
  static KERN_INLINE vi vector(Words w, int v) { return Q::quad(w, v); }

  // Products of W rows of w with M rows of x: of a group, digit by digit.
  template <int M>
  struct Sums {
    vi of[D][M] = {};

    // Those of a vector, with words of x [digit][vector][M] from this vector on.
    KERN_INLINE void add(vi codes, int, const int32_t* x) {
#pragma GCC unroll 4
      for (int d = 0; d < D; d++)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          of[d][m] = add_products(of[d][m], codes, splat_int(x[d * Q::count * M + m]));
          keep(of[d][m]);
        }
    }
    KERN_INLINE void finish(vf* product) const {
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        product[m] = to_floats(D == 1 ? of[0][m] : (of[0][m] << 8) + of[D > 1][m]);
        if constexpr (D == 3) product[m] = add_product(product[m], splat(256.0f), to_floats(of[2][m]));
      }
    }
  };

  template <int R>
  static KERN_INLINE void multiply(const Words* code, const int32_t* digits, vf* product) {
    if constexpr (fits) {
      vi whole[R];
      add<R, 0, D>(code, digits, whole);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) product[r] = to_floats(whole[r]);
    } else {
      vi high[R], low[R];
      add<R, 0, 2>(code, digits, high);
      add<R, 2, D>(code, digits, low);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
        product[r] = to_floats(high[r]) * static_cast<float>(1 << 8 * (D - 2)) + to_floats(low[r]);
    }
  }

  // `numbers` has room for a row, and zeros behind it.
  static bool take(const kern_quant& w, const float* row, int64_t group_count, int64_t blocks, int32_t* numbers,
                   int32_t* out, float* factors, float* sums) {
    if constexpr (D == 1) {
      for (int64_t g = 0; g < group_count; g++)
        factors[g] = round_group(row + g * w.group, w.group, numbers + g * w.group, sums + g);
    } else if (!count_steps(row, group_count, w.group, numbers, factors, sums)) {
      return false;
    }
    for (int64_t g = 0; F::unit != 1.0f && g < group_count; g++) factors[g] *= F::unit;
    place(numbers, blocks, out);
    return true;
  }

  // A block's codes of R rows of w times digits [FIRST, LAST) of x, lane by lane.
  template <int R, int FIRST, int LAST>
  static KERN_INLINE void add(const Words* code, const int32_t* digits, vi* sum) {
#pragma GCC unroll 4
    for (int d = FIRST; d < LAST; d++) {
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        if (d == FIRST)
          sum[r] = Q::offset != 0 ? load_words(digits + quads + d * W) : vi{};
        else
          sum[r] = Q::offset != 0 ? (sum[r] << 8) + load_words(digits + quads + d * W) : sum[r] << 8;
      }
#pragma GCC unroll 4
      for (int q = 0; q < Q::count; q++) {
        const vi four = load_words(digits + (d * Q::count + q) * W);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sum[r] = add_products(sum[r], Q::quad(code[r], q), four);
      }
    }
  }

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

#else

template <class F>
constexpr bool has_digits = false;

#endif

}  // namespace kern::KERN_NS
