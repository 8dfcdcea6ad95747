// layby._kernels: the kernels as Python functions on plain CPU buffers. Shapes are checked here;
// src/layby/kernels holds the friendly side.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "attention_bindings.h"
#include "dispatch.h"
#include "elementwise.h"
#include "gemm.h"
#include "sampling.h"
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

// An argument that is passed on as it is: a converted copy costs time and loses what is written.
auto array(const char* name) { return nb::arg(name).noconvert(); }

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

void require_size(const char* name, std::size_t size, std::size_t expected) {
  require(size == expected, std::string(name) + " has length " + std::to_string(size) + ", not " +
                                std::to_string(expected));
}

template <class Array>
void require_shape(const char* name, const Array& given, std::size_t rows, std::size_t columns) {
  require(given.shape(0) == rows && given.shape(1) == columns,
          std::string(name) + " has shape [" + std::to_string(given.shape(0)) + ", " +
              std::to_string(given.shape(1)) + "], not [" + std::to_string(rows) + ", " +
              std::to_string(columns) + "]");
}

template <class Array>
auto data_of(const std::optional<Array>& given) {
  return given ? given->data() : nullptr;
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
  m.def("packed_int8_size", &packed_int8_size, "n"_a, "k"_a);
  m.def("packed_bf16_size", &packed_bf16_size, "n"_a, "k"_a);
  m.def("packed_f32_size", &packed_f32_size, "n"_a, "k"_a);
  m.def("quantise_weight",
        [](In<float, Matrix> w, Out<std::uint8_t, Vector> packed, Out<float, Vector> scale) {
          const std::size_t n = w.shape(0), k = w.shape(1);
          require_size("packed", packed.shape(0), packed_int8_size(n, k));
          require_size("scale", scale.shape(0), n);
          nb::gil_scoped_release release;
          quantise_weight(w.data(), packed.data(), scale.data(), n, k);
        },
        array("w"), array("packed"), array("scale"));
  m.def("pack_bf16",
        [](In<std::uint16_t, Matrix> w, Out<std::uint16_t, Vector> packed) {
          const std::size_t n = w.shape(0), k = w.shape(1);
          require_size("packed", packed.shape(0), packed_bf16_size(n, k));
          nb::gil_scoped_release release;
          pack_bf16(w.data(), packed.data(), n, k);
        },
        array("w"), array("packed"));
  m.def("pack_f32",
        [](In<float, Matrix> w, Out<float, Vector> packed) {
          const std::size_t n = w.shape(0), k = w.shape(1);
          require_size("packed", packed.shape(0), packed_f32_size(n, k));
          nb::gil_scoped_release release;
          pack_f32(w.data(), packed.data(), n, k);
        },
        array("w"), array("packed"));
  m.def("linear_int8",
        [](In<std::int8_t, Matrix> x, In<float, Vector> x_scale, In<std::uint8_t, Vector> w,
           In<float, Vector> w_scale, std::optional<In<float, Vector>> bias,
           Out<float, Matrix> out) {
          const std::size_t rows = x.shape(0), k = x.shape(1), n = w_scale.shape(0);
          // 127 * 127 * k must fit the 32-bit sum.
          require(k <= 131072, "x has " + std::to_string(k) + " columns, more than 131072");
          require_size("w", w.shape(0), packed_int8_size(n, k));
          require_size("x_scale", x_scale.shape(0), rows);
          if (bias) require_size("bias", bias->shape(0), n);
          require_shape("out", out, rows, n);
          nb::gil_scoped_release release;
          linear_int8(x.data(), x_scale.data(), w.data(), w_scale.data(), data_of(bias),
                      out.data(), rows, n, k);
        },
        array("x"), array("x_scale"), array("w"), array("w_scale"), array("bias").none(),
        array("out"));
  m.def("linear_bf16",
        [](In<float, Matrix> x, In<std::uint16_t, Vector> w, std::optional<In<float, Vector>> bias,
           Out<float, Matrix> out) {
          const std::size_t rows = x.shape(0), k = x.shape(1), n = out.shape(1);
          require_size("w", w.shape(0), packed_bf16_size(n, k));
          if (bias) require_size("bias", bias->shape(0), n);
          require_shape("out", out, rows, n);
          nb::gil_scoped_release release;
          linear_bf16(x.data(), w.data(), data_of(bias), out.data(), rows, n, k);
        },
        array("x"), array("w"), array("bias").none(), array("out"));
  m.def("linear_f32",
        [](In<float, Matrix> x, In<float, Vector> w, std::optional<In<float, Vector>> bias,
           Out<float, Matrix> out) {
          const std::size_t rows = x.shape(0), k = x.shape(1), n = out.shape(1);
          require_size("w", w.shape(0), packed_f32_size(n, k));
          if (bias) require_size("bias", bias->shape(0), n);
          require_shape("out", out, rows, n);
          nb::gil_scoped_release release;
          linear_f32(x.data(), w.data(), data_of(bias), out.data(), rows, n, k);
        },
        array("x"), array("w"), array("bias").none(), array("out"));
}

void bind_elementwise(nb::module_& m) {
  m.def("quantise_rows",
        [](In<float, Matrix> x, Out<std::int8_t, Matrix> q, Out<float, Vector> scale) {
          const std::size_t rows = x.shape(0), width = x.shape(1);
          require_shape("q", q, rows, width);
          require_size("scale", scale.shape(0), rows);
          nb::gil_scoped_release release;
          quantise_rows(x.data(), q.data(), scale.data(), rows, width);
        },
        array("x"), array("q"), array("scale"));
  m.def("add_rms_norm",
        [](Out<float, Matrix> residual, std::optional<In<float, Matrix>> delta,
           In<float, Vector> weight, float eps, Out<float, Matrix> out) {
          const std::size_t rows = residual.shape(0), width = residual.shape(1);
          if (delta) require_shape("delta", *delta, rows, width);
          require_size("weight", weight.shape(0), width);
          require_shape("out", out, rows, width);
          nb::gil_scoped_release release;
          add_rms_norm(residual.data(), data_of(delta), weight.data(), eps, out.data(), nullptr,
                       nullptr, rows, width);
        },
        array("residual"), array("delta").none(), array("weight"), "eps"_a, array("out"));
  m.def("add_rms_norm_quant",
        [](Out<float, Matrix> residual, std::optional<In<float, Matrix>> delta,
           In<float, Vector> weight, float eps, Out<std::int8_t, Matrix> q,
           Out<float, Vector> scale) {
          const std::size_t rows = residual.shape(0), width = residual.shape(1);
          if (delta) require_shape("delta", *delta, rows, width);
          require_size("weight", weight.shape(0), width);
          require_shape("q", q, rows, width);
          require_size("scale", scale.shape(0), rows);
          nb::gil_scoped_release release;
          add_rms_norm(residual.data(), data_of(delta), weight.data(), eps, nullptr, q.data(),
                       scale.data(), rows, width);
        },
        array("residual"), array("delta").none(), array("weight"), "eps"_a, array("q"),
        array("scale"));
  m.def("silu_mul",
        [](Out<float, Matrix> gate_up, Out<float, Matrix> out) {
          const std::size_t rows = gate_up.shape(0), width = gate_up.shape(1) / 2;
          require_shape("gate_up", gate_up, rows, 2 * width);
          require_shape("out", out, rows, width);
          nb::gil_scoped_release release;
          silu_mul(gate_up.data(), out.data(), nullptr, nullptr, rows, width);
        },
        array("gate_up"), array("out"));
  m.def("silu_mul_quant",
        [](Out<float, Matrix> gate_up, Out<std::int8_t, Matrix> q, Out<float, Vector> scale) {
          const std::size_t rows = gate_up.shape(0), width = gate_up.shape(1) / 2;
          require_shape("gate_up", gate_up, rows, 2 * width);
          require_shape("q", q, rows, width);
          require_size("scale", scale.shape(0), rows);
          nb::gil_scoped_release release;
          silu_mul(gate_up.data(), nullptr, q.data(), scale.data(), rows, width);
        },
        array("gate_up"), array("q"), array("scale"));
  m.def("exp",
        [](In<float, Vector> x, Out<float, Vector> out) {
          require_size("out", out.shape(0), x.shape(0));
          nb::gil_scoped_release release;
          elementwise_kernels().exp(x.data(), out.data(), x.shape(0));
        },
        array("x"), array("out"));
}

void bind_sampling(nb::module_& m) {
  m.def("choose_tokens",
        [](In<float, Matrix> logits, In<float, Vector> temperature, In<std::int64_t, Vector> top_k,
           In<double, Vector> top_p, In<float, Vector> min_p, In<double, Vector> uniforms,
           Out<std::int64_t, Vector> tokens, Out<bool, Vector> faulty) {
          const std::size_t rows = logits.shape(0), vocab = logits.shape(1);
          require(rows == 0 || (vocab >= 1 && vocab < std::size_t{1} << 31),
                  "logits has " + std::to_string(vocab) + " columns, not 1 to 2^31 - 1");
          require_size("temperature", temperature.shape(0), rows);
          require_size("top_k", top_k.shape(0), rows);
          require_size("top_p", top_p.shape(0), rows);
          require_size("min_p", min_p.shape(0), rows);
          require_size("uniforms", uniforms.shape(0), rows);
          require_size("tokens", tokens.shape(0), rows);
          require_size("faulty", faulty.shape(0), rows);
          const SamplingParameters parameters{temperature.data(), top_k.data(), top_p.data(),
                                              min_p.data(), uniforms.data()};
          nb::gil_scoped_release release;
          choose_tokens(logits.data(), parameters, tokens.data(), faulty.data(), rows, vocab);
        },
        array("logits"), array("temperature"), array("top_k"), array("top_p"), array("min_p"),
        array("uniforms"), array("tokens"), array("faulty"));
}

}  // namespace
}  // namespace layby

NB_MODULE(_kernels, m) {
  layby::bind_machine(m);
  layby::bind_gemm(m);
  layby::bind_elementwise(m);
  layby::bind_attention(m);
  layby::bind_sampling(m);
  nb::module_::import_("atexit").attr("register")(m.attr("shut_down_threads"));
}
