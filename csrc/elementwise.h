// Row by row work between the matrix products. See elementwise_kernels.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace layby {

// A row of K numbers that is to be quantised may be mixed first, so that no few of them stand out.
// It is cut into strips, [kStrips][K / kStrips], and multiplied by an orthonormal Hadamard matrix
// over the first index: y[s] = sum over t of (-1)^popcount(s & t) * x[t] / sqrt(kStrips). A row
// that cannot be cut into equal strips is left as it is.
constexpr std::size_t kStrips = 16;

// Each function handles rows [begin, end). Rows of all matrices are contiguous and close together.
struct ElementwiseKernels {
  // q = round(x / scale) with scale = max |x| / 127, for x [rows, width].
  void (*quantise_rows)(const float* x, std::int8_t* q, float* scale, std::size_t width,
                        std::size_t begin, std::size_t end);
  // residual += delta (unless null); y = residual / rms(residual) * weight. y goes to `out`, or
  // quantised to `q` and `scale`, whichever is not null.
  void (*add_rms_norm)(float* residual, const float* delta, const float* weight, float eps,
                       float* out, std::int8_t* q, float* scale, std::size_t width,
                       std::size_t begin, std::size_t end);
  // y = silu(gate) * up for gate_up [rows, 2 * width], gates first. y goes to `out`, or is mixed and
  // quantised to `q` and `scale`, whichever is not null.
  // Overwrites gate_up.
  void (*silu_mul)(float* gate_up, float* out, std::int8_t* q, float* scale,
                   std::size_t width, std::size_t begin, std::size_t end);
  void (*exp)(const float* x, float* out, std::size_t count);
};

LAYBY_DISPATCH(ElementwiseKernels, elementwise_kernels)

// The same for all rows of contiguous matrices, on all threads.
void quantise_rows(const float* x, std::int8_t* q, float* scale, std::size_t rows,
                   std::size_t width);
void add_rms_norm(float* residual, const float* delta, const float* weight, float eps, float* out,
                  std::int8_t* q, float* scale, std::size_t rows, std::size_t width);
void silu_mul(float* gate_up, float* out, std::int8_t* q, float* scale, std::size_t rows,
              std::size_t width);

}  // namespace layby
