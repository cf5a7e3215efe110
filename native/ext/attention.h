// Operations of kern/attention.h.
#pragma once
#include <optional>
#include <string>
#include <variant>

#include "kern/attention.h"
#include "layout.h"

namespace phalanx_cpu {

using Mask = std::variant<std::monostate, std::string, mx::array>;

namespace detail {

// Which inputs follow q, k and v.
struct AttentionArgs {
  kern_attention_args kernel;
  bool sinks, lengths, slots;
  int64_t kept_rows;  // of keys and values

  void grow(int by) { kernel.keys += by; }
  void slide(int by) {
    const int64_t size = kernel.type == KERN_F32 ? 4 : 2;
    kernel.k = static_cast<const char*>(kernel.k) + by * kernel.k_strides[2] * size;
    kernel.v = static_cast<const char*>(kernel.v) + by * kernel.v_strides[2] * size;
  }
};

inline void fill_attention(AttentionArgs& args, const Arrays& in, Arrays& out) {
  kern_attention_args& a = args.kernel;
  mx::array q = dense(in[0], out[0]), k = dense(in[1], out[0]), v = dense(in[2], out[0]);
  a.q = data(q);
  a.k = data(k);
  a.v = data(v);
  a.keys = k.shape(2);  // here, since a call that is replayed has other ones
  a.out = data(out[0]);
  copy_strides(a.q_strides, q);
  copy_strides(a.k_strides, k);
  copy_strides(a.v_strides, v);
  copy_strides(a.out_strides, out[0]);  // [rows, queries, q_heads, v_dim]
  std::swap(a.out_strides[1], a.out_strides[2]);
  size_t next = 3;
  if (a.mask_kind != KERN_MASK_NONE) {
    a.mask = data(in[next]);
    for (int i = 0; i < 4; i++) a.mask_strides[i] = in[next].strides(i);
    next++;
  }
  if (args.sinks) a.sinks = data(in[next++]);
  if (args.lengths) a.lengths = in[next++].data<int32_t>();
  if (args.slots) a.slots = in[next].data<int32_t>();
}

// Which slots there are is known only now.
inline int run_attention(const AttentionArgs* args) {
  const kern_attention_args& a = args->kernel;
  for (int64_t i = 0; a.slots != nullptr && i < a.rows; i++)
    if (a.slots[i] < 0 || a.slots[i] >= args->kept_rows) throw std::runtime_error("KernAttention: no such slot");
  return kern_attention(&a);
}

}  // namespace detail

// As mx.fast.scaled_dot_product_attention; `lengths` [B], `window` and `slots` [B] as in kern/attention.h. What it returns lies in
// memory as [B, L, Hq, D], which is how models go on with it.
inline mx::array attention(const mx::array& queries, const mx::array& keys, const mx::array& values, float scale,
                           const Mask& mask, const std::optional<mx::array>& sinks,
                           const std::optional<mx::array>& lengths, int window, const std::optional<mx::array>& slots,
                           mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  auto refuse = [](const char* why) { throw std::invalid_argument(std::string("attention: ") + why); };
  if (queries.ndim() != 4 || keys.ndim() != 4 || values.ndim() != 4) refuse("q, k and v must have 4 dimensions");
  int rows = queries.shape(0), heads = queries.shape(1), length = queries.shape(2), known = keys.shape(2);
  if (keys.shape(0) != values.shape(0) || (!slots && keys.shape(0) != rows))
    refuse("q, k and v must have the same rows");
  if (keys.shape(1) != values.shape(1) || known != values.shape(2)) refuse("k and v must go together");
  if (keys.shape(1) == 0 || heads % keys.shape(1) != 0) refuse("query heads must be a multiple of key heads");
  if (queries.shape(3) != keys.shape(3)) refuse("q and k must have the same last axis");
  if (window < 0) refuse("window must not be negative");
  mx::Dtype dtype = mx::result_type(queries, keys, values);

  detail::AttentionArgs args{};
  kern_attention_args& a = args.kernel;
  args.kept_rows = keys.shape(0);
  a.rows = rows;
  a.q_heads = heads;
  a.kv_heads = keys.shape(1);
  a.queries = length;
  a.dim = queries.shape(3);
  a.v_dim = values.shape(3);
  a.window = window;
  a.scale = scale;
  a.type = float_type(dtype, "attention");
  Arrays inputs{mx::astype(queries, dtype, stream), mx::astype(keys, dtype, stream),
                mx::astype(values, dtype, stream)};

  std::optional<mx::array> shown;
  if (const auto* name = std::get_if<std::string>(&mask)) {
    if (*name != "causal") refuse("the only mask with a name is 'causal'");
    a.causal = known >= length;
    if (!a.causal)  // queries before the first key: MLX's mask hides all keys from them, which gives the mean
      shown = mx::greater_equal(mx::expand_dims(mx::arange(known - length, known, stream), 1, stream),
                                mx::arange(known, stream), stream);
  } else if (const auto* array = std::get_if<mx::array>(&mask)) {
    if (array->dtype() != mx::bool_ && mx::promote_types(array->dtype(), dtype) != dtype)
      refuse("the mask's type must promote to that of q, k and v");
    shown = array->dtype() == mx::bool_ || type_of(array->dtype()) >= 0 ? *array : mx::astype(*array, dtype, stream);
  }
  if (shown) {
    a.mask_kind = shown->dtype() == mx::bool_ ? KERN_MASK_BOOL : KERN_MASK_ADDED;
    a.mask_type = type_of(shown->dtype());
    inputs.push_back(mx::broadcast_to(*shown, {rows, heads, length, known}, stream));
  }
  if (sinks) {
    if (sinks->ndim() != 1 || sinks->shape(0) != heads) refuse("sinks must have one number per query head");
    if (mx::promote_types(sinks->dtype(), dtype) != dtype) refuse("the sinks' type must promote to that of q, k and v");
    args.sinks = true;
    a.sinks_type = float_type(sinks->dtype(), "attention");
    inputs.push_back(packed(*sinks, stream));
  }
  if (lengths) {
    if (lengths->ndim() != 1 || lengths->shape(0) != rows) refuse("lengths must have one number per row");
    args.lengths = true;
    inputs.push_back(packed(mx::astype(*lengths, mx::int32, stream), stream));
  }
  if (slots) {
    if (!lengths || length != 1 || a.mask_kind != KERN_MASK_NONE)
      refuse("rows that share slots have lengths, one query each and no mask");
    if (slots->ndim() != 1 || slots->shape(0) != rows || slots->dtype() != mx::int32)
      refuse("slots must have one int32 per row");
    args.slots = true;
    inputs.push_back(packed(*slots, stream));
  }
  mx::array out = make<detail::AttentionArgs>({rows, length, heads, values.shape(3)}, dtype, stream, "KernAttention",
                                              args, detail::fill_attention, detail::run_attention, std::move(inputs));
  return mx::swapaxes(out, 1, 2, stream);
}

}  // namespace phalanx_cpu
