// Appends keys and values to rows of different lengths.
#pragma once
#include <optional>
#include <variant>

#include "layout.h"
#include "region.h"

namespace phalanx_cpu {

// Inputs: region [rows, heads, capacity, dim]; new values of n rows, [n, heads, L, dim]; their starts, int32 [n],
// unless `start` holds for all; optionally their rows, int32 [n], relative to `first` (default: consecutive).
class WriteRows : public mx::Primitive, public Native {
 public:
  WriteRows(mx::Stream stream, int first, std::optional<int> start)
      : mx::Primitive(stream), first_(first), start_(start) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    if (!Regions::get().is_region(in[0]))
      throw std::runtime_error("KernWriteRows: what is written to is no reserved region: something has copied it");
    out[0].copy_shared_buffer(in[0]);  // even if shared
    mx::cpu::get_command_encoder(stream()).dispatch([task = prepare(in, out, false)] { task(0); });
  }
  // `out` shares the region's memory, in row-major order.
  Task prepare(const Arrays& in, Arrays& out, bool) const override {
    const auto size = static_cast<int64_t>(out[0].itemsize());
    const mx::array& news = in[1];
    const mx::Shape shape(news.shape().begin() + 1, news.shape().end());
    const mx::Strides places(out[0].strides().begin() + 1, out[0].strides().end());
    const mx::Strides strides(news.strides().begin() + 1, news.strides().end());
    return [to = static_cast<char*>(data(out[0])) + first_ * out[0].strides(0) * size, row = out[0].strides(0) * size,
            from = static_cast<const char*>(data(news)), next = news.strides(0) * size, rows = news.shape(0),
            last = out[0].shape(2) - news.shape(2), same = start_,
            starts = start_ ? nullptr : in[2].data<int32_t>(), slots = in.size() > 3 ? in[3].data<int32_t>() : nullptr,
            end = out[0].shape(0) - first_, shape, places, strides, size](int by) {
      for (int r = 0; r < rows; r++) {
        const int slot = slots == nullptr ? r : slots[r], start = same ? *same + by : starts[r];
        if (slot < 0 || slot >= end) throw std::runtime_error("KernWriteRows: the buffer does not have that row");
        if (start < 0 || start > last) throw std::runtime_error("KernWriteRows: a row is longer than its place");
        copy_elements(to + slot * row + start * places[1] * size, from + r * next, shape, places, strides,
                      static_cast<size_t>(size));
      }
    };
  }
  // Whether `other` writes to the same rows, `by` positions later.
  bool is_same(const WriteRows& other, int by) const {
    if (first_ != other.first_ || start_.has_value() != other.start_.has_value()) return false;
    return !start_ || *other.start_ - *start_ == by;
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return is_same(static_cast<const WriteRows&>(other), 0);
  }
  void eval_gpu(const Arrays&, Arrays&) override { throw std::runtime_error("phalanx_cpu runs on the CPU only"); }
  const char* name() const override { return "KernWriteRows"; }

 private:
  int first_;
  std::optional<int> start_;
};

// The region with keys and values written to rows [first, first + n), or to rows first + slots [n]. Evaluation writes
// in place, even if the region is shared.
inline mx::array write_rows(const mx::array& region, const mx::array& news, const std::variant<int, mx::array>& starts,
                            int first, const std::optional<mx::array>& slots, mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  auto refuse = [](const char* why) { throw std::invalid_argument(std::string("write_rows: ") + why); };
  if (region.ndim() != 4 || news.ndim() != 4) refuse("the buffer and what is new must have 4 dimensions");
  if (news.shape(1) != region.shape(1) || news.shape(3) != region.shape(3)) refuse("heads and sizes must be the same");
  if (news.shape(2) > region.shape(2)) refuse("there is more than a row has room for");
  if (first < 0 || first + (slots ? 1 : news.shape(0)) > region.shape(0)) refuse("the buffer does not have these rows");
  Arrays inputs{region, mx::astype(news, region.dtype(), stream)};
  std::optional<int> same;
  if (const auto* each = std::get_if<mx::array>(&starts)) {
    if (each->ndim() != 1 || each->shape(0) != news.shape(0) || each->dtype() != mx::int32)
      refuse("starts must have one int32 per row");
    inputs.push_back(packed(*each, stream));
  } else {
    same = std::get<int>(starts);
    if (*same < 0 || *same > region.shape(2) - news.shape(2)) refuse("there is more than a row has room for");
  }
  if (slots) {
    if (same || slots->ndim() != 1 || slots->shape(0) != news.shape(0) || slots->dtype() != mx::int32)
      refuse("slots must have one int32 per row, and so must starts");
    inputs.push_back(packed(*slots, stream));
  }
  return mx::array(region.shape(), region.dtype(), std::make_shared<WriteRows>(stream, first, same),
                   std::move(inputs));
}

}  // namespace phalanx_cpu
