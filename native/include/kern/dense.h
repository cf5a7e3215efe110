// Products of dense matrices.
#pragma once
#include "kern/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// out = alpha * op(a) op(b) + beta * out + bias, summed in float32.
// op(a) is [m, k]: a itself with rows a_stride apart, or with a_transposed the transpose of a [k, m]; op(b) [k, n] likewise.
// bias [n] or NULL. out [m, n] is read only where beta is not 0.
typedef struct {
  const void* a;
  const void* b;
  const void* bias;
  void* out;
  int64_t m, n, k;
  int64_t a_stride, b_stride, out_stride;
  float alpha, beta;
  int a_transposed, b_transposed;
  int type;  // of a and out
  int b_type, bias_type;
} kern_gemm_args;
KERN_API int kern_gemm(const kern_gemm_args* args);

// A product per pair, for mixtures of experts: out[p] = alpha * a[lhs[p]] op(b[rhs[p]]), all [m, k] x [k, n]. Pairs are
// taken together by rhs, so that each expert's weights are read once. No bias, no beta, a is not transposed.
typedef struct {
  kern_gemm_args one;       // shapes, strides and types of a single product; its pointers are the bases
  int64_t pairs;
  const uint32_t* lhs;      // [pairs]
  const uint32_t* rhs;      // [pairs]
  int64_t lhs_count, rhs_count;
  int64_t a_matrix, b_matrix, out_matrix;  // elements from one matrix to the next
} kern_gather_gemm_args;
KERN_API int kern_gather_gemm(const kern_gather_gemm_args* args);

#ifdef __cplusplus
}
#endif
