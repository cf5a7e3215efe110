// libkern: compute kernels for MLX models on CPUs. A plain C interface; knows nothing of MLX or Python.
//
// Conventions of every entry point. Arguments come in one struct by pointer. Strides count elements, not bytes, unless
// a name says otherwise; the last axis is contiguous. Pointers need the alignment of their element type and no more.
// Outputs do not overlap inputs. Nothing is allocated for the caller. A return value that is not 0 is a `kern_status`,
// and then no output was written.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KERN_API __attribute__((visibility("default")))

typedef enum { KERN_OK = 0, KERN_UNSUPPORTED = 1 } kern_status;
typedef enum { KERN_F32 = 0, KERN_F16 = 1, KERN_BF16 = 2 } kern_type;

// The instruction set in use: "amx" (AVX-512 and tiles), "avx512", "avx2", "neon" or "scalar". Chosen at load: the widest this processor has, or
// what the environment variable KERN_ISA names.
KERN_API const char* kern_isa(void);
// All that this processor has and that was built, the widest first, with spaces between.
KERN_API const char* kern_isas(void);
// What this processor has and the one that built the library lacked: "avx512" or "".
KERN_API const char* kern_unbuilt(void);

// Threads that kernels use, the caller included. 0 asks for as many as this process may run on.
KERN_API void kern_set_threads(int threads);
KERN_API int kern_threads(void);

#ifdef __cplusplus
}
#endif
