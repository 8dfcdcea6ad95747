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

// Panels per chunk, so that a chunk takes a few microseconds: reading a panel is the work when rows
// are few, multiplying when they are many.
std::size_t panels_per_chunk(std::size_t panel_bytes, std::size_t rows) {
  constexpr std::size_t kChunkWork = 64 * 1024;
  return std::max<std::size_t>(1, kChunkWork / (panel_bytes * (1 + rows / 16) + 1));
}

}  // namespace

std::size_t packed_int8_bytes(std::size_t n, std::size_t k) {
  return groups_of(n, kPanel) * int8_panel_bytes(k);
}

void quantise_weight(const float* w, std::uint8_t* packed, float* scale, std::size_t n,
                     std::size_t k) {
  const ElementwiseKernels& rows = elementwise_kernels();
  const std::size_t k_groups = groups_of(k, 4);
  parallel_for(groups_of(n, kPanel), [&](std::size_t panel) {
    std::vector<std::int8_t> q(k_groups * 4);
    std::uint8_t* out = packed + panel * int8_panel_bytes(k);
    std::memset(out, 128, int8_panel_bytes(k));
    for (std::size_t c = 0; c < kPanel && panel * kPanel + c < n; ++c) {
      const std::size_t channel = panel * kPanel + c;
      rows.quantise_rows(w + channel * k, q.data(), scale + channel, k, 0, 1);
      for (std::size_t g = 0; g < k_groups; ++g) {
        for (std::size_t i = 0; i < 4; ++i) {
          out[(g * kPanel + c) * 4 + i] = static_cast<std::uint8_t>(q[g * 4 + i] + 128);
        }
      }
    }
  });
}

void linear_int8(const std::int8_t* x, std::size_t ldx, const float* x_scale,
                 const std::uint8_t* w, const float* w_scale, const float* bias, float* out,
                 std::size_t ldo, std::size_t m, std::size_t n, std::size_t k) {
  if (m == 0 || n == 0) return;
  const GemmKernels& kernels = gemm_kernels();
  const std::size_t k_groups = groups_of(k, 4);
  thread_local std::vector<std::int32_t> sums;
  thread_local std::vector<std::int8_t> padded;
  if (k % 4 != 0) {
    padded.assign(m * k_groups * 4, 0);
    for (std::size_t row = 0; row < m; ++row) {
      std::memcpy(padded.data() + row * k_groups * 4, x + row * ldx, k);
    }
    x = padded.data();
    ldx = k_groups * 4;
  }
  sums.resize(m);
  kernels.row_sums(x, ldx, m, k, sums.data());
  const Int8Product product{x, sums.data(), x_scale, w, w_scale, bias, out, n, k_groups, ldx, ldo};

  const std::size_t blocks = groups_of(m, kRowBlock);
  const std::size_t panels = groups_of(n, kPanel);
  const std::size_t grain = panels_per_chunk(int8_panel_bytes(k), std::min(m, kRowBlock));
  const std::size_t chunks = groups_of(panels, grain);
  parallel_for(blocks * chunks, [&](std::size_t index) {
    const std::size_t block = index / chunks, panel = index % chunks * grain;
    kernels.int8_product(product, m * block / blocks, m * (block + 1) / blocks, panel,
                         std::min(panel + grain, panels));
  });
}

}  // namespace layby
