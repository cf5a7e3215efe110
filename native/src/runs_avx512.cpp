// A program of the build: it ends with 0 where AVX-512 kernels run.
#include "processor.h"

int main() { return kern::runs_avx512() ? 0 : 1; }
