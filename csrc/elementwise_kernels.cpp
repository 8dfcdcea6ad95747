// Norm, activation and quantisation of rows, compiled once per instruction set and giving the same
// bits on each (see simd.h). Nothing here looks at more than one row.
#include "elementwise.h"

#include "simd.h"

namespace layby::LAYBY_ISA {
namespace {

// Quantises the numbers that `y(i, lanes)` gives, to int8 with one scale. They are computed twice
// rather than stored in between.
template <class Y>
LAYBY_INLINE void quantise(std::size_t width, Y y, std::int8_t* q, float* scale) {
  F16 peaks = broadcast(0.0f);
  each_vector(width, [&](std::size_t i, auto lanes) { peaks = max(peaks, abs(y(i, lanes))); });
  const float peak = largest(peaks);
  *scale = peak * (1.0f / 127.0f);
  // Below this the reciprocal overflows; such a row counts as zero.
  const F16 inverse = broadcast(peak > 1e-36f ? 127.0f / peak : 0.0f);
  each_vector(width, [&](std::size_t i, auto lanes) {
    store_i8(q + i, y(i, lanes) * inverse, lanes);
  });
}

template <class Y>
LAYBY_INLINE void put(std::size_t row, std::size_t width, Y y, float* out, std::int8_t* q,
                      float* scale) {
  if (out != nullptr) {
    each_vector(width, [&](std::size_t i, auto lanes) {
      store(out + row * width + i, y(i, lanes), lanes);
    });
  } else {
    quantise(width, y, q + row * width, scale + row);
  }
}

void quantise_rows(const float* x, std::int8_t* q, float* scale, std::size_t width,
                   std::size_t begin, std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    const float* in = x + row * width;
    quantise(
        width, [&](std::size_t i, auto lanes) { return load(in + i, lanes); }, q + row * width,
        scale + row);
  }
}

void add_rms_norm(float* residual, const float* delta, const float* weight, float eps, float* out,
                  std::int8_t* q, float* scale, std::size_t width, std::size_t begin,
                  std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    float* x = residual + row * width;
    F16 squares = broadcast(0.0f);
    if (delta != nullptr) {
      const float* d = delta + row * width;
      each_vector(width, [&](std::size_t i, auto lanes) {
        const F16 v = load(x + i, lanes) + load(d + i, lanes);
        store(x + i, v, lanes);
        squares = squares + v * v;
      });
    } else {
      each_vector(width, [&](std::size_t i, auto lanes) {
        const F16 v = load(x + i, lanes);
        squares = squares + v * v;
      });
    }
    const float mean = sum(squares) / static_cast<float>(width);
    const F16 inverse = broadcast(1.0f / __builtin_sqrtf(mean + eps));
    put(
        row, width,
        [&](std::size_t i, auto lanes) {
          return load(x + i, lanes) * inverse * load(weight + i, lanes);
        },
        out, q, scale);
  }
}

// Mixes a row, see elementwise.h, but for a factor of sqrt(kStrips), which it returns.
float mix(float* row, std::size_t width) {
  if (width % kStrips != 0) return 1.0f;
  const std::size_t strip = width / kStrips;
  each_vector(strip, [&](std::size_t i, auto lanes) {
    F16 v[kStrips];
#pragma GCC unroll 16
    for (std::size_t s = 0; s < kStrips; ++s) v[s] = load(row + s * strip + i, lanes);
#pragma GCC unroll 4
    for (std::size_t step = 1; step < kStrips; step *= 2) {
#pragma GCC unroll 16
      for (std::size_t s = 0; s < kStrips; ++s) {
        if ((s & step) != 0) continue;
        const F16 a = v[s], b = v[s + step];
        v[s] = a + b;
        v[s + step] = a - b;
      }
    }
#pragma GCC unroll 16
    for (std::size_t s = 0; s < kStrips; ++s) store(row + s * strip + i, v[s], lanes);
  });
  return 4.0f;
}

void silu_mul(float* gate_up, float* out, std::int8_t* q, float* scale, std::size_t width,
              std::size_t begin, std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    float* gate = gate_up + row * 2 * width;
    const float* up = gate + width;
    // e^x is too dear to take twice, so what is to be quantised waits where the gates were.
    float* y = out != nullptr ? out + row * width : gate;
    each_vector(width, [&](std::size_t i, auto lanes) {
      const F16 g = load(gate + i, lanes);
      const F16 e = exp(broadcast(0.0f) - g);
      store(y + i, g / (e + broadcast(1.0f)) * load(up + i, lanes), lanes);
    });
    if (out == nullptr) {
      const float excess = mix(gate, width);
      quantise_rows(gate, q + row * width, scale + row, width, 0, 1);
      scale[row] /= excess;
    }
  }
}

void exp_of(const float* x, float* out, std::size_t count) {
  each_vector(count, [&](std::size_t i, auto lanes) {
    store(out + i, exp(load(x + i, lanes)), lanes);
  });
}

}  // namespace

const ElementwiseKernels elementwise_kernels = {quantise_rows, add_rms_norm, silu_mul, exp_of};

}  // namespace layby::LAYBY_ISA
