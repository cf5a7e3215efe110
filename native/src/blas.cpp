// cblas_sgemm for the MLX of the same process. MLX's wheel brings a reference BLAS; a library that exports the symbol and
// was loaded before, with RTLD_GLOBAL, comes first.
#include "kern/dense.h"

enum { CblasRowMajor = 101, CblasNoTrans = 111 };

extern "C" KERN_API void cblas_sgemm(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha,
                                     const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  kern_gemm_args args{};
  const bool rows = layout == CblasRowMajor;  // a column-major product is the transposed product of what is there
  args.a = rows ? a : b;
  args.b = rows ? b : a;
  args.out = c;
  args.m = rows ? m : n;
  args.n = rows ? n : m;
  args.k = k;
  args.a_stride = rows ? lda : ldb;
  args.b_stride = rows ? ldb : lda;
  args.out_stride = ldc;
  args.alpha = alpha;
  args.beta = beta;
  args.a_transposed = (rows ? trans_a : trans_b) != CblasNoTrans;
  args.b_transposed = (rows ? trans_b : trans_a) != CblasNoTrans;
  kern_gemm(&args);
}
