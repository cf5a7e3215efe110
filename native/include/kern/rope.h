// Rotary position embedding (Su et al., 2021).
#pragma once
#include "kern/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Turns the first `dims` elements of every vector, a pair at a time, by the angle
//   scale * (offsets[row] + position) * freqs[pair], or ... / freqs[pair] where `wavelengths` is set;
// pairs are (i, i + dims / 2), or (2 i, 2 i + 1) where `traditional` is set. The rest passes through.
// Angles, like MLX's, are products in fp32; they are right up to 6e6.
typedef struct {
  const void* x;  // [rows, heads, positions, dim]
  void* out;
  const int32_t* offsets;  // [rows], or one for all with offset_stride 0
  const float* freqs;      // [dims / 2]
  int64_t rows, heads, positions, dim, dims;
  int64_t x_strides[3], out_strides[3];  // row, head, position
  int64_t offset_stride;
  float scale;
  int type, traditional, wavelengths;
} kern_rope_args;
KERN_API int kern_rope(const kern_rope_args* args);

#ifdef __cplusplus
}
#endif
