// Matrix products with weights packed beforehand. A result row depends on its input row alone: its
// sum over k is taken in one order, whatever the number of rows and threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace layby {

// A panel is kPanel output channels, side by side for every step of k:
//
//   int8   [N / 32][K / 4][32][4]  u8, the weight plus 128
//   bf16   [N / 32][K / 2][32][2]  bf16
//   f32    [N / 32][K    ][32]     f32
//
// N is rounded up to whole panels and K to whole groups, filled with weights of zero.
constexpr std::size_t kPanel = 32;

inline std::size_t groups_of(std::size_t count, std::size_t size) {
  return (count + size - 1) / size;
}
inline std::size_t int8_panel_bytes(std::size_t k) { return groups_of(k, 4) * kPanel * 4; }

// One int8 product: out[m, n] = (sum over k of x[m, k] * w[n, k]) * x_scale[m] * w_scale[n] + bias[n].
struct Int8Product {
  const std::int8_t* x;      // [M, ldx], zero from K up to the next multiple of 4
  const std::int32_t* x_sum;  // [M], sum of each row of x
  const float* x_scale;      // [M]
  const std::uint8_t* w;     // packed
  const float* w_scale;      // [N]
  const float* bias;         // [N] or null
  float* out;                // [M, ldo]
  std::size_t n, k_groups, ldx, ldo;
};

// One product in floating point, out = x * w^T + bias, summed in float32.
struct FloatProduct {
  const float* x;      // [M, ldx]; for bf16 weights K is even, or x is zero one place beyond
  const void* w;       // packed
  const float* bias;   // [N] or null
  float* out;          // [M, ldo]
  std::size_t n, k_groups, ldx, ldo;
};

struct GemmKernels {
  void (*row_sums)(const std::int8_t* x, std::size_t ldx, std::size_t rows, std::size_t k,
                   std::int32_t* sums);
  // Rows [row, row_end) times panels [panel, panel_end).
  void (*int8_product)(const Int8Product& product, std::size_t row, std::size_t row_end,
                       std::size_t panel, std::size_t panel_end);
};

LAYBY_DISPATCH(GemmKernels, gemm_kernels)

std::size_t packed_int8_bytes(std::size_t n, std::size_t k);

// w [n, k] -> packed weights and scale [n], symmetric, one scale per output channel.
void quantise_weight(const float* w, std::uint8_t* packed, float* scale, std::size_t n,
                     std::size_t k);

void linear_int8(const std::int8_t* x, std::size_t ldx, const float* x_scale,
                 const std::uint8_t* w, const float* w_scale, const float* bias, float* out,
                 std::size_t ldo, std::size_t m, std::size_t n, std::size_t k);

}  // namespace layby
