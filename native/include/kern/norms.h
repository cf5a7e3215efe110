// Norms of rows. out may be x.
#pragma once
#include "kern/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// out = x / sqrt(mean(x^2) + eps) * weight. x, out [rows, width]; weight [width] or NULL, of type weight_type.
typedef struct {
  const void* x;
  const void* weight;
  void* out;
  int64_t rows, width;
  int64_t x_stride, out_stride;  // between rows
  float eps;
  int type;  // of x and out
  int weight_type;
} kern_rms_norm_args;
KERN_API int kern_rms_norm(const kern_rms_norm_args* args);

// out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias. x, out [rows, width]; weight, bias [width] or NULL, of
// type weight_type.
typedef struct {
  const void* x;
  const void* weight;
  const void* bias;
  void* out;
  int64_t rows, width;
  int64_t x_stride, out_stride;  // between rows
  float eps;
  int type;  // of x and out
  int weight_type;
} kern_layer_norm_args;
KERN_API int kern_layer_norm(const kern_layer_norm_args* args);

#ifdef __cplusplus
}
#endif
