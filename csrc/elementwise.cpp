// Row by row work, spread over the threads.
#include "elementwise.h"

#include "thread_pool.h"

namespace layby {
namespace {

// Rows per chunk: some 16 thousand numbers, which take about as long as waking a thread.
std::size_t rows_per_chunk(std::size_t width) { return 16384 / (width + 1) + 1; }

}  // namespace

void quantise_rows(const float* x, std::int8_t* q, float* scale, std::size_t rows,
                   std::size_t width) {
  const ElementwiseKernels& kernels = elementwise_kernels();
  parallel_ranges(rows, rows_per_chunk(width), [&](std::size_t begin, std::size_t end) {
    kernels.quantise_rows(x, q, scale, width, begin, end);
  });
}

void add_rms_norm(float* residual, const float* delta, const float* weight, float eps, float* out,
                  std::int8_t* q, float* scale, std::size_t rows, std::size_t width) {
  const ElementwiseKernels& kernels = elementwise_kernels();
  parallel_ranges(rows, rows_per_chunk(width), [&](std::size_t begin, std::size_t end) {
    kernels.add_rms_norm(residual, delta, weight, eps, out, q, scale, width, begin, end);
  });
}

void silu_mul(float* gate_up, float* out, std::int8_t* q, float* scale, std::size_t rows,
              std::size_t width) {
  const ElementwiseKernels& kernels = elementwise_kernels();
  // e^x makes a number some four times as dear as elsewhere.
  parallel_ranges(rows, rows_per_chunk(4 * width), [&](std::size_t begin, std::size_t end) {
    kernels.silu_mul(gate_up, out, q, scale, width, begin, end);
  });
}

}  // namespace layby
