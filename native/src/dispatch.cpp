// Chooses the instruction set once, when the library is loaded, and is the C interface.
#include <stdlib.h>
#include <string.h>

#include "processor.h"
#include "table.h"

#if KERN_BUILT_AVX512
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kern {
namespace {

#if KERN_BUILT_AVX512
// Tile registers are large, so Linux gives them only to processes that ask.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
         __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

Table named(const char* name, Table table) {
  table.name = name;
  return table;
}

// These differ in what `has_tiles` and `has_pairs` say.
const Table table_amx = named("amx", table_avx512);
const Table table_avx512bf16 = named("avx512bf16", table_avx512);
#endif

// What was built and runs on this processor, the widest first.
struct Candidates {
  const Table* tables[5];
  int count = 0;
  char names[64] = "";
  const char* unbuilt = "";

  void add(const Table* table, bool runs) {
    if (!runs) return;
    tables[count++] = table;
    if (names[0] != 0) strcat(names, " ");
    strcat(names, table->name);
  }
};

Candidates find() {
  Candidates found;
#if defined(__x86_64__)
  const bool avx512 = runs_avx512();
#if KERN_BUILT_AVX512
  found.add(&table_amx, avx512 && may_use_tiles());
  found.add(&table_avx512bf16, avx512 && __builtin_cpu_supports("avx512bf16"));
  found.add(&table_avx512, avx512);
#else
  found.unbuilt = avx512 ? "avx512" : "";
#endif
  found.add(&table_avx2, runs_avx2());
#elif defined(__aarch64__)
  found.add(&table_neon, true);
#endif
  found.add(&table_scalar, true);
  return found;
}

const Candidates candidates = find();

const Table* choose() {
  const char* wanted = getenv("KERN_ISA");
  for (int i = 0; wanted != nullptr && i < candidates.count; i++)
    if (strcmp(wanted, candidates.tables[i]->name) == 0) return candidates.tables[i];
  return candidates.tables[0];  // where what was asked for does not run here, `kern_isa` says what does
}

}  // namespace

const Table* const table = choose();
extern const bool has_tiles, has_pairs;
const bool has_tiles = strcmp(table->name, "amx") == 0;
const bool has_pairs = strcmp(table->name, "avx512bf16") == 0;  // tiles do more
#if defined(__x86_64__)
extern const bool foresees;
const bool foresees = __builtin_cpu_is("amdfam19h");  // Zen 4
#endif

}  // namespace kern

extern "C" const char* kern_isa(void) { return kern::table->name; }
extern "C" const char* kern_isas(void) { return kern::candidates.names; }
extern "C" const char* kern_unbuilt(void) { return kern::candidates.unbuilt; }
extern "C" int kern_gemm(const kern_gemm_args* args) { return kern::table->gemm(args); }
extern "C" int kern_gather_gemm(const kern_gather_gemm_args* args) { return kern::table->gather_gemm(args); }
extern "C" int kern_attention(const kern_attention_args* args) { return kern::table->attention(args); }
extern "C" int kern_quant_matmul(const kern_quant_matmul_args* args) { return kern::table->quant_matmul(args); }
extern "C" int kern_dequantize(const kern_dequantize_args* args) { return kern::table->dequantize(args); }
extern "C" int kern_repacks(const kern_quant* w) { return kern::table->repacks(w); }
extern "C" int kern_repack(const kern_repack_args* args) { return kern::table->repack(args); }
extern "C" int kern_factor(kern_factor_args* args) { return kern::table->factor(args); }
extern "C" int kern_read_pass(kern_read_pass_args* args) { return kern::table->read_pass(args); }
extern "C" int kern_checksum_load(const kern_checksum_load_args* args) { return kern::table->checksum_load(args); }
extern "C" int kern_checksum_read(const kern_checksum_read_args* args) { return kern::table->checksum_read(args); }
extern "C" int kern_checksum_judge(const kern_checksum_judge_args* args) { return kern::table->checksum_judge(args); }
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
extern "C" int kern_peaks(const kern_peaks_args* args) { return kern::table->peaks(args); }
extern "C" int kern_arg_partition(const kern_arg_partition_args* args) { return kern::table->arg_partition(args); }
extern "C" int kern_top_k(const kern_top_k_args* args) { return kern::table->top_k(args); }
