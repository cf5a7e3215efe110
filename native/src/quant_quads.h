// Codes as unsigned bytes, four in a lane: what integer products multiply.
#pragma once
#include "quant_format.h"

#if defined(KERN_AVX512) || defined(KERN_AVX2)

namespace kern::KERN_NS {

// Sums of products of 4 unsigned and 4 signed bytes per lane. `sum` is what add() returns, 0 at first; total() makes of
// it one number per lane. Without VNNI the sums are pairs of int16: no more than `F::most_adds` add() in between.
#if defined(KERN_AVX512)
KERN_INLINE vi add_products(vi sum, vi codes, vi x) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
}
KERN_INLINE vi total_products(vi sum) { return sum; }
#else
KERN_INLINE vi add_products(vi sum, vi codes, vi x) {
  return (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)codes, (__m256i)x));
}
KERN_INLINE vi total_products(vi sum) { return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
#endif

// A block as unsigned bytes: `quads` vectors, each lane 4 codes. value = (code - offset) * unit.
template <class F>
struct Quads;

template <int BITS>
struct Quads<Affine<BITS>> {
  using F = Affine<BITS>;
  static constexpr int count = F::per_lane / 4;
  static constexpr int most_adds = 8;  // 8 * 2 * 15 * 127 < 2**15
  static constexpr int offset = 0;
  static KERN_INLINE vi quad(Words w, int q) {
    if constexpr (BITS == 8) return w.low;
    if constexpr (BITS == 4) return (vi)((vu)w.low >> (4 * q)) & 0x0f0f0f0f;
    return F::code(w, 4 * q) | F::code(w, 4 * q + 1) << 8 | F::code(w, 4 * q + 2) << 16 | F::code(w, 4 * q + 3) << 24;
  }
  static KERN_INLINE Words load(const uint8_t* p) { return F::load(p); }
  // Which element of a lane is byte t of its quad q.
  static constexpr int element(int q, int t) { return BITS == 4 ? 2 * t + q : 4 * q + t; }
};

template <>
struct Quads<Fp4> {
  static constexpr int count = 2;
  static constexpr int most_adds = 4;  // 4 * 2 * 24 * 127 < 2**15
  static constexpr int offset = 12;
  static KERN_INLINE Words load(const uint8_t* p) { return Affine<4>::load(p); }
  static KERN_INLINE vi quad(Words w, int q) {
    const __m128i values = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return look_up_bytes(values, (vi)((vu)w.low >> (4 * q)) & 0x0f0f0f0f);
  }
  static constexpr int element(int q, int t) { return 2 * t + q; }
};

template <class F>
constexpr bool has_quads = F::bits <= 4 || W == 16;
template <>
constexpr bool has_quads<Fp8> = false;

// Rounds a group to whole numbers of at most 127. Returns the step; NaN where an element is not finite.
inline float round_group(const float* x, int count, int32_t* out, float* total) {
  constexpr float limit = 127.0f;
  vf high{}, poison{};
  for (int k = 0; k < count; k += W) {
    const vf v = load(x + k);
    high = vmax(vabs(v), high);
    poison = poison + v * 0.0f;
  }
  const float peak = largest(high), bad = sum(poison);
  const float inverse = peak > 1e-30f ? limit / peak : 0.0f;
  vi sums{};
  for (int k = 0; k < count; k += W) {
    const vi q = (vi)(load(x + k) * inverse + 12582912.0f) - 0x4b400000;
    memcpy(out + k, &q, sizeof q);
    sums = sums + q;
  }
  const float step = (peak > 1e-30f ? peak / limit : 0.0f) + bad;
  *total = step * sum(to_floats(sums));
  return step;
}

}  // namespace kern::KERN_NS

#endif
