// Operations of kern/checksum.h.
#pragma once
#include "kern/checksum.h"
#include "layout.h"

namespace phalanx_cpu {

// y [rows, width], weights [width] or [width, 1] -> wire [rows, width + 2 or 3], squares [rows].
inline std::pair<mx::array, mx::array> checksum_load(const mx::array& y, const mx::array& weights, float tag,
                                                     mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  if (y.ndim() != 2 || weights.size() != static_cast<size_t>(y.shape(1)))
    throw std::invalid_argument("checksum_load: y must be [rows, width], weights [width]");
  kern_checksum_load_args args{};
  args.rows = y.shape(0);
  args.width = y.shape(1);
  args.tag = tag;
  args.type = float_type(y.dtype(), "checksum_load");
  auto fill = [](kern_checksum_load_args& a, const Arrays& in, Arrays& out) {
    Rows y = rows_of(in[0], out[0]);
    a.y = y.data;
    a.y_stride = y.stride;
    a.weights = in[1].data<float>();
    a.wire = data(out[0]);
    a.squares = out[1].data<float>();
  };
  int wide = y.shape(1) + (y.dtype() == mx::float32 ? 2 : 3);
  Arrays made = make_many<kern_checksum_load_args>(
      {{y.shape(0), wide}, {y.shape(0)}}, {y.dtype(), mx::float32}, stream, "KernChecksumLoad", args, fill,
      kern_checksum_load, {y, packed(mx::astype(weights, mx::float32, stream), stream)});
  return {made[0], made[1]};
}

// wire [rows, width + 2 or 3] -> figures [rows, 2]: residual of the checksum, tag.
inline mx::array checksum_read(const mx::array& wire, const mx::array& weights, mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  if (wire.ndim() != 2 || static_cast<size_t>(wire.shape(1)) != weights.size() + (wire.dtype() == mx::float32 ? 2 : 3))
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
    a.figures = out[0].data<float>();
  };
  return make<kern_checksum_read_args>({wire.shape(0), 2}, mx::float32, stream, "KernChecksumRead", args, fill,
                                       kern_checksum_read,
                                       {wire, packed(mx::astype(weights, mx::float32, stream), stream)});
}

}  // namespace phalanx_cpu
