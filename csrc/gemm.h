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

// Static: a copy that was compiled for one instruction set must not serve another.
static inline std::size_t groups_of(std::size_t count, std::size_t size) {
  return (count + size - 1) / size;
}

// One int8 product:
// out[m, n] = (sum over k of x[m, k] * w[n, k]) * (x_scale[m] * w_scale[n]) + bias[n].
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

// One product of floating-point weights: out[m, n] = (sum over k of x[m, k] * w[n, k]) + bias[n],
// summed in float32 in rising k. X is float, or std::uint16_t for bfloat16.
template <class X>
struct FloatProduct {
  const X* x;         // [M, ldx], zero from K up to the next whole group
  const X* w;         // packed
  const float* bias;  // [N] or null
  float* out;         // [M, ldo]
  std::size_t n, k_groups, ldx, ldo;
};

struct GemmKernels {
  void (*row_sums)(const std::int8_t* x, std::size_t ldx, std::size_t rows, std::size_t k,
                   std::int32_t* sums);
  // Rows [row, row_end) times panels [panel, panel_end).
  void (*int8_product)(const Int8Product& product, std::size_t row, std::size_t row_end,
                       std::size_t panel, std::size_t panel_end);
  void (*bf16_product)(const FloatProduct<std::uint16_t>& product, std::size_t row,
                       std::size_t row_end, std::size_t panel, std::size_t panel_end);
  void (*f32_product)(const FloatProduct<float>& product, std::size_t row, std::size_t row_end,
                      std::size_t panel, std::size_t panel_end);
};

LAYBY_DISPATCH(GemmKernels, gemm_kernels)

// Sizes of packed weights: bytes, and numbers.
std::size_t packed_int8_size(std::size_t n, std::size_t k);
std::size_t packed_bf16_size(std::size_t n, std::size_t k);
std::size_t packed_f32_size(std::size_t n, std::size_t k);

// w [n, k] -> packed weights and scale [n], symmetric, one scale per output channel.
void quantise_weight(const float* w, std::uint8_t* packed, float* scale, std::size_t n,
                     std::size_t k);
void pack_bf16(const std::uint16_t* w, std::uint16_t* packed, std::size_t n, std::size_t k);
void pack_f32(const float* w, float* packed, std::size_t n, std::size_t k);

// All matrices are contiguous: x [m, k], out [m, n]. linear_bf16 rounds x to bfloat16.
void linear_int8(const std::int8_t* x, const float* x_scale, const std::uint8_t* w,
                 const float* w_scale, const float* bias, float* out, std::size_t m,
                 std::size_t n, std::size_t k);
void linear_bf16(const float* x, const std::uint16_t* w, const float* bias, float* out,
                 std::size_t m, std::size_t n, std::size_t k);
void linear_f32(const float* x, const float* w, const float* bias, float* out, std::size_t m,
                std::size_t n, std::size_t k);

}  // namespace layby
