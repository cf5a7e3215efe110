// x @ w.T for few rows of x, by which the rows of w stream.
//
// How activations and codes are multiplied is a layout's business: `Digits` (quant_digits.h) in integers, `Pairs`
// (quant_pairs.h) in bfloat16. It has
//   Format       of the codes
//   words        what a block of a row of x takes, in int32
//   alone        rows of w at once for one row of x; two for more, so that what is loaded of x serves both
//   counted      whether groups of x have factors of their own
//   Code, load() a block of a row of w
//   multiply()   blocks of R rows of w with one of x, lane by lane
//   take()       a row of x; false where floats have to do it
// and the members that `Repacked` (quant_repacked.h) lists. `Repacked` multiplies kRepacked and more rows of x, and all
// of them if w is repacked in memory. A result depends only on one row of x and one of w, not on threads or other rows;
// but kRepacked and more rows are summed in another order than fewer, unless w is repacked.
#pragma once
#include "quant_exact.h"

namespace kern::KERN_NS {

#if defined(KERN_AVX512)

// a * b + c, rounded once. (Whether the compiler fuses depends on what stands around it; tiles of eight rows and of one
// shall have the same bits.)
KERN_INLINE vf add_product(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

KERN_INLINE vi load_words(const int32_t* p) { return load_lanes<4>(reinterpret_cast<const uint8_t*>(p)); }

// -- scales ----------------------------------------------------------------------------------------------------------

enum { kE8M0 = KERN_BF16 + 1, kE4M3 };  // types of scales that no activation has

KERN_INLINE int scale_type(const kern_quant& w) {
  return w.mode == KERN_AFFINE ? w.scale_type : w.mode == KERN_NVFP4 ? kE4M3 : kE8M0;
}

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

// A row of x as its layout has it, and where its products go: out[n] belongs to row n of w. `factors` and `sums` belong
// to groups.
struct StreamRow {
  const int32_t* x;
  const float *factors, *sums;
  float* out;
};

// M rows of x beside each other: `words` as the layout has them, [word][M]; `factors` and `sums` [group][M].
struct BesideRows {
  int32_t* words;
  float *factors, *sums;
};

// Memory for rows of x beside each other, a slot for each.
struct Beside {
  int32_t* words;         // [slots, ld]
  float *factors, *sums;  // [slots, room]
  int64_t ld, room;

  // M of them from a slot on, which begin there: from a word and a group on.
  KERN_INLINE BesideRows rows(int64_t slot, int64_t m, int64_t word, int64_t group) const {
    return {words + slot * ld + word * m, factors + slot * room + group * m, sums + slot * room + group * m};
  }
};

// Bytes by which codes are prefetched: in memory order, whatever the order of use, and into the second-level cache,
// because the first level supports few outstanding misses. Prefetching two rows of w a kilobyte apart separately halved
// the speed.
constexpr int64_t kAhead = 6144;

// out[n] = x @ w[row + n] for M rows of x and so many rows of w, counted over all matrices; R of them at a time.
template <class Layout, int M, int R>
__attribute__((noinline)) void dot_rows(const kern_quant& w, int64_t row, int64_t rows, const StreamRow* x) {
  using F = typename Layout::Format;
  constexpr int kTail = 2 * F::block_bytes;
  const int64_t bytes = row_bytes(w), blocks = (w.width + F::block - 1) / F::block, count = groups(w);
  const int64_t whole = least(blocks, most(0, (bytes - F::over) / F::block_bytes));
  const int64_t span = W * w.group / F::block;  // blocks that W scales are for
  const int type = scale_type(w);
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
      vf scales[Layout::counted ? M : 1][R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const vf scale = scales_at(w.scales, type, first[r] + g, count - g);
        const int64_t ahead = (first[r] + g + 8 * count) * scale_bytes(w);
        __builtin_prefetch(static_cast<const uint8_t*>(w.scales) + ahead);
        if constexpr (Layout::counted) {
#pragma GCC unroll 8
          for (int m = 0; m < M; m++) scales[m][r] = scale * load(x[m].factors + g);
        } else {
          scales[0][r] = F::unit != 1.0f ? scale * F::unit : scale;
        }
        if (w.biases == nullptr) continue;
        const vf bias = scales_at(w.biases, type, first[r] + g, count - g);
        __builtin_prefetch(static_cast<const uint8_t*>(w.biases) + ahead);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) total[m][r] = bias * load(x[m].sums + g) + total[m][r];
      }
      vi at = lanes;
      for (const int64_t end = least(blocks, b + span); b < end; b++, at = at + F::block) {
        const vi lane = at >> shift;
        typename Layout::Code code[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const uint8_t* p = b < whole ? codes[r] + b * F::block_bytes : tail[r] + (b - whole) * F::block_bytes;
          code[r] = Layout::load(base(p));
          __builtin_prefetch(codes[0] + (b * R + r) * F::block_bytes + kAhead, 0, 2);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          vf product[R];
          Layout::template multiply<R>(code, base(x[m].x + b * Layout::words), product);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++)
            total[m][r] = product[r] * __builtin_shuffle(scales[Layout::counted ? m : 0][r], lane) + total[m][r];
        }
      }
    }
    for (int r = 0; r < R && n + r < rows; r++)
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) x[m].out[n + r] = sum(total[m][r]);
  }
}

// The same for any number of rows of x.
template <class Layout>
KERN_INLINE void stream_rows(const kern_quant& w, int64_t row, int64_t rows, const StreamRow* x, int64_t count) {
  for (; count >= 4; count -= 4, x += 4) dot_rows<Layout, 4, 2>(w, row, rows, x);
  if (count == 3) dot_rows<Layout, 3, 2>(w, row, rows, x);
  if (count == 2) dot_rows<Layout, 2, 2>(w, row, rows, x);
  if (count == 1) dot_rows<Layout, 1, Layout::alone>(w, row, rows, x);
}

// -- the product -----------------------------------------------------------------------------------------------------

template <class Layout>
struct Repacked;

constexpr int64_t kRepacked = 8;

// Segments of up to `max_rows` rows; what has more is left to others.
template <class Layout>
struct Streamed {
  using F = typename Layout::Format;

  const kern_quant_matmul_args& args;
  const int64_t max_rows;
  const kern_quant& w = args.w;
  int64_t blocks = (w.width + F::block - 1) / F::block;
  int64_t width = blocks * F::block;
  int64_t ld = most(blocks * Layout::words, Layout::counted ? width : 0) + 16;  // never a power of two
  int64_t group_count = groups(w);
  int64_t room = scale_room(group_count);
  int32_t* x = nullptr;      // [prepared, ld]: what the layout has, or floats
  float* factors = nullptr;  // [prepared, room]; the first is Inf where there are floats
  float* sums = nullptr;     // [prepared, room]
  // Prepared are a block's slots. Where x has fewer rows, each of those once: then this is the row of each slot.
  const int64_t* row_of = nullptr;
  Beside beside{};

  bool repacks(const Segment& s) const { return (w.repacked || s.count >= kRepacked) && s.count <= max_rows; }
  StreamRow prepared(int64_t slot) const {
    const int64_t at = row_of != nullptr ? row_of[slot] : slot;
    return {x + at * ld, factors + at * room, sums + at * room, nullptr};
  }

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
        if (row_of == nullptr && slots.segments[slots.of[first + i]].count > max_rows) continue;
        read_row(args.x, args.x_type, (row_of != nullptr ? i : slots.in[first + i]) * w.width, w.width, row);
        float *factor = factors + i * room, *total = sums + i * room;
        memset(factor + group_count, 0, static_cast<size_t>(room - group_count) * sizeof(float));
        memset(total + group_count, 0, static_cast<size_t>(room - group_count) * sizeof(float));
        if (Layout::take(w, row, group_count, blocks, numbers, x + i * ld, factor, total)) continue;
        factor[0] = INFINITY;
        group_sums(row, group_count, w.group, room, total);
        permute<F>(row, blocks, true, reinterpret_cast<float*>(x + i * ld));
      }
    });
  }

  void put_beside(const Slots& slots, int64_t begin, int64_t end, int64_t first, int64_t slot_count) {
    bool any = false;
    for (int64_t i = begin; i < end; i++) any |= repacks(slots.segments[i]);
    if (!any) return;
    void* memory = scratch(SLOT_SHARED_3, static_cast<size_t>(slot_count * (ld + 2 * room)) * sizeof(float));
    beside = {static_cast<int32_t*>(memory), nullptr, nullptr, ld, room};
    beside.factors = reinterpret_cast<float*>(beside.words + slot_count * ld);
    beside.sums = beside.factors + slot_count * room;
    chunks(slot_count, 8, [&](int64_t from, int64_t to) {
      for (int64_t i = begin; i < end; i++) {
        const Segment& s = slots.segments[i];
        const int64_t slot = s.first - first;
        if (repacks(s)) Repacked<Layout>::put(w, [&](int64_t at) { return prepared(at); }, beside, slot, s.count, from, to);
      }
    });
  }

  // c[m][n], `ld` apart, for rows [n, n + columns) of the segment's matrix.
  void multiply(const Segment& s, int64_t slot, int64_t n, int64_t columns, float* c, int64_t ld) const {
    const bool repack = repacks(s);
    if (repack) Repacked<Layout>::run(w, s.matrix * w.rows + n, columns, beside, slot, s.count, c, ld);
    StreamRow rows[kRepacked];
    int64_t count = 0;
    for (int64_t m = 0; m < s.count; m++) {
      StreamRow row = prepared(slot + m);
      row.out = c + m * ld;
      if (Layout::counted && row.factors[0] == INFINITY)
        multiply_floats(s, reinterpret_cast<const float*>(row.x), row.sums, n, columns, row.out);
      else if (!repack)
        rows[count++] = row;
    }
    stream_rows<Layout>(w, s.matrix * w.rows + n, columns, rows, count);
  }

  void multiply_floats(const Segment& s, const float* row, const float* total, int64_t n, int64_t columns,
                       float* out) const {
    float* scales = static_cast<float*>(scratch(SLOT_CHUNK, static_cast<size_t>(2 * room) * sizeof(float)));
    float* biases = w.mode == KERN_AFFINE ? scales + room : nullptr;
    for (int64_t i = 0; i < columns; i++) {
      const PlainRow plain(w, s.matrix, n + i);
      read_scales(plain.w, plain.row * group_count, group_count, F::unit, scales, biases);
      vf products{};
      dot_row<F, 1>(row_codes(plain.w, 0, plain.row), row_bytes(w), blocks, 4096, w.group, scales, row, 0, &products);
      out[i] = finish(products, biases, total, group_count);
    }
  }

  // Where in out a segment's results go, float32 and row behind row; NULL where they cannot be put there at once. (To
  // read again what has just been written makes the processor wait for all of it.)
  float* out_of(const Slots& slots, const Segment& s) const {
    const int64_t at = slots.out[s.first], count = s.count;
    if (args.out_type != KERN_F32 || slots.out[s.first + count - 1] != at + count - 1) return nullptr;
    if (w.repacked ? count > Repacked<Layout>::kMost : repacks(s)) return nullptr;
    return static_cast<float*>(args.out) + at * w.rows;
  }

  void run(const Slots& slots) {
    const bool few = w.repacked && slots.largest() <= Repacked<Layout>::kMost;
    const int64_t panel = few ? most(W, kChunk / row_bytes(w) / W * W) : kPanelN;  // rows of w
    const int64_t panels = (w.rows + panel - 1) / panel;
    each_slot_block(slots, [&](int64_t begin, int64_t end, int64_t first, int64_t count) {
      prepare(slots, first, count);
      put_beside(slots, begin, end, first, count);
      chunks((end - begin) * panels, panel_step(w, panel, 1), [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
          const Segment& s = slots.segments[begin + i / panels];
          if (s.count > max_rows) continue;
          const int64_t n = i % panels * panel, columns = least(panel, w.rows - n);
          if (float* out = out_of(slots, s)) {
            multiply(s, s.first - first, n, columns, out + n, w.rows);
            continue;
          }
          float* c = static_cast<float*>(scratch(SLOT_CHUNK_2, static_cast<size_t>(s.count * panel) * sizeof(float)));
          multiply(s, s.first - first, n, columns, c, panel);
          for (int64_t m = 0; m < s.count; m++)
            write_row(c + m * panel, columns, args.out, args.out_type, slots.out[s.first + m] * w.rows + n);
        }
      });
    });
  }
};

#endif

}  // namespace kern::KERN_NS
