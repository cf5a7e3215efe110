// Kernels over long rows: what sampling needs of a vocabulary. Rows give the same bits alone and in any batch.
#pragma once
#include "kern/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// x [rows, width] of `type`, and a result; computed in fp32.
typedef struct {
  const void* x;
  void* out;
  int64_t rows, width;
  int64_t x_stride;
  int type;
} kern_long_row_args;

KERN_API int kern_softmax(const kern_long_row_args* args);    // out [rows, width] of `type`, without gaps
KERN_API int kern_logsumexp(const kern_long_row_args* args);  // out [rows] of `type`

// Out int64 [rows]: the sum of floor(e^x 2^40), which no order of summation changes; for x <= 0, fp32.
KERN_API int kern_exp_mass(const kern_long_row_args* args);

// tokens[r] = argmax over z[r][t] >= floors[r] of z[r][t] + gumbel(keys[r], t), the noise of
// src/phalanx/model/sampling/gumbel.py: t-th output of the SplitMix64 that starts at the key. The first of equals.
typedef struct {
  const float* z;  // [rows, width]
  const uint64_t* keys;
  const float* floors;
  uint32_t* tokens;
  int64_t rows, width;
  int64_t z_stride;
} kern_gumbel_argmax_args;
KERN_API int kern_gumbel_argmax(const kern_gumbel_argmax_args* args);

// The first `count` of each row in the order "value descending, index ascending".
typedef struct {
  const float* x;    // [rows, width]
  float* values;     // [rows, count]
  uint32_t* indices; // [rows, count]
  int64_t rows, width, count;
  int64_t x_stride;
} kern_top_k_args;
KERN_API int kern_top_k(const kern_top_k_args* args);

// Of each row its sum, the largest value that is a number, and where that is; the first of equals.
typedef struct {
  const float* x;  // [rows, width], width >= 1
  float *sums, *values;
  uint32_t* indices;
  int64_t rows, width;
  int64_t x_stride;
} kern_peaks_args;
KERN_API int kern_peaks(const kern_peaks_args* args);

// out uint32 [rows, width]: the indices of each row of x, those of the `kth` smallest values first. Of equals the first is
// the smallest; NaN is the largest.
typedef struct {
  const void* x;  // [rows, width] of `type`
  uint32_t* out;
  int64_t rows, width, kth;
  int64_t x_stride;
  int type;
} kern_arg_partition_args;
KERN_API int kern_arg_partition(const kern_arg_partition_args* args);

#ifdef __cplusplus
}
#endif
