// Activations, and the products with what they gate.
#pragma once
#include "kern/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  KERN_SILU = 0,        // g * sigmoid(g)
  KERN_GELU = 1,        // g * Phi(g)
  KERN_GELU_TANH = 2,   // g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))) / 2
  KERN_SWIGLU_OAI = 3,  // g' * sigmoid(alpha g') * (u' + 1) with g' = min(g, limit), u' = u within +-limit
  KERN_SIGMOID = 4,
} kern_activation;

// out = activation(gate) * up. All [rows, width]; up may be NULL, and is then 1 (0 for KERN_SWIGLU_OAI);
// out may be gate or up.
typedef struct {
  const void* gate;
  const void* up;
  void* out;
  int64_t rows, width;
  int64_t gate_stride, up_stride, out_stride;  // between rows
  float alpha, limit;
  int type, activation;
} kern_gate_args;
KERN_API int kern_gate(const kern_gate_args* args);

#ifdef __cplusplus
}
#endif
