// Scaled dot-product attention.
#pragma once
#include "kern/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { KERN_MASK_NONE = 0, KERN_MASK_BOOL = 1, KERN_MASK_ADDED = 2 } kern_mask;

// out = softmax(scale * q k^T) v, where each group of q_heads / kv_heads query heads shares a head of keys and values.
//
// q [rows, q_heads, queries, dim], k [rows, kv_heads, keys, dim], v [rows, kv_heads, keys, v_dim],
// out [rows, q_heads, queries, v_dim], all of `type`; the softmax and all sums are in fp32.
//
// Row b has n = lengths[b] keys (`keys` of them where lengths is NULL); what lies beyond is not read. Where `causal` is
// set, or lengths or a window are given, query i stands at key n - queries + i and sees no key behind its own.
//
// Row b reads the keys and values of row slots[b], where slots are given; rows of one slot follow each other, each a token
// further than the one before, as if they were the queries of one row. Then `queries` is 1, lengths are given, and there
// is no mask.
//
// A query from which the mask hides all its keys gives their mean, as MLX does; one that has no keys gives zeros.
typedef struct {
  const void *q, *k, *v;
  void* out;
  const void* mask;        // [rows, q_heads, queries, keys]: bytes (0 hides) or numbers of mask_type, which are added
  const void* sinks;       // [q_heads] or NULL: per head a logit that takes weight and adds no value
  const int32_t* lengths;  // [rows] or NULL
  const int32_t* slots;    // [rows] or NULL
  int64_t rows, q_heads, kv_heads, queries, keys, dim, v_dim;
  int64_t q_strides[3], k_strides[3], v_strides[3], out_strides[3];  // row, head, position
  int64_t mask_strides[4];                                           // row, head, query, key; 0 repeats
  int64_t window;                                                    // keys a query sees, its own included; 0: all
  float scale;
  int type, mask_kind, mask_type, sinks_type, causal;
} kern_attention_args;
KERN_API int kern_attention(const kern_attention_args* args);

#ifdef __cplusplus
}
#endif
