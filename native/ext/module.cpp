// The Python module phalanx_cpu._ext: MLX arrays in, lazy MLX arrays out. Locked to the exact MLX it was built with.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "attention.h"
#include "checksum.h"
#include "dense.h"
#include "memory.h"
#include "gates.h"
#include "mlx/version.h"
#include "norms.h"
#include "quant.h"
#include "replay.h"
#include "rope.h"
#include "rows.h"
#include "vocabulary.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_ext, m) {
  using namespace phalanx_cpu;
  m.attr("MLX_VERSION") = std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." +
                          std::to_string(MLX_VERSION_PATCH);
  m.def("isa", [] { return std::string(kern_isa()); });
  m.def("isas", [] { return std::string(kern_isas()); });
  m.def("unbuilt", [] { return std::string(kern_unbuilt()); });
  m.def("set_threads", &kern_set_threads, "threads"_a);
  m.def("threads", &kern_threads);
  m.def("run_ahead", [](bool allowed) { Ahead::get().allow(allowed); }, "allowed"_a);
  m.def("matmul", &matmul, "a"_a, "b"_a, "bias"_a.none() = nb::none(), "stream"_a = nb::none());
  m.def("gather_mm", &gather_mm, "a"_a, "b"_a, "lhs_indices"_a, "rhs_indices"_a, "stream"_a = nb::none());
  m.def("quantized_matmul", &quantized_matmul, "x"_a, "w"_a, "scales"_a, "biases"_a = nb::none(), "transpose"_a = true,
        "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a = "affine", nb::kw_only(), "precision"_a = "exact",
        "stream"_a = nb::none());
  m.def("gather_qmm", &gather_qmm, "x"_a, "w"_a, "scales"_a, "biases"_a = nb::none(), "lhs_indices"_a = nb::none(),
        "rhs_indices"_a = nb::none(), "transpose"_a = true, "group_size"_a = nb::none(), "bits"_a = nb::none(),
        "mode"_a = "affine", nb::kw_only(), "sorted_indices"_a = false, "precision"_a = "exact",
        "stream"_a = nb::none());
  m.def("dequantize_rows", &dequantize_rows, "w"_a, "scales"_a, "biases"_a = nb::none(), "indices"_a = nb::none(),
        "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a = "affine", "dtype"_a = nb::none(), nb::kw_only(),
        "stream"_a = nb::none());
  m.def("repacks", &repacks, "rows"_a, "width"_a, "mode"_a, "group_size"_a = nb::none(), "bits"_a = nb::none());
  m.def("repack_rows", &repack_rows, "a"_a);
  m.def("factor_rows", &factor_rows, "a"_a, "out"_a);
  m.def("attention", &attention, "q"_a, "k"_a, "v"_a, nb::kw_only(), "scale"_a, "mask"_a.none() = nb::none(),
        "sinks"_a.none() = nb::none(), "lengths"_a.none() = nb::none(), "window"_a = 0, "slots"_a.none() = nb::none(),
        "stream"_a = nb::none());
  m.def("buffer", [](const std::vector<int>& shape, mx::Dtype dtype) {
    return buffer(mx::Shape(shape.begin(), shape.end()), dtype);
  }, "shape"_a, "dtype"_a);
  m.def("checksum_load", &checksum_load, "y"_a, "weights"_a, "tag"_a, "stream"_a = nb::none());
  m.def("checksum_read", &checksum_read, "wire"_a, "weights"_a, "stream"_a = nb::none());
  m.def("checksum_judge", &checksum_judge, "figures"_a, "limits"_a, "tag"_a, "flag"_a,
        "stream"_a = nb::none());
  m.def("exp_mass", &exp_mass, "x"_a, "keepdims"_a = false, "stream"_a = nb::none());
  m.def("gelu", &gelu, "gate"_a, "up"_a.none() = nb::none(), "stream"_a = nb::none());
  m.def("gelu_approx", &gelu_approx, "gate"_a, "up"_a.none() = nb::none(), "stream"_a = nb::none());
  m.def("gumbel_argmax", &gumbel_argmax, "z"_a, "keys"_a, "floors"_a, "stream"_a = nb::none());
  m.def("layer_norm", &layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a, "stream"_a = nb::none());
  m.def("logsumexp", &phalanx_cpu::logsumexp, "x"_a, "keepdims"_a = false, "stream"_a = nb::none());
  m.def("placeholder", [](const std::vector<int>& shape, mx::Dtype dtype) {
    return placeholder(mx::Shape(shape.begin(), shape.end()), dtype);
  }, "shape"_a, "dtype"_a);
  nb::class_<Call>(m, "Call").def(nb::init<Arrays, Arrays, int>(), "inputs"_a, "outputs"_a, "position"_a);
  nb::class_<Replay>(m, "Replay")
      .def(nb::init<const Call&, const Call&, Arrays>(), "low"_a, "high"_a, "buffers"_a)
      .def("run", &Replay::run, "inputs"_a, "buffers"_a, "position"_a)
      .def("__len__", &Replay::size)
      .def_prop_ro("low", &Replay::low)
      .def_prop_ro("high", &Replay::high)
      .def_prop_ro("handed", &Replay::handed);
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a.none(), "eps"_a, "stream"_a = nb::none());
  m.def("rope", &rope, "x"_a, "dims"_a, nb::kw_only(), "traditional"_a, "base"_a.none(), "scale"_a, "offset"_a,
        "freqs"_a.none() = nb::none(), "stream"_a = nb::none());
  m.def("sigmoid", &sigmoid, "x"_a, "stream"_a = nb::none());
  m.def("silu", &silu, "gate"_a, "up"_a.none() = nb::none(), "stream"_a = nb::none());
  m.def("softmax", &phalanx_cpu::softmax, "x"_a, "stream"_a = nb::none());
  m.def("swiglu_oai", &swiglu_oai, "gate"_a, "up"_a, "alpha"_a = 1.702f, "limit"_a = 7.0f, "stream"_a = nb::none());
  m.def("peaks", &peaks, "x"_a, "stream"_a = nb::none());
  m.def("arg_partition", &arg_partition, "x"_a, "kth"_a, "stream"_a = nb::none());
  m.def("top_k", &top_k, "x"_a, "k"_a, "stream"_a = nb::none());
  m.def("reserve", [](const std::vector<int>& shape, mx::Dtype dtype) {
    return Regions::get().reserve(mx::Shape(shape.begin(), shape.end()), dtype);
  }, "shape"_a, "dtype"_a);
  m.def("clear_row", [](const mx::array& region, int row) { Regions::get().clear(region, row); }, "region"_a, "row"_a);
  m.def("swap_rows", [](const mx::array& region, int a, int b, int length) {
    Regions::get().swap(region, a, b, length);
  }, "region"_a, "a"_a, "b"_a, "length"_a);
  m.def("write_rows", &write_rows, "region"_a, "news"_a, "starts"_a, "first"_a, "slots"_a.none() = nb::none(),
        "stream"_a = nb::none());
}
