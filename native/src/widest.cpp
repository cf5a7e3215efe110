// A program of the build: it ends with 2 where AVX-512 kernels run, 1 where AVX2 kernels do, otherwise 0.
#include "processor.h"

int main() {
#if defined(__x86_64__)
  return kern::runs_avx512() ? 2 : kern::runs_avx2() ? 1 : 0;
#else
  return 0;
#endif
}
