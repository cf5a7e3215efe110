// What one instruction set offers: a function per entry point of the C interface.
#pragma once
#include "kern/attention.h"
#include "kern/checksum.h"
#include "kern/dense.h"
#include "kern/gates.h"
#include "kern/norms.h"
#include "kern/quant.h"
#include "kern/rope.h"
#include "kern/vocabulary.h"

namespace kern {

struct Table {
  const char* name;
  int (*gemm)(const kern_gemm_args*);
  int (*gather_gemm)(const kern_gather_gemm_args*);
  int (*attention)(const kern_attention_args*);
  int (*quant_matmul)(const kern_quant_matmul_args*);
  int (*dequantize)(const kern_dequantize_args*);
  int (*repacks)(const kern_quant*);
  int (*repack)(const kern_repack_args*);
  int (*factor)(kern_factor_args*);
  int (*read_pass)(kern_read_pass_args*);
  int (*checksum_load)(const kern_checksum_load_args*);
  int (*checksum_read)(const kern_checksum_read_args*);
  int (*checksum_judge)(const kern_checksum_judge_args*);
  int (*gate)(const kern_gate_args*);
  int (*layer_norm)(const kern_layer_norm_args*);
  int (*rms_norm)(const kern_rms_norm_args*);
  int (*rope)(const kern_rope_args*);
  int (*softmax)(const kern_long_row_args*);
  int (*logsumexp)(const kern_long_row_args*);
  int (*exp_mass)(const kern_long_row_args*);
  int (*gumbel_argmax)(const kern_gumbel_argmax_args*);
  int (*top_k)(const kern_top_k_args*);
  int (*peaks)(const kern_peaks_args*);
  int (*arg_partition)(const kern_arg_partition_args*);
};

// Defined by the objects that were compiled for this architecture; see CMakeLists.txt.
extern const Table table_avx512, table_avx2, table_neon, table_scalar;

// The one in use.
extern const Table* const table;

}  // namespace kern
