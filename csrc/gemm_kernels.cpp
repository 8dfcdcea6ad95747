// The inner loops of the matrix products, compiled once per instruction set.
//
// Weights are unsigned (w + 128) because the dot-product instructions multiply unsigned by signed.
// What that adds to a sum is 128 times the sum of the input row, so accumulators start at minus
// that. Sums are whole numbers and so exact: no instruction set can differ in them.
#include "gemm.h"

#include "simd.h"

namespace layby::LAYBY_ISA {
namespace {

LAYBY_INLINE std::int32_t load_group(const std::int8_t* x) {
  std::int32_t group;
  std::memcpy(&group, x, sizeof group);
  return group;
}

// int32 sums of `Rows` rows of x times one panel, to sums [Rows][kPanel].
template <int Rows>
void int8_tile(const std::int8_t* x, std::size_t ldx, const std::int32_t* x_sum,
               const std::uint8_t* w, std::size_t k_groups, std::int32_t* sums);

#if defined(__AVX512VNNI__)

// 24 accumulators, two vectors of weights and one of x fill the 32 registers.
constexpr int kMaxRows = 12;

template <int Rows>
void int8_tile(const std::int8_t* x, std::size_t ldx, const std::int32_t* x_sum,
               const std::uint8_t* w, std::size_t k_groups, std::int32_t* sums) {
  __m512i left[Rows], right[Rows];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) left[r] = right[r] = _mm512_set1_epi32(-128 * x_sum[r]);
  for (std::size_t g = 0; g < k_groups; ++g) {
    const __m512i w_left = _mm512_loadu_si512(w + g * 128);
    const __m512i w_right = _mm512_loadu_si512(w + g * 128 + 64);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const __m512i group = _mm512_set1_epi32(load_group(x + r * ldx + g * 4));
      left[r] = _mm512_dpbusd_epi32(left[r], w_left, group);
      right[r] = _mm512_dpbusd_epi32(right[r], w_right, group);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    _mm512_storeu_si512(sums + r * kPanel, left[r]);
    _mm512_storeu_si512(sums + r * kPanel + 16, right[r]);
  }
}

#elif defined(__AVX2__)

// 12 accumulators of 4 channels with 2 partial sums each. Products of u8 and s8 pairs do not fit
// 16 bits, so both sides are widened first.
constexpr int kMaxRows = 3;

template <int Rows>
void int8_tile(const std::int8_t* x, std::size_t ldx, const std::int32_t* x_sum,
               const std::uint8_t* w, std::size_t k_groups, std::int32_t* sums) {
  for (int half = 0; half < 2; ++half) {
    __m256i acc[Rows][4];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) acc[r][c] = _mm256_setzero_si256();
    }
    for (std::size_t g = 0; g < k_groups; ++g) {
      const auto* columns = reinterpret_cast<const __m128i*>(w + g * 128 + half * 64);
      __m256i group[Rows];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const __m128i bytes = _mm_cvtsi32_si128(load_group(x + r * ldx + g * 4));
        group[r] = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(bytes));
      }
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(columns + c));
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          acc[r][c] = _mm256_add_epi32(acc[r][c], _mm256_madd_epi16(wide, group[r]));
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      const __m256i start = _mm256_set1_epi32(-128 * x_sum[r]);
      for (int c = 0; c < 4; c += 2) {
        const __m256i pairs = _mm256_permute4x64_epi64(
            _mm256_hadd_epi32(acc[r][c], acc[r][c + 1]), 0b11011000);
        _mm256_storeu_si256(
            reinterpret_cast<__m256i*>(sums + r * kPanel + half * 16 + c * 4),
            _mm256_add_epi32(pairs, start));
      }
    }
  }
}

#else

constexpr int kMaxRows = 4;

template <int Rows>
void int8_tile(const std::int8_t* x, std::size_t ldx, const std::int32_t* x_sum,
               const std::uint8_t* w, std::size_t k_groups, std::int32_t* sums) {
  for (int r = 0; r < Rows; ++r) {
    for (std::size_t c = 0; c < kPanel; ++c) sums[r * kPanel + c] = -128 * x_sum[r];
  }
  for (std::size_t g = 0; g < k_groups; ++g) {
    for (int i = 0; i < 4; ++i) {
      std::int16_t weights[kPanel];
      for (std::size_t c = 0; c < kPanel; ++c) weights[c] = w[g * 128 + c * 4 + i];
      for (int r = 0; r < Rows; ++r) {
        const std::int16_t value = x[r * ldx + g * 4 + i];
        for (std::size_t c = 0; c < kPanel; ++c) sums[r * kPanel + c] += weights[c] * value;
      }
    }
  }
}

#endif

// 16 pairs of bfloat16 numbers: two steps of k for 16 channels.
#if defined(__AVX512BF16__)

struct Bf16Pairs {
  __m512bh v;
};
LAYBY_INLINE Bf16Pairs load_pairs(const std::uint16_t* p) {
  return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(p))};
}
LAYBY_INLINE Bf16Pairs broadcast_pair(const std::uint16_t* p) {
  std::int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return {reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair))};
}
LAYBY_INLINE F16 add_products(F16 sum, Bf16Pairs a, Bf16Pairs b) {
  return {_mm512_dpbf16_ps(sum.v, a.v, b.v)};
}

#else

struct Bf16Pairs {
  F16 first, second;
};
LAYBY_INLINE Bf16Pairs load_pairs(const std::uint16_t* p) {
  return {load_bf16_firsts(p), load_bf16_seconds(p)};
}
LAYBY_INLINE float widen(std::uint16_t bf16) {
  const std::uint32_t bits = std::uint32_t{bf16} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
LAYBY_INLINE Bf16Pairs broadcast_pair(const std::uint16_t* p) {
  return {broadcast(widen(p[0])), broadcast(widen(p[1]))};
}
LAYBY_INLINE F16 add_products(F16 sum, const Bf16Pairs& a, const Bf16Pairs& b) {
  return fused(a.second, b.second, fused(a.first, b.first, sum));
}

#endif

// The smaller the type of the weights, the more of them a group holds: see gemm.h.
struct Int8 {
  using Product = Int8Product;
  using Sum = std::int32_t;
  static constexpr std::size_t kGroup = 4;

  template <int Rows>
  static void tile(const Product& p, std::size_t row, const std::uint8_t* w, Sum* sums) {
    int8_tile<Rows>(p.x + row * p.ldx, p.ldx, p.x_sum + row, w, p.k_groups, sums);
  }
  template <class Lanes>
  static F16 column_scale(const Product& p, std::size_t column, Lanes lanes) {
    return load(p.w_scale + column, lanes);
  }
  static F16 scaled(const Product& p, std::size_t row, F16 column_scale, F16 sums) {
    return sums * (broadcast(p.x_scale[row]) * column_scale);
  }
};

// What needs no scales.
template <class X>
struct Unscaled {
  using Product = FloatProduct<X>;
  using Sum = float;

  template <class Lanes>
  static F16 column_scale(const Product&, std::size_t, Lanes) {
    return broadcast(0.0f);
  }
  static F16 scaled(const Product&, std::size_t, F16, F16 sums) { return sums; }
};

struct F32 : Unscaled<float> {
  static constexpr std::size_t kGroup = 1;

  template <int Rows>
  static void tile(const Product& p, std::size_t row, const float* w, Sum* sums) {
    const float* x = p.x + row * p.ldx;
    F16 left[Rows], right[Rows];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) left[r] = right[r] = broadcast(0.0f);
    for (std::size_t k = 0; k < p.k_groups; ++k) {
      const F16 w_left = load(w + k * kPanel), w_right = load(w + k * kPanel + 16);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const F16 value = broadcast(x[r * p.ldx + k]);
        left[r] = fused(value, w_left, left[r]);
        right[r] = fused(value, w_right, right[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      store(sums + r * kPanel, left[r]);
      store(sums + r * kPanel + 16, right[r]);
    }
  }
};

struct Bf16 : Unscaled<std::uint16_t> {
  static constexpr std::size_t kGroup = 2;

  template <int Rows>
  static void tile(const Product& p, std::size_t row, const std::uint16_t* w, Sum* sums) {
    const std::uint16_t* x = p.x + row * p.ldx;
    F16 left[Rows], right[Rows];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) left[r] = right[r] = broadcast(0.0f);
    for (std::size_t g = 0; g < p.k_groups; ++g) {
      const Bf16Pairs w_left = load_pairs(w + g * 2 * kPanel);
      const Bf16Pairs w_right = load_pairs(w + g * 2 * kPanel + kPanel);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const Bf16Pairs pair = broadcast_pair(x + r * p.ldx + g * 2);
        left[r] = add_products(left[r], w_left, pair);
        right[r] = add_products(right[r], w_right, pair);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      store(sums + r * kPanel, left[r]);
      store(sums + r * kPanel + 16, right[r]);
    }
  }
};

// Hands `rows` (at most kMaxRows) to the tile of that height.
template <class Kind, int Rows = kMaxRows, class W>
LAYBY_INLINE void tile_of_height(std::size_t rows, const typename Kind::Product& p,
                                 std::size_t row, const W* w, typename Kind::Sum* sums) {
  if constexpr (Rows > 1) {
    if (rows != Rows) return tile_of_height<Kind, Rows - 1>(rows, p, row, w, sums);
  }
  Kind::template tile<Rows>(p, row, w, sums);
}

// Brings sums of rows [row, end) to their place in 16 columns of the result.
template <class Kind, class Lanes>
LAYBY_INLINE void finish(const typename Kind::Product& p, std::size_t row, std::size_t end,
                         std::size_t column, const typename Kind::Sum* sums, Lanes lanes) {
  const F16 scale = Kind::column_scale(p, column, lanes);
  const F16 bias = p.bias != nullptr ? load(p.bias + column, lanes) : broadcast(0.0f);
  float* out = p.out + row * p.ldo + column;
  for (; row < end; ++row, sums += kPanel, out += p.ldo) {
    store(out, Kind::scaled(p, row, scale, load(sums)) + bias, lanes);
  }
}

template <class Kind>
void product(const typename Kind::Product& p, std::size_t row_begin, std::size_t row_end,
             std::size_t panel_begin, std::size_t panel_end) {
  alignas(64) typename Kind::Sum sums[kMaxRows * kPanel];
  const std::size_t rows = row_end - row_begin;
  const std::size_t tiles = groups_of(rows, kMaxRows);

  for (std::size_t panel = panel_begin; panel < panel_end; ++panel) {
    const auto* w = p.w + panel * p.k_groups * kPanel * Kind::kGroup;
    for (std::size_t tile = 0; tile < tiles; ++tile) {
      // Tiles of equal height, as near as can be: a low one would leave the multiplier waiting.
      const std::size_t row = row_begin + tile * rows / tiles;
      const std::size_t end = row_begin + (tile + 1) * rows / tiles;
      tile_of_height<Kind>(end - row, p, row, w, sums);
      for (std::size_t c = 0; c < kPanel; c += 16) {
        const std::size_t column = panel * kPanel + c;
        if (column + 16 <= p.n) {
          finish<Kind>(p, row, end, column, sums + c, AllLanes{});
        } else if (column < p.n) {
          finish<Kind>(p, row, end, column, sums + c,
                       FirstLanes{static_cast<unsigned>(p.n - column)});
        }
      }
    }
  }
}

void row_sums(const std::int8_t* x, std::size_t ldx, std::size_t rows, std::size_t k,
              std::int32_t* sums) {
  for (std::size_t row = 0; row < rows; ++row) {
    std::int32_t sum = 0;
    for (std::size_t i = 0; i < k; ++i) sum += x[row * ldx + i];
    sums[row] = sum;
  }
}

}  // namespace

const GemmKernels gemm_kernels = {row_sums, product<Int8>, product<Bf16>, product<F32>};

}  // namespace layby::LAYBY_ISA
