// Quantised formats: from the codes of a row to vectors of floats.
//
// A row is decoded in blocks of W lanes. Lane i holds `per_lane` consecutive elements, so that shifting the block by j
// codes gives element j of every lane. The codes are not shuffled into natural order. Instead the activations, or the
// writer of decoded rows, are permuted once.
#pragma once
#include "kern/quant.h"
#include "simd.h"

namespace kern::KERN_NS {

#if defined(KERN_AVX512) || defined(KERN_AVX2)
// W / 4 pieces of 16 bytes, `step` bytes apart.
KERN_INLINE vi load_pieces(const uint8_t* p, int step) {
  auto piece = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * step)); };
  __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(piece(0)), piece(1), 1);
#if defined(KERN_AVX512)
  __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(piece(2)), piece(3), 1);
  return (vi)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#else
  return (vi)low;
#endif
}
// Within each 16 bytes, as pshufb: index -1 gives 0.
KERN_INLINE vi shuffle_bytes(vi v, __m128i indices) {
#if defined(KERN_AVX512)
  return (vi)_mm512_shuffle_epi8((__m512i)v, _mm512_broadcast_i32x4(indices));
#else
  return (vi)_mm256_shuffle_epi8((__m256i)v, _mm256_broadcastsi128_si256(indices));
#endif
}
KERN_INLINE vi look_up_bytes(__m128i table, vi indices) {
#if defined(KERN_AVX512)
  return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)indices);
#else
  return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)indices);
#endif
}
#endif

// Lane i: the 4 bytes at p + STEP * i. May read 4 bytes behind p + STEP * W.
template <int STEP>
KERN_INLINE vi load_lanes(const uint8_t* p) {
  vi v;
  if constexpr (STEP == 4) {
    memcpy(&v, p, sizeof v);
    return v;
  }
#if defined(KERN_AVX512) || defined(KERN_AVX2)
  if constexpr (STEP == 3)
    return shuffle_bytes(load_pieces(p, 12), _mm_setr_epi8(0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11, 12));
  if constexpr (STEP == 5)  // a fourth lane of 5 bytes reaches beyond 16: it comes from 4 bytes further on
    return shuffle_bytes(load_pieces(p, 20), _mm_setr_epi8(0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, -1, -1, -1, -1)) |
           shuffle_bytes(load_pieces(p + 4, 20), _mm_setr_epi32(-1, -1, -1, 0x0e0d0c0b));
#endif
  for (int i = 0; i < W; i++) {
    int32_t lane;
    memcpy(&lane, p + STEP * i, sizeof lane);
    v[i] = lane;
  }
  return v;
}

// Makes the compiler address from this pointer. It would otherwise compute further addresses and spill registers.
template <class T>
KERN_INLINE const T* base(const T* p) {
  asm("" : "+r"(p));
  return p;
}

// A value that stays in a register: the compiler would otherwise fold a load into every use, or keep sums in memory.
KERN_INLINE void keep(vi& v) {
#if defined(KERN_AVX512) || defined(KERN_AVX2)
  asm("" : "+v"(v));
#elif defined(KERN_NEON)
  asm("" : "+w"(v));
#else
  (void)v;
#endif
}

KERN_INLINE vf to_floats(vi v) { return __builtin_convertvector(v, vf); }

struct Words {
  vi low, high;
};

// What a format offers, W lanes at a time:
//   load(p)          the codes of one block; may read `over` bytes behind it
//   in_place(w, j)   element j of each lane, times 2**exponent(j): cheaper, for activations scaled by 2**-exponent(j)
//   value(w, j)      element j of each lane
// Both are in units of `unit`, which goes into the scale.
template <int BITS>
struct Affine {
  static constexpr int bits = BITS;
  static constexpr int lane_bytes = BITS == 3 || BITS == 6 ? 3 : BITS == 5 ? 5 : 4;
  static constexpr int per_lane = lane_bytes * 8 / BITS;
  static constexpr int block = per_lane * W;
  static constexpr int block_bytes = lane_bytes * W;
  static constexpr int over = lane_bytes == 4 ? 0 : 4;
  static constexpr float unit = 1.0f;
  static constexpr int32_t mask = (1 << BITS) - 1;

  static constexpr int offset(int j) { return BITS == 5 && j >= 6 ? 5 * j - 8 : BITS * j; }
  static constexpr bool last(int j) { return offset(j) + BITS == 32; }

  static KERN_INLINE Words load(const uint8_t* p) {
    vi low = load_lanes<lane_bytes>(p), high{};
    if constexpr (BITS == 5) high = load_lanes<lane_bytes>(p + 1);  // elements 6 and 7: bits 30 to 39
    keep(low);
    return {low, high};
  }
  static KERN_INLINE vi code(Words w, int j) {
    vi word = BITS == 5 && j >= 6 ? w.high : w.low;
    vi moved = (vi)((vu)word >> offset(j));
    return last(j) ? moved : moved & mask;
  }
#if defined(KERN_AVX512)
  static constexpr bool table = BITS == 4;  // a permutation of 16 floats looks at the lowest 4 bits only
#else
  static constexpr bool table = false;
#endif
  static constexpr int exponent(int j) { return table || last(j) ? 0 : offset(j); }
  static KERN_INLINE vf in_place(Words w, int j) {
#if defined(KERN_AVX512)
    if constexpr (table)
      return (vf)_mm512_permutexvar_ps((__m512i)((vu)w.low >> offset(j)),
                                       _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
#endif
    if (last(j)) return to_floats(code(w, j));
    return to_floats((BITS == 5 && j >= 6 ? w.high : w.low) & static_cast<int32_t>(mask << offset(j)));
  }
  static KERN_INLINE vf value(Words w, int j) {
    if constexpr (table) return in_place(w, j);
    return to_floats(code(w, j));
  }
};

// E2M1, in units of 0.5: every value is a small integer.
struct Fp4 {
  static constexpr int bits = 4, lane_bytes = 4, per_lane = 8, block = 8 * W, block_bytes = 4 * W, over = 0;
  static constexpr float unit = 0.5f;

#if defined(KERN_AVX512)
  static constexpr int exponent(int) { return 0; }
  static KERN_INLINE Words load(const uint8_t* p) {
    vi codes = load_lanes<4>(p);
    keep(codes);
    return {codes, vi{}};
  }
  static KERN_INLINE vf value(Words w, int j) {
    return (vf)_mm512_permutexvar_ps((__m512i)((vu)w.low >> (4 * j)),
                                     _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12));
  }
  static KERN_INLINE vf in_place(Words w, int j) { return value(w, j); }
#elif defined(KERN_AVX2)
  // Signed bytes: of the even elements in `low`, of the odd ones in `high`.
  static constexpr int exponent(int) { return 24; }
  static KERN_INLINE Words load(const uint8_t* p) {
    const __m128i values = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    vi v = load_lanes<4>(p);
    vi low = look_up_bytes(values, v & 0x0f0f0f0f), high = look_up_bytes(values, (vi)((vu)v >> 4) & 0x0f0f0f0f);
    keep(low);
    keep(high);
    return {low, high};
  }
  static KERN_INLINE vi at_top(Words w, int j) { return (j & 1 ? w.high : w.low) << (24 - 8 * (j >> 1)); }
  static KERN_INLINE vf in_place(Words w, int j) { return to_floats(at_top(w, j) & static_cast<int32_t>(0xff000000)); }
  static KERN_INLINE vf value(Words w, int j) { return to_floats(at_top(w, j) >> 24); }
#else
  static constexpr int exponent(int) { return 0; }
  static KERN_INLINE Words load(const uint8_t* p) { return {load_lanes<4>(p), vi{}}; }
  static KERN_INLINE vf value(Words w, int j) {
    constexpr float values[16] = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
    vf v;
    for (int i = 0; i < W; i++) v[i] = values[(static_cast<uint32_t>(w.low[i]) >> (4 * j)) & 15];
    return v;
  }
  static KERN_INLINE vf in_place(Words w, int j) { return value(w, j); }
#endif
};

// E4M3 is float16 with its two lowest exponents' worth of range and mantissa cut off: half a shift, in units of 2**8.
KERN_INLINE uint16_t fp8_as_half(uint8_t code) {
  uint16_t rest = code & 0x7fu;
  return static_cast<uint16_t>((code & 0x80u) << 8 | (rest == 0x7f ? 0x7e00u : rest << 7));  // 0x7f: NaN
}

// Blocks of 32 elements, the group size, and in natural order: j * W + lane.
struct Fp8 {
  static constexpr int bits = 8, per_lane = 32 / W, block = 32, block_bytes = 32, over = 0;
  static constexpr float unit = 256.0f;
  static constexpr int exponent(int) { return 0; }

  struct Bytes {
    const uint8_t* p;
  };
  static KERN_INLINE Bytes load(const uint8_t* p) { return {p}; }
  static KERN_INLINE vf value(Bytes w, int j) {
    const uint8_t* p = w.p + j * W;
#if defined(KERN_AVX512)
    __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    __m256i rest = _mm256_slli_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x7f)), 7);
    __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(rest, _mm256_set1_epi16(0x3f80)), _mm256_set1_epi16(0x7e00));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x80)), 8);
    return (vf)_mm512_cvtph_ps(_mm256_or_si256(_mm256_or_si256(rest, nan), sign));
#elif defined(KERN_AVX2)
    __m128i v = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    __m128i rest = _mm_slli_epi16(_mm_and_si128(v, _mm_set1_epi16(0x7f)), 7);
    __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(rest, _mm_set1_epi16(0x3f80)), _mm_set1_epi16(0x7e00));
    __m128i sign = _mm_slli_epi16(_mm_and_si128(v, _mm_set1_epi16(0x80)), 8);
    return (vf)_mm256_cvtph_ps(_mm_or_si128(_mm_or_si128(rest, nan), sign));
#else
    f16 halves[W];
    for (int i = 0; i < W; i++) halves[i].bits = fp8_as_half(p[i]);
    return kern::KERN_NS::load(halves);
#endif
  }
  static KERN_INLINE vf in_place(Bytes w, int j) { return value(w, j); }
};

template <class F>
constexpr bool in_lanes = true;
template <>
constexpr bool in_lanes<Fp8> = false;

// Calls body(Of<Format>()) with the format of a matrix, or says that there is none.
template <class Body>
KERN_INLINE int with_format(const kern_quant& w, const Body& body) {
  const bool whole = w.group > 0 && w.width % w.group == 0;
  if (!whole) return KERN_UNSUPPORTED;
  switch (w.mode) {
    case KERN_AFFINE:
      if (w.group != 32 && w.group != 64 && w.group != 128) return KERN_UNSUPPORTED;
      switch (w.bits) {
        case 2: return body(Of<Affine<2>>());
        case 3: return body(Of<Affine<3>>());
        case 4: return body(Of<Affine<4>>());
        case 5: return body(Of<Affine<5>>());
        case 6: return body(Of<Affine<6>>());
        case 8: return body(Of<Affine<8>>());
        default: return KERN_UNSUPPORTED;
      }
    case KERN_MXFP4: return w.bits == 4 && w.group == 32 ? body(Of<Fp4>()) : KERN_UNSUPPORTED;
    case KERN_NVFP4: return w.bits == 4 && w.group == 16 ? body(Of<Fp4>()) : KERN_UNSUPPORTED;
    case KERN_MXFP8: return w.bits == 8 && w.group == 32 ? body(Of<Fp8>()) : KERN_UNSUPPORTED;
    default: return KERN_UNSUPPORTED;
  }
}

// -- rows ------------------------------------------------------------------------------------------------------------

constexpr int64_t kRepackedRows = 16;  // that lie beside each other

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

KERN_INLINE int64_t row_bytes(const kern_quant& w) { return w.width * w.bits / 8; }
KERN_INLINE int64_t groups(const kern_quant& w) { return w.width / w.group; }
KERN_INLINE int64_t scale_bytes(const kern_quant& w) {
  return w.mode != KERN_AFFINE ? 1 : w.scale_type == KERN_F32 ? 4 : 2;
}
KERN_INLINE bool is_factored(const kern_quant& w) { return w.mode == KERN_AFFINE && w.scale_type == KERN_FACTORED; }
// Room for the scales of `count` groups as floats: a block reads W of them wherever it starts.
constexpr int64_t scale_room(int64_t count) { return round_up(count, W) + 2 * W; }

KERN_INLINE const uint8_t* row_codes(const kern_quant& w, int64_t matrix, int64_t row) {
  return static_cast<const uint8_t*>(w.codes) + (matrix * w.rows + row) * row_bytes(w);
}

// A row of matrices as it would lie if they did not are repacked: row number `row` of `w`, counted over all matrices.
struct PlainRow {
  kern_quant w;
  int64_t row;

  PlainRow(const kern_quant& from, int64_t matrix, int64_t number) : w(from), row(matrix * from.rows + number) {
    if (!from.repacked) return;
    if (is_factored(from)) w.scale_type = KERN_F32;
    const int64_t codes = row_bytes(w), bytes = scale_bytes(w), scales = groups(w) * bytes;
    uint8_t* memory = static_cast<uint8_t*>(scratch(SLOT_CHUNK_3, static_cast<size_t>(codes + 2 * scales)));
    w.codes = take(from.codes, codes / 4, 4, memory);
    const auto numbers = [&](const void* of, uint8_t* to) {
      return is_factored(from) ? multiplied(of, to) : take(of, groups(w), bytes, to);
    };
    w.scales = numbers(from.scales, memory + codes);
    if (w.biases != nullptr) w.biases = numbers(from.biases, memory + codes + scales);
    w.repacked = 0;
    row = 0;
  }

 private:
  const void* take(const void* repacked, int64_t columns, int64_t bytes, uint8_t* to) const {
    const int64_t first = row / kRepackedRows * kRepackedRows * columns + row % kRepackedRows, step = kRepackedRows * bytes;
    const uint8_t* from = static_cast<const uint8_t*>(repacked) + first * bytes;
    for (int64_t i = 0; i < columns; i++) memcpy(to + i * bytes, from + i * step, static_cast<size_t>(bytes));
    return to;
  }
  const void* multiplied(const void* factored, uint8_t* to) const {
    const int64_t r = row % kRepackedRows;
    const kern_factored* from = static_cast<const kern_factored*>(factored) + row / kRepackedRows * groups(w) / 8;
    for (int64_t g = 0; g < groups(w); g++) {
      const float number = static_cast<float>(from[g / 8].factors[g % 8][r]) * to_float(f16{from[g / 8].units[r]});
      memcpy(to + g * 4, &number, sizeof number);
    }
    return to;
  }
};

template <class T>
KERN_INLINE void floats_of(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(to + i, load(from + i));
  store(to + i, load_some(from + i, static_cast<int>(count - i)));
  store(to + i + W, vf{});
}

KERN_INLINE float e8m0(uint8_t code) {
  return bit_cast<float>(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}

// Scales (times `unit`) and biases of `count` groups from the matrices' group `at` on, into scale_room(count) floats
// each; what lies behind them is 0. NULL: not wanted (affine only); biases are left alone where there are none.
inline void read_scales(const kern_quant& w, int64_t at, int64_t count, float unit, float* scales, float* biases) {
  if (w.mode == KERN_AFFINE) {
    with_type(w.scale_type, [&]<class T>(Of<T>) {
      if (scales != nullptr) floats_of(static_cast<const T*>(w.scales) + at, count, scales);
      if (biases != nullptr) floats_of(static_cast<const T*>(w.biases) + at, count, biases);
      return 0;
    });
    return;
  }
  const uint8_t* codes = static_cast<const uint8_t*>(w.scales) + at;
  if (w.mode == KERN_NVFP4) {
    int64_t g = 0;
    for (; g + W <= count; g += W) store(scales + g, Fp8::value({codes + g}, 0) * (Fp8::unit * unit));
    for (; g < count; g++) scales[g] = to_float(f16{fp8_as_half(codes[g])}) * (Fp8::unit * unit);
  } else {
    for (int64_t g = 0; g < count; g++) scales[g] = unit * e8m0(codes[g]);
  }
  memset(scales + count, 0, static_cast<size_t>(scale_room(count) - count) * sizeof(float));
}

// Which of the group's values each lane of a block takes.
template <class F>
struct Spread {
  explicit KERN_INLINE Spread(int group)
      : shift(__builtin_ctz(static_cast<unsigned>(group))), one(F::block <= group) {
    for (int i = 0; i < W; i++) lanes[i] = i * F::per_lane;
    lanes = lanes >> shift;
  }
  KERN_INLINE vf operator()(const float* of_groups, int64_t block) const {
    const float* first = of_groups + (block * F::block >> shift);
    return one ? splat(*first) : __builtin_shuffle(load(first), lanes);
  }
  int shift;
  bool one;
  vi lanes;
};

// Calls body(p, b) for block b of `blocks`, with its codes at p. What a load reads beyond the `bytes` codes there are
// comes from a copy, behind which are zeros.
template <class F, class Body>
KERN_INLINE void each_block(const uint8_t* codes, int64_t bytes, int64_t blocks, const Body& body) {
  const int64_t whole = least(blocks, most(0, (bytes - F::over) / F::block_bytes));
  constexpr int kTail = 2 * F::block_bytes;
  uint8_t tail[kTail + F::over];
  if (whole < blocks) {
    memset(tail, 0, sizeof tail);
    memcpy(tail, codes + whole * F::block_bytes, static_cast<size_t>(least(kTail, bytes - whole * F::block_bytes)));
  }
  const uint8_t* p = codes;
  for (int64_t b = 0, end = whole; b < blocks; end = blocks, p = tail)
    for (; b < end; b++, p += F::block_bytes) body(p, b);
}

// Decodes `blocks` blocks, each in its own order, to floats. `bytes` codes may be read.
template <class F>
__attribute__((noinline)) void decode(const uint8_t* codes, int64_t bytes, int64_t blocks, int group,
                                      const float* scales, const float* biases, float* out) {
  const Spread<F> spread(group);
  each_block<F>(codes, bytes, blocks, [&](const uint8_t* p, int64_t b) {
    const auto w = F::load(p);
    const vf scale = spread(scales, b), bias = biases == nullptr ? vf{} : spread(biases, b);
    float* to = out + b * F::block;
#pragma GCC unroll 32
    for (int j = 0; j < F::per_lane; j++) store(to + j * W, F::value(w, j) * scale + bias);
  });
}

// -- order -----------------------------------------------------------------------------------------------------------

// out[j][lane] = in[lane][j] * factors[j] for each block of W lanes.
inline __attribute__((noinline)) void to_lanes(const float* in, int64_t blocks, int per_lane, const float* factors,
                                               float* out) {
  for (int64_t b = 0; b < blocks; b++, in += per_lane * W, out += per_lane * W)
    for (int j = 0; j < per_lane; j++)
#pragma GCC unroll 1
      for (int lane = 0; lane < W; lane++) out[j * W + lane] = in[lane * per_lane + j] * factors[j];
}

inline __attribute__((noinline)) void from_lanes(const float* in, int64_t blocks, int per_lane, float* out) {
  for (int64_t b = 0; b < blocks; b++, in += per_lane * W, out += per_lane * W)
    for (int lane = 0; lane < W; lane++)
#pragma GCC unroll 1
      for (int j = 0; j < per_lane; j++) out[lane * per_lane + j] = in[j * W + lane];
}

// Decoded blocks in natural order.
template <class F>
KERN_INLINE void restore(const float* decoded, int64_t blocks, float* natural) {
  if constexpr (in_lanes<F>)
    from_lanes(decoded, blocks, F::per_lane, natural);
  else
    memcpy(natural, decoded, static_cast<size_t>(blocks * F::block) * sizeof(float));
}

}  // namespace kern::KERN_NS
