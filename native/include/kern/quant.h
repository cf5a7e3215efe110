// Products with quantised matrices, in the formats of MLX: each row of a matrix is a stream of codes of `bits` bits,
// lowest bits first, and each `group` of consecutive codes in a row shares a scale (and, when affine, a bias).
#pragma once
#include "kern/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  KERN_AFFINE = 0,  // code * scale + bias; bits 2, 3, 4, 5, 6, 8; group 32, 64, 128
  KERN_MXFP4 = 1,   // E2M1 * E8M0 scale; bits 4, group 32
  KERN_MXFP8 = 2,   // E4M3 * E8M0 scale; bits 8, group 32
  KERN_NVFP4 = 3,   // E2M1 * E4M3 scale; bits 4, group 16
} kern_quant_mode;

typedef enum {
  KERN_EXACT = 0,  // as float32, or closer
  KERN_FAST = 1,   // rounds each group of activations to int8 where that is faster: x86, integer codes and FP4
} kern_precision;

// Numbers of 16 rows and 8 groups, each an int8 of its own times a float16 of its row: what GGUF's Q4_K scales are made
// of. Repacked affine matrices may have scales and biases so, [matrices, rows / 16, width / group / 8] of them, with the
// scale_type KERN_FACTORED: the same floats in 31 % of the bytes.
typedef struct {
  int8_t factors[8][16];
  uint16_t units[16];
} kern_factored;
enum { KERN_FACTORED = 8 };

// `matrices` matrices [rows, width], one behind the other. width is a multiple of group.
typedef struct {
  const void* codes;   // [matrices, rows, width * bits / 32], uint32
  const void* scales;  // [matrices, rows, width / group], of scale_type; uint8 unless affine
  const void* biases;  // as scales; NULL unless affine
  int64_t matrices, rows, width;
  int mode, bits, group;
  int scale_type;  // of scales and biases when affine
  // Whether rows are repacked (kern_repack): codes are [matrices, rows / 16, width * bits / 32, 16], scales and biases too.
  int repacked;
} kern_quant;

// Whether products with such matrices are faster when their rows, whole sixteens, are repacked. Where this is 0 only the
// decoding of rows takes those that do.
KERN_API int kern_repacks(const kern_quant* w);

// [panels, 16, columns] becomes [panels, columns, 16], in place.
typedef struct {
  void* data;
  int64_t panels, columns;
  int element_bytes;  // 1, 2 or 4
} kern_repack_args;
KERN_API int kern_repack(const kern_repack_args* args);

// Finds factors of repacked float32 numbers [panels, columns, 16], `columns` being a multiple of 8.
typedef struct {
  const float* numbers;
  kern_factored* out;
  int64_t panels, columns;
  int exact;  // out: whether all numbers have factors. If not, what was written means nothing
} kern_factor_args;
KERN_API int kern_factor(kern_factor_args* args);

// For each pair p: out[p] = x[lhs[p]] @ w[rhs[p]].T, or without .T. An index outside its array is refused.
// Without `lhs`, `repeat` pairs in a row take the same block of x: the experts of one token.
typedef struct {
  kern_quant w;
  const void* x;        // [blocks, rows, w.width]; not transposed: [blocks, rows, w.rows]
  void* out;            // [pairs, rows, w.rows]; not transposed: [pairs, rows, w.width]
  const uint32_t* lhs;  // [pairs], or NULL: the pair's own number, divided by `repeat`
  const uint32_t* rhs;  // [pairs], or NULL: the pair's own number
  int64_t pairs, blocks, rows;
  int64_t repeat;  // at least 1
  int transpose;
  int x_type, out_type;
  int precision;
} kern_quant_matmul_args;
KERN_API int kern_quant_matmul(const kern_quant_matmul_args* args);

// out[i] = row indices[i] of w, decoded; w.matrices is 1. An index outside the matrix is refused.
typedef struct {
  kern_quant w;
  const uint32_t* indices;  // [count], or NULL: every row (count = w.rows)
  void* out;                // [count, w.width]
  int64_t count;
  int out_type;
} kern_dequantize_args;
KERN_API int kern_dequantize(const kern_dequantize_args* args);

// Reads `bytes` bytes once with all threads and does nothing with them: what a benchmark compares bandwidth with.
typedef struct {
  const void* data;
  uint64_t sum;  // out
  int64_t bytes;
  int64_t ahead;  // bytes to fetch ahead of what is read; 0: none. Which is faster depends on the processor.
} kern_read_pass_args;
KERN_API int kern_read_pass(kern_read_pass_args* args);

#ifdef __cplusplus
}
#endif
