// All kernels for one instruction set; compiled once per set (KERN_AVX512, KERN_AVX2, KERN_NEON or none).
#include "attention.h"
#include "checksum.h"
#include "dense.h"
#include "gates.h"
#include "norms.h"
#include "quant.h"
#include "quant_factor.h"
#include "rope.h"
#include "table.h"
#include "vocabulary.h"

#define KERN_CAT2(a, b) a##b
#define KERN_CAT(a, b) KERN_CAT2(a, b)
#define KERN_STR2(a) #a
#define KERN_STR(a) KERN_STR2(a)

namespace kern {

const Table KERN_CAT(table_, KERN_NS) = {
    .name = KERN_STR(KERN_NS),
    .gemm = KERN_NS::gemm,
    .gather_gemm = KERN_NS::gather_gemm,
    .attention = KERN_NS::attention,
    .quant_matmul = KERN_NS::quant_matmul,
    .dequantize = KERN_NS::dequantize,
    .repacks = KERN_NS::repacks,
    .repack = KERN_NS::repack,
    .factor = KERN_NS::factor,
    .read_pass = KERN_NS::read_pass,
    .checksum_load = KERN_NS::checksum_load,
    .checksum_read = KERN_NS::checksum_read,
    .checksum_judge = KERN_NS::checksum_judge,
    .gate = KERN_NS::gate,
    .layer_norm = KERN_NS::layer_norm,
    .rms_norm = KERN_NS::rms_norm,
    .rope = KERN_NS::rope,
    .softmax = KERN_NS::softmax,
    .logsumexp = KERN_NS::logsumexp,
    .exp_mass = KERN_NS::exp_mass,
    .gumbel_argmax = KERN_NS::gumbel_argmax,
    .top_k = KERN_NS::top_k,
    .peaks = KERN_NS::peaks,
    .arg_partition = KERN_NS::arg_partition,
};

}  // namespace kern
