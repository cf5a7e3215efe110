// New keys and values behind those of rows that have different lengths.
#pragma once
#include <optional>

#include "layout.h"

namespace phalanx_cpu {

// buffer [rows, heads, capacity, dim]; what is new of n rows, [n, heads, L, dim]; where it begins in each, int32 [n];
// which rows those are, int32 [n], counted from the first one: if not given, one after the other
class WriteRows : public mx::Primitive, public Native {
 public:
  WriteRows(mx::Stream stream, int first) : mx::Primitive(stream), first_(first) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    if (!take_over(in[0], out[0])) {
      out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
      encoder.dispatch([to = static_cast<char*>(data(out[0])), from = static_cast<const char*>(data(in[0])),
                        shape = in[0].shape(), places = out[0].strides(), strides = in[0].strides(),
                        size = in[0].itemsize()] { copy_elements(to, from, shape, places, strides, size); });
    }
    encoder.dispatch([task = prepare(in, out, false)] { task(0); });
  }
  // `out` lies where the buffer does, in row-major order.
  Task prepare(const Arrays& in, Arrays& out, bool) const override {
    const auto size = static_cast<int64_t>(out[0].itemsize());
    const mx::array& news = in[1];
    const mx::Shape shape(news.shape().begin() + 1, news.shape().end());
    const mx::Strides places(out[0].strides().begin() + 1, out[0].strides().end());
    const mx::Strides strides(news.strides().begin() + 1, news.strides().end());
    return [to = static_cast<char*>(data(out[0])) + first_ * out[0].strides(0) * size, row = out[0].strides(0) * size,
            from = static_cast<const char*>(data(news)), next = news.strides(0) * size, rows = news.shape(0),
            last = out[0].shape(2) - news.shape(2), starts = in[2].data<int32_t>(),
            slots = in.size() > 3 ? in[3].data<int32_t>() : nullptr, end = out[0].shape(0) - first_, shape, places,
            strides, size](int) {
      for (int r = 0; r < rows; r++) {
        const int slot = slots == nullptr ? r : slots[r];
        if (slot < 0 || slot >= end) throw std::runtime_error("KernWriteRows: the buffer does not have that row");
        if (starts[r] < 0 || starts[r] > last)
          throw std::runtime_error("KernWriteRows: a row is longer than its place");
        copy_elements(to + slot * row + starts[r] * places[1] * size, from + r * next, shape, places, strides,
                      static_cast<size_t>(size));
      }
    };
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return first_ == static_cast<const WriteRows&>(other).first_;
  }
  void eval_gpu(const Arrays&, Arrays&) override { throw std::runtime_error("phalanx_cpu runs on the CPU only"); }
  const char* name() const override { return "KernWriteRows"; }

 private:
  int first_;
};

// The buffer with the new keys and values of rows [first, first + n), or of rows first + slots [n]; written in place if
// it has no other users.
inline mx::array write_rows(const mx::array& buffer, const mx::array& news, const mx::array& starts, int first,
                            const std::optional<mx::array>& slots, mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  auto refuse = [](const char* why) { throw std::invalid_argument(std::string("write_rows: ") + why); };
  if (buffer.ndim() != 4 || news.ndim() != 4) refuse("the buffer and what is new must have 4 dimensions");
  if (news.shape(1) != buffer.shape(1) || news.shape(3) != buffer.shape(3)) refuse("heads and sizes must be the same");
  if (news.shape(2) > buffer.shape(2)) refuse("there is more than a row has room for");
  if (first < 0 || first + (slots ? 1 : news.shape(0)) > buffer.shape(0)) refuse("the buffer does not have these rows");
  if (starts.ndim() != 1 || starts.shape(0) != news.shape(0) || starts.dtype() != mx::int32)
    refuse("starts must have one int32 per row");
  Arrays inputs{packed(buffer, stream), mx::astype(news, buffer.dtype(), stream), packed(starts, stream)};
  if (slots) {
    if (slots->ndim() != 1 || slots->shape(0) != news.shape(0) || slots->dtype() != mx::int32)
      refuse("slots must have one int32 per row");
    inputs.push_back(packed(*slots, stream));
  }
  return mx::array(buffer.shape(), buffer.dtype(), std::make_shared<WriteRows>(stream, first), std::move(inputs));
}

}  // namespace phalanx_cpu
