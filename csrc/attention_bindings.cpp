// Attention for Python. Shapes and indices are checked here, so that no call can leave its buffers.
#include "attention_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "attention.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace layby {
namespace {

template <class T, int N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using AnyMatrix = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Pool = Out<std::uint8_t, 2>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

KvLayout make_layout(const std::string& dtype, int num_layers, int num_kv_heads, int head_dim,
                     int block_size) {
  KvLayout layout{KvType::int8, num_layers, num_kv_heads, head_dim, block_size};
  if (dtype == "bfloat16") {
    layout.type = KvType::bfloat16;
  } else if (dtype == "float32") {
    layout.type = KvType::float32;
  } else {
    require(dtype == "int8", "the KV cache holds int8, bfloat16 or float32");
  }
  require(num_layers > 0 && num_kv_heads > 0, "a KV cache has layers and heads");
  require(head_dim > 0 && head_dim % kGroupTokens == 0 && head_dim <= kMaxHeadDim,
          "head_dim must be a multiple of 16, 256 at most");
  require(block_size > 0 && block_size % kGroupTokens == 0, "block_size must be a multiple of 16");
  return layout;
}

void check_pool(const KvLayout& layout, const Pool& pool, int layer) {
  require(pool.shape(1) == layout.block_bytes(), "pool must be [num_blocks, block_bytes]");
  require(layer >= 0 && layer < layout.num_layers, "there is no such layer");
}

// int8 queries come with scales and go with an int8 cache; float32 ones with the others.
void check_queries(const KvLayout& layout, const AnyMatrix& queries,
                   const std::optional<Out<float, 2>>& scales, std::size_t rows, int num_heads) {
  const bool quantised = layout.type == KvType::int8;
  require(queries.dtype() == (quantised ? nb::dtype<std::int8_t>() : nb::dtype<float>()),
          "queries must be int8 for an int8 cache, else float32");
  require(queries.shape(0) == rows &&
              queries.shape(1) == static_cast<std::size_t>(num_heads) * layout.head_dim,
          "queries must be [rows, num_heads * head_dim]");
  require(scales.has_value() == quantised, "query_scales go with an int8 cache");
  require(!scales || (scales->shape(0) == rows &&
                      scales->shape(1) == static_cast<std::size_t>(num_heads)),
          "query_scales must be [rows, num_heads]");
}

void bound_rope_write(const KvLayout& layout, Pool pool, int layer, In<float, 2> qkv,
                      In<std::int64_t, 1> positions, In<float, 2> cos_sin,
                      In<std::int64_t, 1> slots, AnyMatrix queries,
                      std::optional<Out<float, 2>> query_scales,
                      std::optional<In<float, 1>> query_norm,
                      std::optional<In<float, 1>> key_norm, float norm_eps) {
  const std::size_t rows = qkv.shape(0), dim = layout.head_dim, kv_heads = layout.num_kv_heads;
  check_pool(layout, pool, layer);
  require(qkv.shape(1) % dim == 0 && qkv.shape(1) > 2 * kv_heads * dim,
          "qkv must be [rows, (num_heads + 2 * num_kv_heads) * head_dim]");
  const int num_heads = static_cast<int>(qkv.shape(1) / dim - 2 * kv_heads);
  check_queries(layout, queries, query_scales, rows, num_heads);
  require(positions.shape(0) == rows && slots.shape(0) == rows,
          "positions and slots need one number per row");
  require(cos_sin.shape(1) == dim, "cos_sin must be [positions, head_dim]");
  require(!query_norm || query_norm->shape(0) == dim, "query_norm must be [head_dim]");
  require(!key_norm || key_norm->shape(0) == dim, "key_norm must be [head_dim]");
  const auto num_positions = static_cast<std::int64_t>(cos_sin.shape(0));
  const auto num_slots = static_cast<std::int64_t>(pool.shape(0)) * layout.block_size;
  for (std::size_t row = 0; row < rows; ++row) {
    require(positions.data()[row] >= 0 && positions.data()[row] < num_positions,
            "a position is outside cos_sin");
    require(slots.data()[row] < num_slots, "a slot is outside the pool");
  }

  RopeWrite job{};
  job.qkv = qkv.data();
  job.row_stride = static_cast<std::ptrdiff_t>(qkv.shape(1));
  job.positions = positions.data();
  job.cos_sin = cos_sin.data();
  job.slots = slots.data();
  job.query_norm = query_norm ? query_norm->data() : nullptr;
  job.key_norm = key_norm ? key_norm->data() : nullptr;
  job.norm_eps = norm_eps;
  job.num_heads = num_heads;
  if (query_scales) {
    job.quantised = static_cast<std::int8_t*>(queries.data());
    job.scales = query_scales->data();
  } else {
    job.floats = static_cast<float*>(queries.data());
  }
  nb::gil_scoped_release release;
  rope_write(job, layout, pool.data(), layer, rows);
}

void bound_attend(const AttentionBatch& batch, Pool pool, int layer, AnyMatrix queries,
                  std::optional<Out<float, 2>> query_scales, Out<float, 2> out) {
  const KvLayout& layout = batch.layout();
  check_pool(layout, pool, layer);
  require(pool.shape(0) >= batch.num_blocks(), "the pool has fewer blocks than the batch knows");
  const std::size_t rows = out.shape(0);
  require(rows >= static_cast<std::size_t>(batch.num_rows()), "the batch has more rows than out");
  require(out.shape(1) == static_cast<std::size_t>(batch.num_heads()) * layout.head_dim,
          "out must be [rows, num_heads * head_dim]");
  check_queries(layout, queries, query_scales, rows, batch.num_heads());
  Queries q{};
  q.num_heads = batch.num_heads();
  if (query_scales) {
    q.quantised = static_cast<const std::int8_t*>(queries.data());
    q.scales = query_scales->data();
  } else {
    q.floats = static_cast<const float*>(queries.data());
  }
  nb::gil_scoped_release release;
  batch.attend(pool.data(), layer, q, out.data());
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<KvLayout>(m, "KvLayout", "Where things lie in a pool of KV blocks.")
      .def(nb::new_(&make_layout), "dtype"_a, nb::kw_only(), "num_layers"_a, "num_kv_heads"_a,
           "head_dim"_a, "block_size"_a)
      .def_prop_ro("block_bytes", &KvLayout::block_bytes);

  // Without conversion: what is written into a converted copy would be lost.
  m.def("rope_write", &bound_rope_write, "layout"_a, "pool"_a.noconvert(), "layer"_a,
        "qkv"_a.noconvert(), "positions"_a.noconvert(), "cos_sin"_a.noconvert(),
        "slots"_a.noconvert(), "queries"_a.noconvert(),
        "query_scales"_a.none().noconvert() = nb::none(),
        "query_norm"_a.none().noconvert() = nb::none(),
        "key_norm"_a.none().noconvert() = nb::none(), "norm_eps"_a = 0.0f,
        "Rotate queries and keys; write keys and values into the pool and queries into `queries`.\n"
        "A row whose slot is negative is not stored.");

  nb::class_<AttentionBatch>(m, "AttentionBatch", "What all layers of one step share.")
      .def(
          "__init__",
          [](AttentionBatch* self, const KvLayout& layout, int num_heads, std::size_t num_blocks,
             In<std::int32_t, 1> first_rows, In<std::int32_t, 1> num_rows,
             In<std::int32_t, 1> starts, In<std::int32_t, 2> block_tables) {
            const std::size_t spans = first_rows.shape(0);
            require(num_rows.shape(0) == spans && starts.shape(0) == spans &&
                        block_tables.shape(0) == spans,
                    "first_rows, num_rows, starts and block_tables differ in length");
            new (self) AttentionBatch(layout, num_heads, num_blocks, first_rows.data(),
                                      num_rows.data(), starts.data(), block_tables.data(), spans,
                                      block_tables.shape(1));
          },
          "layout"_a, nb::kw_only(), "num_heads"_a, "num_blocks"_a, "first_rows"_a.noconvert(),
          "num_rows"_a.noconvert(), "starts"_a.noconvert(), "block_tables"_a.noconvert())
      .def("attend", &bound_attend, "pool"_a.noconvert(), "layer"_a, "queries"_a.noconvert(),
           "query_scales"_a.none().noconvert(), "out"_a.noconvert());
}

}  // namespace layby
