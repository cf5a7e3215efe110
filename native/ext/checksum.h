// Operations of kern/checksum.h.
#pragma once
#include "kern/checksum.h"
#include "layout.h"

namespace phalanx_cpu {

inline void check_tag(const mx::array& tag) {
  if (tag.size() != 1 || tag.dtype() != mx::float32) throw std::invalid_argument("checksum: the tag is one float32");
}

// y [rows, width], weights [width] or [width, 1] -> wire [rows, width + 3 or 4].
inline mx::array checksum_load(const mx::array& y, const mx::array& weights, const mx::array& tag,
                               mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  if (y.ndim() != 2 || weights.size() != static_cast<size_t>(y.shape(1)))
    throw std::invalid_argument("checksum_load: y must be [rows, width], weights [width]");
  check_tag(tag);
  kern_checksum_load_args args{};
  args.rows = y.shape(0);
  args.width = y.shape(1);
  args.type = float_type(y.dtype(), "checksum_load");
  auto fill = [](kern_checksum_load_args& a, const Arrays& in, Arrays& out) {
    Rows y = rows_of(in[0], out[0]);
    a.y = y.data;
    a.y_stride = y.stride;
    a.weights = in[1].data<float>();
    a.tag = in[2].data<float>();
    a.wire = data(out[0]);
  };
  int wide = y.shape(1) + (y.dtype() == mx::float32 ? 3 : 4);
  return make<kern_checksum_load_args>({y.shape(0), wide}, y.dtype(), stream, "KernChecksumLoad", args, fill,
                                       kern_checksum_load,
                                       {y, packed(mx::astype(weights, mx::float32, stream), stream), tag});
}

// wire [rows, width + 3 or 4] -> its first [rows, width], figures [rows, 3]: residual of the checksum, magnitude, tag.
inline std::pair<mx::array, mx::array> checksum_read(const mx::array& wire, const mx::array& weights,
                                                     mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  if (wire.ndim() != 2 || static_cast<size_t>(wire.shape(1)) != weights.size() + (wire.dtype() == mx::float32 ? 3 : 4))
    throw std::invalid_argument("checksum_read: the wire is not one of vectors as long as the weights");
  kern_checksum_read_args args{};
  args.rows = wire.shape(0);
  args.width = static_cast<int64_t>(weights.size());
  args.type = float_type(wire.dtype(), "checksum_read");
  auto fill = [](kern_checksum_read_args& a, const Arrays& in, Arrays& out) {
    Rows wire = rows_of(in[0], out[0]);
    a.wire = wire.data;
    a.wire_stride = wire.stride;
    a.weights = in[1].data<float>();
    a.sums = data(out[0]);
    a.figures = out[1].data<float>();
  };
  const int width = static_cast<int>(weights.size());
  Arrays made = make_many<kern_checksum_read_args>(
      {{wire.shape(0), width}, {wire.shape(0), 3}}, {wire.dtype(), mx::float32}, stream, "KernChecksumRead", args, fill,
      kern_checksum_read, {wire, packed(mx::astype(weights, mx::float32, stream), stream)});
  return {made[0], made[1]};
}

// figures [sites * rows, 3], limits [sites, 2] -> flags [sites]: 0 or `flag`.
inline mx::array checksum_judge(const mx::array& figures, const mx::array& limits, const mx::array& tag, float flag,
                                mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  const int64_t sites = limits.ndim() == 2 && limits.shape(1) == 2 ? limits.shape(0) : 0;
  const int64_t rows = figures.ndim() == 2 && figures.shape(1) == 3 ? figures.shape(0) : -1;
  if (sites == 0 || rows < 0 || rows % sites != 0)
    throw std::invalid_argument("checksum_judge: figures and limits are not of the same sites");
  for (const mx::array* a : {&figures, &limits})
    if (a->dtype() != mx::float32) throw std::invalid_argument("checksum_judge: figures are float32");
  check_tag(tag);
  kern_checksum_judge_args args{};
  args.sites = sites;
  args.rows = rows / sites;
  args.flag = flag;
  auto fill = [](kern_checksum_judge_args& a, const Arrays& in, Arrays& out) {
    a.figures = in[0].data<float>();
    a.limits = in[1].data<float>();
    a.tag = in[2].data<float>();
    a.flags = out[0].data<float>();
  };
  return make<kern_checksum_judge_args>({limits.shape(0)}, mx::float32, stream, "KernChecksumJudge", args, fill,
                                        kern_checksum_judge,
                                        {packed(figures, stream), packed(limits, stream), tag});
}

}  // namespace phalanx_cpu
