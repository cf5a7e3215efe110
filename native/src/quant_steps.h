// Codes as bfloat16, a step of K at a time: what tile registers multiply.
#pragma once
#include <type_traits>

#include "quant_format.h"

#if defined(KERN_AVX512)

namespace kern::KERN_NS {

constexpr int kStep = 32;  // elements of K that one product of tiles adds up, in pairs

// -- codes -----------------------------------------------------------------------------------------------------------

// A step of a row of w, F::bits words at p: load(p) is 32 bfloat16 in units of F::unit, place i that of element(i).
template <class F>
struct Step;

// What the codes of `BITS` bits mean; what is above those bits in an index means nothing.
template <int BITS>
struct Meaning {
  alignas(64) uint16_t of[64];
  template <class Value>
  explicit constexpr Meaning(const Value& value) : of{} {
    for (int i = 0; i < 64; i++)
      of[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value(i & ((1 << BITS) - 1))) >> 16);
  }
  KERN_INLINE __m512i operator()(__m512i codes) const {
    const __m512i low = _mm512_load_si512(of);
    if constexpr (BITS <= 5) return _mm512_permutexvar_epi16(codes, low);
    return _mm512_permutex2var_epi16(low, codes, _mm512_load_si512(of + 32));
  }
};

// A constant for each place.
template <class Of>
struct Places {
  alignas(64) uint16_t of[32];
  explicit constexpr Places(const Of& value) : of{} {
    for (int i = 0; i < 32; i++) of[i] = static_cast<uint16_t>(value(i));
  }
  KERN_INLINE operator __m512i() const { return _mm512_load_si512(of); }
};

// Codes of which a half word has a whole number: copies of the step, each shifted further.
template <int BITS>
struct Copies {
  static constexpr int copies = 16 / BITS, halves = 2 * BITS;
  static constexpr int element(int place) { return place % halves * copies + place / halves; }
  static constexpr Places shifts{[](int place) { return place / halves * BITS; }};

  static KERN_INLINE __m512i codes(const uint8_t* p) {
    if constexpr (BITS == 4)
      return _mm512_srlv_epi16(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), shifts);
    int64_t step;
    memcpy(&step, p, sizeof step);
    return _mm512_srlv_epi16(_mm512_set1_epi64(step), shifts);
  }
};

// Others: two of them from the half words where they lie.
template <int BITS>
struct InTurn {
  static constexpr int element(int place) { return place; }
  static constexpr int bit(int place) { return place / 2 * 2 * BITS; }
  static constexpr Places words{[](int place) { return bit(place) / 16 + place % 2; }};
  static constexpr Places shifts{[](int place) { return place % 2 == 0 ? bit(place) % 16 : 0; }};

  static KERN_INLINE __m512i codes(const uint8_t* p) {
    const __m256i step = _mm256_maskz_loadu_epi32(static_cast<__mmask8>((1 << BITS) - 1), p);
    const __m512i pairs = _mm512_srlv_epi32(_mm512_permutexvar_epi16(words, _mm512_castsi256_si512(step)), shifts);
    return _mm512_ternarylogic_epi32(pairs, _mm512_slli_epi32(pairs, 16 - BITS), _mm512_set1_epi32(0xffff), 0xe4);
  }
};

constexpr float as_it_is(int code) { return static_cast<float>(code); }

template <int BITS>
struct Step<Affine<BITS>> : std::conditional_t<16 % BITS == 0, Copies<BITS>, InTurn<BITS>> {
  static constexpr Meaning<BITS> meaning{as_it_is};
  static KERN_INLINE __m512i load(const uint8_t* p) { return meaning(Step::codes(p)); }
};

// Two vectors of floats that are bfloat16, one behind the other.
KERN_INLINE __m512i as_bf16(vf low, vf high) {
  static constexpr Places upper{[](int place) { return 2 * place + 1; }};
  return _mm512_permutex2var_epi16((__m512i)low, upper, (__m512i)high);
}

template <>
struct Step<Affine<8>> : InTurn<8> {
  static KERN_INLINE __m512i load(const uint8_t* p) {
    const auto half = [](const uint8_t* q) __attribute__((always_inline)) {
      return to_floats((vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))));
    };
    return as_bf16(half(p), half(p + W));
  }
};

template <>
struct Step<Fp8> : InTurn<8> {
  static KERN_INLINE __m512i load(const uint8_t* p) { return as_bf16(Fp8::value({p}, 0), Fp8::value({p}, 1)); }
};

constexpr float fp4_value(int code) {
  constexpr float values[16] = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
  return values[code];
}

template <>
struct Step<Fp4> : Copies<4> {
  static constexpr Meaning<4> meaning{fp4_value};
  static KERN_INLINE __m512i load(const uint8_t* p) { return meaning(codes(p)); }
};

// -- bands of w ------------------------------------------------------------------------------------------------------

constexpr int64_t kBand = 64;           // rows of w: four tiles of sums, for each product waits for the one before
constexpr int64_t kStrips = kBand / W;  // of 16 rows
constexpr int64_t kBandSteps = 4;       // that are decoded at a time
constexpr int64_t kBandDepth = kBandSteps * kStep;
constexpr int64_t kTileBytes = 16 * 64;
constexpr int64_t kStepBytes = kStrips * kTileBytes;
constexpr int64_t kDecoded = kBandSteps * kStepBytes;

// Up to 64 rows of w from an element on: so many steps of them. Decoded they are [step][row][place].
struct Band {
  const uint8_t* codes;
  int64_t row_bytes, rows, steps;
};

// Decoding in small jobs that can be done beside something else. A row's codes are fetched all at once: rows are often
// a power of two bytes apart, and the first-level cache holds few such lines at a time.
template <class F>
struct Decoder {
  static constexpr int64_t kRowBytes = round_up(kBandSteps * F::bits * 4, 64);
  static constexpr int64_t kFetched = kBand * kRowBytes;

  // Rows [first, first + 4). `out` is [64][kRowBytes].
  static KERN_INLINE void fetch(const Band& band, int64_t first, uint8_t* out) {
    const int64_t words = band.steps * F::bits, last = least(first + 4, band.rows);
    const uint8_t* from = band.codes + first * band.row_bytes;
    for (int64_t r = first; r < last; r++, from += band.row_bytes)
#pragma GCC unroll 2
      for (int64_t i = 0; i < kRowBytes / 4; i += W) {
        const auto some = static_cast<__mmask16>(_bzhi_u32(0xffff, static_cast<uint32_t>(most(0, words - i))));
        _mm512_store_si512(out + r * kRowBytes + i * 4, _mm512_maskz_loadu_epi32(some, from + i * 4));
      }
  }
  static KERN_INLINE void prefetch(const Band& band, int64_t first) {
    if (band.rows == 0) return;
    const uint8_t* from = band.codes + first * band.row_bytes;
#pragma GCC unroll 4
    for (int64_t r = 0; r < 4; r++, from += band.row_bytes)
#pragma GCC unroll 2
      for (int64_t i = 0; i < kRowBytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  }

  static KERN_INLINE void decode(const uint8_t* fetched, int64_t step, int64_t strip, uint8_t* out) {
    const uint8_t* from = fetched + strip * W * kRowBytes + step * F::bits * 4;
    uint8_t* to = out + step * kStepBytes + strip * kTileBytes;
#pragma GCC unroll 16
    for (int r = 0; r < W; r++) _mm512_store_si512(to + r * 64, Step<F>::load(from + r * kRowBytes));
  }

  static __attribute__((noinline)) void fetch_all(const Band& band, uint8_t* out) {
    for (int64_t first = 0; first < kBand; first += 4) fetch(band, first, out);
  }
  static __attribute__((noinline)) void decode_all(const Band& band, const uint8_t* fetched, uint8_t* out) {
    for (int64_t step = 0; step < band.steps; step++)
      for (int64_t strip = 0; strip < kStrips; strip++) decode(fetched, step, strip, out);
  }
};

}  // namespace kern::KERN_NS

#endif
