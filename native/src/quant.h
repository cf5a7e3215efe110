// Kernels of kern/quant.h.
#pragma once
#include "amx.h"
#include "quant_digits.h"
#include "quant_format.h"

namespace kern::KERN_NS {

// Without indices: numbers of their own, `repeat` times each.
inline bool within(const uint32_t* indices, int64_t count, int64_t limit, int64_t repeat) {
  if (indices == nullptr) return repeat > 0 && count <= limit * repeat;
  uint32_t largest_index = 0;
  for (int64_t i = 0; i < count; i++) largest_index = indices[i] > largest_index ? indices[i] : largest_index;
  return count == 0 || largest_index < limit;
}

inline bool known(int type) { return type == KERN_F32 || type == KERN_F16 || type == KERN_BF16; }
inline bool known_scales(const kern_quant& w) {
  return w.mode != KERN_AFFINE || known(w.scale_type) || (is_factored(w) && w.repacked && groups(w) % 8 == 0);
}

// As kern_repacks.
inline int repacks(const kern_quant* w) {
#if defined(KERN_AVX512)
  if (has_tiles || w->rows % kRepackedRows != 0) return 0;  // tiles are made of rows as they are
  bool does = false;
  with_format(*w, [&]<class F>(Of<F>) {
    does = has_digits<F> && 32 % F::bits == 0;
    return KERN_OK;
  });
  return does;
#else
  (void)w;
  return 0;
#endif
}

inline int repack(const kern_repack_args* args) {
  const int64_t bytes = args->element_bytes, panel = kRepackedRows * args->columns * bytes;
  if (bytes != 1 && bytes != 2 && bytes != 4) return KERN_UNSUPPORTED;
  chunks(args->panels, 1, [&](int64_t first, int64_t last) {
    uint8_t* copy = static_cast<uint8_t*>(scratch(SLOT_CHUNK, static_cast<size_t>(panel)));
    for (int64_t p = first; p < last; p++) {
      uint8_t* to = static_cast<uint8_t*>(args->data) + p * panel;
      memcpy(copy, to, static_cast<size_t>(panel));
      auto move = [&]<class T>(T) {
        for (int64_t i = 0; i < args->columns; i++)
          for (int64_t r = 0; r < kRepackedRows; r++)
            memcpy(to + (i * kRepackedRows + r) * bytes, copy + (r * args->columns + i) * bytes, sizeof(T));
      };
      if (bytes == 4)
        move(uint32_t{});
      else if (bytes == 2)
        move(uint16_t{});
      else
        move(uint8_t{});
    }
  });
  return KERN_OK;
}

// Products with weights of one format that are not empty: in formats.cpp.
template <class F>
void multiply(const kern_quant_matmul_args& a);

inline int quant_matmul(const kern_quant_matmul_args* args) {
  const kern_quant_matmul_args& a = *args;
  if (!known(a.x_type) || !known(a.out_type) || !known_scales(a.w))
    return KERN_UNSUPPORTED;
  if (a.w.repacked && !(a.transpose && repacks(&a.w))) return KERN_UNSUPPORTED;
  if (!within(a.lhs, a.pairs, a.blocks, a.repeat) || !within(a.rhs, a.pairs, a.w.matrices, 1)) return KERN_UNSUPPORTED;
  return with_format(a.w, [&]<class F>(Of<F>) -> int {
    if (a.pairs == 0 || a.rows == 0 || a.w.rows == 0 || a.w.width == 0) {
      const int64_t bytes = a.pairs * a.rows * (a.transpose ? a.w.rows : a.w.width) * element_bytes(a.out_type);
      if (bytes > 0) memset(a.out, 0, static_cast<size_t>(bytes));
      return KERN_OK;
    }
    multiply<F>(a);
    return KERN_OK;
  });
}

inline int dequantize(const kern_dequantize_args* args) {
  const kern_dequantize_args& a = *args;
  const kern_quant& w = a.w;
  if (!known(a.out_type) || !known_scales(w)) return KERN_UNSUPPORTED;
  if (w.matrices != 1 || !within(a.indices, a.count, w.rows, 1)) return KERN_UNSUPPORTED;
  if (w.repacked && w.rows % kRepackedRows != 0) return KERN_UNSUPPORTED;
  return with_format(w, [&]<class F>(Of<F>) -> int {
    if (w.width == 0) return KERN_OK;
    const int64_t blocks = (w.width + F::block - 1) / F::block, room = scale_room(groups(w));
    chunks(a.count, most(1, 16384 / w.width), [&](int64_t first, int64_t last) {
      float* scales = static_cast<float*>(
          scratch(SLOT_CHUNK, static_cast<size_t>(2 * room + 2 * blocks * F::block) * sizeof(float)));
      float* biases = w.mode == KERN_AFFINE ? scales + room : nullptr;
      float *decoded = scales + 2 * room, *natural = decoded + blocks * F::block;
      for (int64_t i = first; i < last; i++) {
        const int64_t row = a.indices != nullptr ? a.indices[i] : i;
        const PlainRow plain(w, 0, row);
        read_scales(plain.w, plain.row * groups(w), groups(w), F::unit, scales, biases);
        decode<F>(row_codes(plain.w, 0, plain.row), row_bytes(w), blocks, w.group, scales, biases, decoded);
        restore<F>(decoded, blocks, natural);
        write_row(natural, w.width, a.out, a.out_type, i * w.width);
      }
    });
    return KERN_OK;
  });
}

inline int read_pass(kern_read_pass_args* args) {
  constexpr int64_t kPiece = 256 << 10;
  const uint8_t* data = static_cast<const uint8_t*>(args->data);
  uint64_t total = 0;
  chunks((args->bytes + kPiece - 1) / kPiece, 1, [&](int64_t first, int64_t last) {
    const uint8_t *p = data + first * kPiece, *end = data + least(args->bytes, last * kPiece);
    const int64_t ahead = args->ahead;
    vi sums[4] = {};
    for (; p + 4 * sizeof(vi) <= end; p += 4 * sizeof(vi)) {
      if (ahead > 0) __builtin_prefetch(p + ahead);
      for (int i = 0; i < 4; i++) sums[i] = sums[i] + load_lanes<4>(p + i * sizeof(vi));
    }
    uint64_t sum = static_cast<uint32_t>((sums[0] + sums[1] + sums[2] + sums[3])[0]);
    __atomic_fetch_add(&total, sum, __ATOMIC_RELAXED);
  });
  args->sum = total;
  return KERN_OK;
}

}  // namespace kern::KERN_NS
