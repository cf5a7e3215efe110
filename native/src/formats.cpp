// Products with a few formats of quantised weights, for one instruction set: KERN_FORMATS says which formats. They take
// most of a build's time, which the cores of a machine share by these objects.
#include "quant_fast.h"
#include "quant_plain.h"
#include "quant_repacked.h"
#include "quant_tiles.h"

namespace kern::KERN_NS {

template <class F>
void multiply(const kern_quant_matmul_args& a) {
  const Slots slots = find_slots(a);
  if (!a.transpose)
    Plain<F>{a}.run(slots);
  else if (!run_fast<F>(a, slots))
    run_exact<F>(a, slots);
}

#if KERN_FORMATS == 0
template void multiply<Affine<2>>(const kern_quant_matmul_args&);
template void multiply<Affine<3>>(const kern_quant_matmul_args&);
#elif KERN_FORMATS == 1
template void multiply<Affine<4>>(const kern_quant_matmul_args&);
template void multiply<Affine<5>>(const kern_quant_matmul_args&);
#elif KERN_FORMATS == 2
template void multiply<Affine<6>>(const kern_quant_matmul_args&);
template void multiply<Affine<8>>(const kern_quant_matmul_args&);
#else
template void multiply<Fp4>(const kern_quant_matmul_args&);
template void multiply<Fp8>(const kern_quant_matmul_args&);
#endif

}  // namespace kern::KERN_NS
