// Packing of weights, and the cutting of a product into chunks for the threads.
#include "gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "elementwise.h"
#include "thread_pool.h"

namespace layby {
namespace {

// Rows that go through one panel of weights before the next panel is fetched.
constexpr std::size_t kRowBlock = 240;

// Cuts a product of m rows into chunks of a few microseconds: fn(row, row_end, panel, panel_end).
// Reading a panel is the work when rows are few, multiplying when they are many.
template <class Fn>
void each_chunk(std::size_t m, std::size_t n, std::size_t panel_bytes, Fn fn) {
  constexpr std::size_t kChunkWork = 64 * 1024;  // bytes of panels, at 16 rows or fewer
  const std::size_t blocks = groups_of(m, kRowBlock), panels = groups_of(n, kPanel);
  const std::size_t panel_work = panel_bytes * (1 + groups_of(m, blocks) / 16);
  const std::size_t grain = std::max<std::size_t>(1, kChunkWork / (panel_work + 1));
  const std::size_t chunks = groups_of(panels, grain);
  parallel_for(blocks * chunks, [&](std::size_t index) {
    const std::size_t block = index / chunks, panel = index % chunks * grain;
    fn(m * block / blocks, m * (block + 1) / blocks, panel, std::min(panel + grain, panels));
  });
}

// Rows [m, k] copied one after the other, each filled with zeros to a multiple of `group`.
template <class T, class From>
const T* padded_rows(std::vector<T>& rows, const From* x, std::size_t m, std::size_t k,
                     std::size_t group, T (*convert)(From)) {
  const std::size_t width = groups_of(k, group) * group;
  rows.resize(m * width);
  for (std::size_t row = 0; row < m; ++row) {
    T* out = rows.data() + row * width;
    for (std::size_t i = 0; i < k; ++i) out[i] = convert(x[row * k + i]);
    std::fill(out + k, out + width, T{0});
  }
  return rows.data();
}

// To the nearest bfloat16, to even on a tie; what is not a number stays one.
std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<std::uint16_t>(value != value ? 0x7fc0 : rounded);
}

// w [n, k] to panels in which `group` numbers of k lie together; see gemm.h.
template <class T>
void pack(const T* w, T* packed, std::size_t n, std::size_t k, std::size_t group) {
  const std::size_t size = groups_of(k, group) * group * kPanel;
  parallel_for(groups_of(n, kPanel), [&](std::size_t panel) {
    T* out = packed + panel * size;
    std::memset(out, 0, size * sizeof(T));
    for (std::size_t c = 0; c < kPanel && panel * kPanel + c < n; ++c) {
      const T* channel = w + (panel * kPanel + c) * k;
      for (std::size_t i = 0; i < k; ++i) {
        out[(i / group * kPanel + c) * group + i % group] = channel[i];
      }
    }
  });
}

std::size_t packed_size(std::size_t n, std::size_t k, std::size_t group) {
  return groups_of(n, kPanel) * kPanel * groups_of(k, group) * group;
}

}  // namespace

std::size_t packed_int8_size(std::size_t n, std::size_t k) { return packed_size(n, k, 4); }
std::size_t packed_bf16_size(std::size_t n, std::size_t k) { return packed_size(n, k, 2); }
std::size_t packed_f32_size(std::size_t n, std::size_t k) { return packed_size(n, k, 1); }

void quantise_weight(const float* w, std::uint8_t* packed, float* scale, std::size_t n,
                     std::size_t k) {
  const ElementwiseKernels& kernels = elementwise_kernels();
  const std::size_t size = packed_int8_size(1, k);
  parallel_for(groups_of(n, kPanel), [&](std::size_t panel) {
    std::vector<std::int8_t> q(k);
    std::uint8_t* out = packed + panel * size;
    std::memset(out, 128, size);
    for (std::size_t c = 0; c < kPanel && panel * kPanel + c < n; ++c) {
      const std::size_t channel = panel * kPanel + c;
      kernels.quantise_rows(w + channel * k, q.data(), scale + channel, k, 0, 1);
      for (std::size_t i = 0; i < k; ++i) {
        out[(i / 4 * kPanel + c) * 4 + i % 4] = static_cast<std::uint8_t>(q[i] + 128);
      }
    }
  });
}

void pack_bf16(const std::uint16_t* w, std::uint16_t* packed, std::size_t n, std::size_t k) {
  pack(w, packed, n, k, 2);
}

void pack_f32(const float* w, float* packed, std::size_t n, std::size_t k) {
  pack(w, packed, n, k, 1);
}

void linear_int8(const std::int8_t* x, const float* x_scale, const std::uint8_t* w,
                 const float* w_scale, const float* bias, float* out, std::size_t m,
                 std::size_t n, std::size_t k) {
  if (m == 0 || n == 0) return;
  const GemmKernels& kernels = gemm_kernels();
  const std::size_t groups = groups_of(k, 4);
  thread_local std::vector<std::int32_t> sums;
  thread_local std::vector<std::int8_t> rows;
  if (k % 4 != 0) {
    x = padded_rows<std::int8_t, std::int8_t>(rows, x, m, k, 4, [](std::int8_t v) { return v; });
  }
  sums.resize(m);
  kernels.row_sums(x, groups * 4, m, groups * 4, sums.data());
  const Int8Product product{x,    sums.data(), x_scale, w,          w_scale, bias,
                            out,  n,           groups,  groups * 4, n};
  each_chunk(m, n, packed_int8_size(1, k), [&](auto... part) {
    kernels.int8_product(product, part...);
  });
}

void linear_bf16(const float* x, const std::uint16_t* w, const float* bias, float* out,
                 std::size_t m, std::size_t n, std::size_t k) {
  if (m == 0 || n == 0) return;
  const GemmKernels& kernels = gemm_kernels();
  const std::size_t groups = groups_of(k, 2);
  thread_local std::vector<std::uint16_t> rows;
  const std::uint16_t* rounded = padded_rows<std::uint16_t, float>(rows, x, m, k, 2, to_bf16);
  const FloatProduct<std::uint16_t> product{rounded, w, bias, out, n, groups, groups * 2, n};
  each_chunk(m, n, packed_bf16_size(1, k) * 2, [&](auto... part) {
    kernels.bf16_product(product, part...);
  });
}

void linear_f32(const float* x, const float* w, const float* bias, float* out, std::size_t m,
                std::size_t n, std::size_t k) {
  if (m == 0 || n == 0) return;
  const GemmKernels& kernels = gemm_kernels();
  const FloatProduct<float> product{x, w, bias, out, n, k, k, n};
  each_chunk(m, n, packed_f32_size(1, k) * 4, [&](auto... part) {
    kernels.f32_product(product, part...);
  });
}

}  // namespace layby
