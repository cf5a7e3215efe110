// A kernel of libkern as a lazy MLX primitive. Runs on the CPU stream like MLX's own operations.
#pragma once
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/dtype.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

#include "ahead.h"
#include "kern/base.h"

namespace phalanx_cpu {

namespace mx = mlx::core;
using Arrays = std::vector<mx::array>;

inline int type_of(mx::Dtype dtype) {
  if (dtype == mx::float32) return KERN_F32;
  if (dtype == mx::float16) return KERN_F16;
  if (dtype == mx::bfloat16) return KERN_BF16;
  return -1;
}

inline int float_type(mx::Dtype dtype, const std::string& what) {
  int type = type_of(dtype);
  if (type < 0) throw std::invalid_argument(what + ": only float32, float16 and bfloat16 are supported");
  return type;
}

// Of [..., width].
inline int64_t row_count(const mx::array& a) {
  return a.shape(-1) == 0 ? 0 : static_cast<int64_t>(a.size()) / a.shape(-1);
}

inline const void* data(const mx::array& a) { return a.data<char>(); }
inline void* data(mx::array& a) { return a.data<char>(); }

// What computes an operation in its place; `by`: how far behind the position for which it was prepared.
using Task = std::function<void(int by)>;

// An operation that can be prepared once and computed often, with the same inputs and outputs.
class Native {
 public:
  virtual ~Native() = default;
  // `slides`: of the keys it reads there are not more at another position, but others.
  virtual Task prepare(const Arrays& in, Arrays& out, bool slides) const = 0;
};

// Args: the kernel's argument struct. `fill` completes it when the buffers are known, and returns nothing: what cannot
// be computed was refused before the operation was made.
template <class Args>
class Op : public mx::Primitive, public Native {
  static_assert(std::is_trivially_copyable_v<Args>);

 public:
  using Fill = void (*)(Args&, const Arrays& in, Arrays& out);
  using Run = int (*)(const Args*);

  Op(mx::Stream stream, const char* name, Args args, Fill fill, Run run)
      : mx::Primitive(stream), name_(name), args_(args), fill_(fill), run_(run) {
#if __has_builtin(__builtin_clear_padding)  // for `is_equivalent`
    __builtin_clear_padding(&args_);
#endif
  }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    size_t bytes = 0;
    for (mx::array& o : out) {
      o.set_data(mx::allocator::malloc(o.nbytes()));
      bytes += o.nbytes();
    }
    Args args = args_;
    fill_(args, in, out);
    auto waits = Ahead::get().enter(bytes, stream());
    mx::cpu::get_command_encoder(stream()).dispatch([args, run = run_, name = name_, waits = std::move(waits)] {
      if (run(&args) != KERN_OK) throw std::runtime_error(std::string(name) + ": the kernel refused its arguments");
    });
  }
  Task prepare(const Arrays& in, Arrays& out, bool slides) const override {
    Args args = args_;
    fill_(args, in, out);
    return [args, run = run_, name = name_, slides](int by) {
      Args now = args;
      if constexpr (requires { now.grow(by), now.slide(by); }) slides ? now.slide(by) : now.grow(by);
      if (run(&now) != KERN_OK) throw std::runtime_error(std::string(name) + ": the kernel refused its arguments");
    };
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& op = static_cast<const Op&>(other);
    return fill_ == op.fill_ && run_ == op.run_ && std::memcmp(&args_, &op.args_, sizeof args_) == 0;
  }
  void eval_gpu(const Arrays&, Arrays&) override { throw std::runtime_error("phalanx_cpu runs on the CPU only"); }
  const char* name() const override { return name_; }

 private:
  const char* name_;
  Args args_;
  Fill fill_;
  Run run_;
};

// One lazy array from a kernel.
template <class Args>
mx::array make(mx::Shape shape, mx::Dtype dtype, mx::Stream stream, const char* name, Args args,
               typename Op<Args>::Fill fill, typename Op<Args>::Run run, Arrays inputs) {
  return mx::array(std::move(shape), dtype, std::make_shared<Op<Args>>(stream, name, args, fill, run),
                   std::move(inputs));
}

// Several from one kernel.
template <class Args>
Arrays make_many(std::vector<mx::Shape> shapes, const std::vector<mx::Dtype>& dtypes, mx::Stream stream,
                 const char* name, Args args, typename Op<Args>::Fill fill, typename Op<Args>::Run run, Arrays inputs) {
  return mx::array::make_arrays(std::move(shapes), dtypes, std::make_shared<Op<Args>>(stream, name, args, fill, run),
                                inputs);
}

// The same values in row-major order without gaps; a copy only where they are not so already. What has been computed,
// as weights have, is known to be so now and costs no operation; what is to be given later (`replay.h`) will be so.
inline mx::array packed(const mx::array& a, mx::Stream stream) {
  const bool given = !a.has_primitive() && a.status() == mx::array::Status::unscheduled;
  if (given || (a.is_available() && a.flags().row_contiguous)) return a;
  return mx::contiguous(a, false, stream);
}

}  // namespace phalanx_cpu
