// layby._kernels: the kernels as Python functions on plain CPU buffers. Shapes are checked here;
// src/layby/kernels holds the friendly side.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "dispatch.h"
#include "elementwise.h"
#include "gemm.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace layby {
namespace {

template <class T, class Shape>
using In = nb::ndarray<const T, Shape, nb::c_contig, nb::device::cpu>;
template <class T, class Shape>
using Out = nb::ndarray<T, Shape, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndim<1>;
using Matrix = nb::ndim<2>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

void bind_machine(nb::module_& m) {
  m.def("cpu_features", &cpu_features);
  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (Isa isa : available_isas()) names.emplace_back(name_of(isa));
    return names;
  });
  m.def("isa", [] { return std::string(name_of(current_isa())); });
  m.def("set_isa", [](const std::string& name) {
    for (Isa isa : available_isas()) {
      if (name == name_of(isa)) return set_isa(isa);
    }
    throw std::invalid_argument("this processor has no instruction set '" + name + "'");
  }, "name"_a);
  m.def("num_threads", &num_threads, nb::call_guard<nb::gil_scoped_release>());
  m.def("set_num_threads", [](int count) {
    require(count >= 1 && count <= 1024, "the number of threads must be from 1 to 1024");
    nb::gil_scoped_release release;
    set_num_threads(count);
  }, "count"_a);
  m.def("shut_down_threads", &shut_down_threads, nb::call_guard<nb::gil_scoped_release>());
}

void bind_gemm(nb::module_& m) {
  m.def("packed_int8_bytes", &packed_int8_bytes, "n"_a, "k"_a);
  m.def("quantise_weight",
        [](In<float, Matrix> w, Out<std::uint8_t, Vector> packed, Out<float, Vector> scale) {
          const std::size_t n = w.shape(0), k = w.shape(1);
          require(packed.shape(0) == packed_int8_bytes(n, k), "packed has the wrong size");
          require(scale.shape(0) == n, "scale needs one number per row of w");
          nb::gil_scoped_release release;
          quantise_weight(w.data(), packed.data(), scale.data(), n, k);
        }, "w"_a, "packed"_a, "scale"_a);
  m.def("linear_int8",
        [](In<std::int8_t, Matrix> x, In<float, Vector> x_scale, In<std::uint8_t, Vector> w,
           In<float, Vector> w_scale, std::optional<In<float, Vector>> bias,
           Out<float, Matrix> out) {
          const std::size_t rows = x.shape(0), k = x.shape(1), n = w_scale.shape(0);
          require(w.shape(0) == packed_int8_bytes(n, k), "the packed weight is not [n, k]");
          require(x_scale.shape(0) == rows, "x_scale needs one number per row of x");
          require(!bias || bias->shape(0) == n, "bias needs one number per output channel");
          require(out.shape(0) == rows && out.shape(1) == n, "out must be [rows of x, n]");
          nb::gil_scoped_release release;
          linear_int8(x.data(), k, x_scale.data(), w.data(), w_scale.data(),
                      bias ? bias->data() : nullptr, out.data(), n, rows, n, k);
        }, "x"_a, "x_scale"_a, "w"_a, "w_scale"_a, "bias"_a.none(), "out"_a);
}

}  // namespace
}  // namespace layby

NB_MODULE(_kernels, m) {
  layby::bind_machine(m);
  layby::bind_gemm(m);
  nb::module_::import_("atexit").attr("register")(m.attr("shut_down_threads"));
}
