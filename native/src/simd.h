// Vectors of this object's instruction set. Every kernel source is compiled once per set, into a namespace of its own:
// what is inline here must not be shared between objects that were compiled for different processors.
//
// One vector is `W` floats: 16 (AVX-512), 8 (AVX2), 4 (NEON and scalar; "scalar" is what the compiler makes of plain
// vectors with nothing but the baseline). Arithmetic uses the compiler's vector operators; a * b + c is fused
// (-ffp-contract=fast), NaN and Inf are respected (no -ffast-math).
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kern/base.h"
#include "pool.h"

#if defined(KERN_AVX512)
#include <immintrin.h>
#define KERN_NS avx512
#define KERN_W 16
#elif defined(KERN_AVX2)
#include <immintrin.h>
#define KERN_NS avx2
#define KERN_W 8
#elif defined(KERN_NEON)
#include <arm_neon.h>
#define KERN_NS neon
#define KERN_W 4
#else
#define KERN_NS scalar
#define KERN_W 4
#endif

#define KERN_INLINE inline __attribute__((always_inline))

namespace kern::KERN_NS {

constexpr int W = KERN_W;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

// -- one element -----------------------------------------------------------------------------------------------------

template <class To, class From>
KERN_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

KERN_INLINE float to_float(float v) { return v; }
KERN_INLINE float to_float(bf16 v) { return bit_cast<float>(static_cast<uint32_t>(v.bits) << 16); }
KERN_INLINE float to_float(f16 v) {
#if defined(KERN_AVX512) || defined(KERN_AVX2)
  return _cvtsh_ss(v.bits);
#elif defined(KERN_NEON)
  return static_cast<float>(bit_cast<__fp16>(v.bits));
#else
  uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000u) << 16, rest = v.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);  // Inf, NaN
  if (rest >= 0x400u) return bit_cast<float>(sign | ((rest << 13) + 0x38000000u));
  float small = static_cast<float>(rest) * 0x1p-24f;  // zero, subnormal
  return bit_cast<float>(sign | bit_cast<uint32_t>(small));
#endif
}

template <class T>
KERN_INLINE T from_float(float v);
template <>
KERN_INLINE float from_float<float>(float v) {
  return v;
}
template <>
KERN_INLINE bf16 from_float<bf16>(float v) {
  uint32_t u = bit_cast<uint32_t>(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};  // NaN stays one
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
template <>
KERN_INLINE f16 from_float<f16>(float v) {
#if defined(KERN_AVX512) || defined(KERN_AVX2)
  return {static_cast<uint16_t>(_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT))};
#elif defined(KERN_NEON)
  return {bit_cast<uint16_t>(static_cast<__fp16>(v))};
#else
  uint32_t u = bit_cast<uint32_t>(v), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
  if (rest > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};   // NaN
  if (rest >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to Inf
  if (rest < 0x38800000u) {                                                 // subnormal: let the adder round
    float shifted = bit_cast<float>(rest) + 0.5f;
    return {static_cast<uint16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  return {static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13))};
#endif
}

// -- vectors ---------------------------------------------------------------------------------------------------------

KERN_INLINE vf splat(float v) { return v - vf{}; }
KERN_INLINE vi splat_int(int32_t v) { return v - vi{}; }

KERN_INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
KERN_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

KERN_INLINE vf load(const bf16* p) {
#if defined(KERN_AVX512)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(KERN_AVX2)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
  return v;
#endif
}
KERN_INLINE vf load(const f16* p) {
#if defined(KERN_AVX512)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(KERN_AVX2)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(KERN_NEON)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
  return v;
#endif
}
KERN_INLINE void store(bf16* p, vf v) {
  typedef uint16_t half __attribute__((vector_size(W * 2)));
  vu u = (vu)v;
  vu rounded = u + 0x7fffu + ((u >> 16) & 1u);
  half h = __builtin_convertvector((v == v ? rounded : (u | 0x400000u)) >> 16, half);
  memcpy(p, &h, sizeof h);
}
KERN_INLINE void store(f16* p, vf v) {
#if defined(KERN_AVX512)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(KERN_AVX2)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(KERN_NEON)
  vst1_u16((uint16_t*)p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
  for (int i = 0; i < W; i++) p[i] = from_float<f16>(v[i]);
#endif
}

// The first n < W elements; the rest of the vector is `fill`. Never touches memory beyond them.
template <class T>
KERN_INLINE vf load_some(const T* p, int n, float fill = 0.0f) {
  vf v = splat(fill);
  for (int i = 0; i < n; i++) v[i] = to_float(p[i]);
  return v;
}
template <class T>
KERN_INLINE void store_some(T* p, vf v, int n) {
  for (int i = 0; i < n; i++) p[i] = from_float<T>(v[i]);
}

KERN_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }  // b where one is NaN
KERN_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
KERN_INLINE vf vabs(vf v) { return (vf)((vi)v & splat_int(0x7fffffff)); }

KERN_INLINE float sum(vf v) {
#if KERN_W == 16
  typedef float half __attribute__((vector_size(32)));
  half h = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#elif KERN_W == 8
  vf h = v;
#endif
#if KERN_W >= 8
  typedef float quarter __attribute__((vector_size(16)));
  quarter q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
#else
  vf q = v;
#endif
  return (q[0] + q[2]) + (q[1] + q[3]);
}
KERN_INLINE float largest(vf v) {
  float m = v[0];
  for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// e ** v to about 2 units in the last place; 0 below -104, Inf above 88.8, NaN stays NaN.
KERN_INLINE vf vexp(vf v) {
  vf x = v < splat(-104.0f) ? splat(-104.0f) : v;
  x = x > splat(89.0f) ? splat(89.0f) : x;
  vf n = x * 1.44269504088896341f + 12582912.0f;  // rounds to an integer in the low bits
  vi k = (vi)n - 0x4b400000;
  n = n - 12582912.0f;
  vf r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  vi high = k >> 1, low = k - high;  // 2**k in two factors: k reaches -151 and 129
  vf scaled = p * (vf)((high + 127) << 23) * (vf)((low + 127) << 23);
  return v == v ? scaled : v;
}
KERN_INLINE float exp1(float v) { return vexp(splat(v))[0]; }

// -- running in parallel ---------------------------------------------------------------------------------------------

// Calls body(first, last) on pieces of at most `step` of [0, count), on any thread of the pool.
template <class Body>
KERN_INLINE void chunks(int64_t count, int64_t step, const Body& body) {
  run_chunks(
      count, step,
      [](void* context, int64_t first, int64_t last) { (*static_cast<const Body*>(context))(first, last); },
      const_cast<Body*>(&body));
}

KERN_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
KERN_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Calls body(Of<T>()) with the element type that a `kern_type` names.
template <class T>
struct Of {
  using type = T;
};
template <class Body>
KERN_INLINE int with_type(int type, const Body& body) {
  switch (type) {
    case KERN_F32: return body(Of<float>());
    case KERN_F16: return body(Of<f16>());
    case KERN_BF16: return body(Of<bf16>());
    default: return KERN_UNSUPPORTED;
  }
}

}  // namespace kern::KERN_NS
