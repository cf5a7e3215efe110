// Rows of bfloat16 as they are, for processors that multiply pairs of them (AVX-512 BF16).
//
// A code has at most 8 significant bits, so it is a bfloat16; its product with another is exact, and pairs of products
// add up in float32. Nothing of x is lost, and 32 products take one instruction where floats take two. What this cannot
// do is numbers below 2**-126, which the processor takes for zero.
#pragma once
#include "quant_steps.h"
#include "quant_stream.h"

#if defined(KERN_AVX512)

namespace kern {

extern const bool has_pairs;  // the processor multiplies pairs of bfloat16, and nobody asked for less

}  // namespace kern

namespace kern::KERN_NS {

KERN_INLINE vf add_pairs(vf sum, __m512i a, __m512i b) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

// -- codes -----------------------------------------------------------------------------------------------------------

// A block as `count` vectors of pairs of bfloat16, each lane with two of its elements, in units of F::unit. They are
// made, lane by lane, of what words() loads.
template <class F>
struct PairCodes;

// Codes of which a half word has a whole number lie where they are looked up; others are put there.
template <int BITS>
struct PairCodes<Affine<BITS>> {
  using F = Affine<BITS>;
  static constexpr int count = F::per_lane / 2;
  static constexpr bool halves = 16 % BITS == 0 && BITS < 8;
  static constexpr Meaning<BITS> meaning{as_it_is};
  // Which element of a lane is half `h` of its pair in vector `v`.
  static constexpr int element(int v, int h) { return halves ? v + h * count : 2 * v + h; }

  static KERN_INLINE Words words(const uint8_t* p) { return F::load(p); }
  static KERN_INLINE __m512i vector(Words w, int v) {
    if constexpr (halves) return meaning(_mm512_srli_epi16((__m512i)w.low, static_cast<unsigned>(v * BITS)));
    if constexpr (BITS == 8)  // the lower half of such a float is zero
      return (__m512i)((vi)((vu)to_floats(F::code(w, 2 * v)) >> 16) | (vi)to_floats(F::code(w, 2 * v + 1)));
    return meaning((__m512i)(F::code(w, 2 * v) | F::code(w, 2 * v + 1) << 16));
  }
};

template <>
struct PairCodes<Fp4> {
  static constexpr int count = 4;
  static constexpr Meaning<4> meaning{fp4_value};
  static constexpr int element(int v, int h) { return v + h * count; }

  static KERN_INLINE Words words(const uint8_t* p) { return Affine<4>::load(p); }
  static KERN_INLINE __m512i vector(Words w, int v) {
    return meaning(_mm512_srli_epi16((__m512i)w.low, static_cast<unsigned>(4 * v)));
  }
};

template <>
struct PairCodes<Fp8> {
  static constexpr int count = 1;
  static constexpr int element(int, int h) { return h; }

  static KERN_INLINE Words words(const uint8_t* p) { return {(vi)Step<Fp8>::load(p), vi{}}; }
  static KERN_INLINE __m512i vector(Words w, int) { return (__m512i)w.low; }
};

// -- few rows --------------------------------------------------------------------------------------------------------

// A row of x: [block][vector][lane][2].
template <class F>
struct Pairs {
  using Format = F;
  using Codes = PairCodes<F>;
  struct Code {
    __m512i of[Codes::count];
  };
  static constexpr int words = Codes::count * W, alone = 2;
  static constexpr bool counted = false;

  static KERN_INLINE Code load(const uint8_t* p) {
    const Words words = Codes::words(p);
    Code code;
#pragma GCC unroll 8
    for (int v = 0; v < Codes::count; v++) code.of[v] = Codes::vector(words, v);
    return code;
  }

  static constexpr int digits = 1, vectors = Codes::count;
  static constexpr float bias = 0.0f;
  static constexpr bool late = F::bits != 5;  // whose blocks are two vectors of words
  static KERN_INLINE Words words_of(const uint8_t* p) { return Codes::words(p); }
  static KERN_INLINE vi vector(Words w, int v) { return (vi)Codes::vector(w, v); }

  // Products of W rows of w with M rows of x.
  template <int M>
  struct Sums {
    static constexpr int parts = Codes::count > 1 ? 2 : 1;  // that need not wait for each other
    vf of[parts][M] = {};

    KERN_INLINE void add(vi codes, int v, const int32_t* x) {
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        vf& part = of[v % parts][m];
        part = add_pairs(part, (__m512i)codes, (__m512i)splat_int(x[m]));
        asm("" : "+v"(part));
      }
    }
    KERN_INLINE void finish(vf* product) const {
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) product[m] = parts == 1 ? of[0][m] : of[0][m] + of[parts - 1][m];
    }
  };

  template <int R>
  static KERN_INLINE void multiply(const Code* code, const int32_t* x, vf* product) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) product[r] = vf{};
#pragma GCC unroll 8
    for (int v = 0; v < Codes::count; v++) {
      const __m512i pairs = _mm512_loadu_si512(x + v * W);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) product[r] = add_pairs(product[r], code[r].of[v], pairs);
    }
  }

  // `numbers` has room for a row, and zeros behind it.
  static bool take(const kern_quant& w, const float* row, int64_t group_count, int64_t blocks, int32_t* numbers,
                   int32_t* out, float*, float* sums) {
    // [lane][vector][2], for as many lanes as two vectors of floats have
    static constexpr Places order{[](int place) {
      return place / F::per_lane * F::per_lane + Codes::element(place % F::per_lane / 2, place % 2);
    }};
    for (int64_t i = 0; i < blocks * F::block; i += 2 * W, numbers += W) {
      const __m512i some = as_bf16(kern::KERN_NS::load(row + i), kern::KERN_NS::load(row + i + W));
      _mm512_storeu_si512(numbers, _mm512_permutexvar_epi16(order, some));
    }
    numbers -= blocks * words;
    for (int64_t b = 0; b < blocks; b++, numbers += words, out += words)
      for (int lane = 0; lane < W; lane++)
        for (int v = 0; v < Codes::count; v++) out[v * W + lane] = numbers[lane * Codes::count + v];
    if (w.mode == KERN_AFFINE) group_sums(row, group_count, w.group, group_count, sums);
    return true;
  }
};

}  // namespace kern::KERN_NS

#endif
