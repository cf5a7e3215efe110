// Chooses the instruction set once, when the library is loaded, and is the C interface.
#include <stdlib.h>
#include <string.h>

#include "table.h"

namespace kern {
namespace {

struct Candidate {
  const Table* table;
  bool runs;
};

const Table* choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  // AVX-512 comes last: it has been compiled, but its tests have not run on such a processor yet. KERN_ISA asks for it.
  const Candidate candidates[] = {{&table_avx2, avx2}, {&table_scalar, true}, {&table_avx512, avx512}};
#elif defined(__aarch64__)
  const Candidate candidates[] = {{&table_neon, true}, {&table_scalar, true}};
#else
  const Candidate candidates[] = {{&table_scalar, true}};
#endif
  const char* wanted = getenv("KERN_ISA");
  for (const Candidate& c : candidates)
    if (c.runs && (wanted == nullptr || strcmp(wanted, c.table->name) == 0)) return c.table;
  for (const Candidate& c : candidates)  // what was asked for does not run here: `kern_isa` says what does
    if (c.runs) return c.table;
  return &table_scalar;
}

}  // namespace

const Table* const table = choose();

}  // namespace kern

extern "C" const char* kern_isa(void) { return kern::table->name; }
extern "C" int kern_gemm(const kern_gemm_args* args) { return kern::table->gemm(args); }
extern "C" int kern_gather_gemm(const kern_gather_gemm_args* args) { return kern::table->gather_gemm(args); }
extern "C" int kern_attention(const kern_attention_args* args) { return kern::table->attention(args); }
extern "C" int kern_quant_matmul(const kern_quant_matmul_args* args) { return kern::table->quant_matmul(args); }
extern "C" int kern_dequantize(const kern_dequantize_args* args) { return kern::table->dequantize(args); }
extern "C" int kern_read_pass(kern_read_pass_args* args) { return kern::table->read_pass(args); }
extern "C" int kern_checksum_load(const kern_checksum_load_args* args) { return kern::table->checksum_load(args); }
extern "C" int kern_checksum_read(const kern_checksum_read_args* args) { return kern::table->checksum_read(args); }
extern "C" int kern_gate(const kern_gate_args* args) { return kern::table->gate(args); }
extern "C" int kern_layer_norm(const kern_layer_norm_args* args) { return kern::table->layer_norm(args); }
extern "C" int kern_rms_norm(const kern_rms_norm_args* args) { return kern::table->rms_norm(args); }
extern "C" int kern_rope(const kern_rope_args* args) { return kern::table->rope(args); }
extern "C" int kern_softmax(const kern_long_row_args* args) { return kern::table->softmax(args); }
extern "C" int kern_logsumexp(const kern_long_row_args* args) { return kern::table->logsumexp(args); }
extern "C" int kern_exp_mass(const kern_long_row_args* args) { return kern::table->exp_mass(args); }
extern "C" int kern_gumbel_argmax(const kern_gumbel_argmax_args* args) {
  return kern::table->gumbel_argmax(args);
}
extern "C" int kern_top_k(const kern_top_k_args* args) { return kern::table->top_k(args); }
