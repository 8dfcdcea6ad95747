// Sixteen floats at once, on whichever instruction set the including file is compiled for.
//
// Every operation rounds alike on all of them, and sums over lanes are taken in one fixed order, so
// a kernel written with F16 gives the same bits everywhere. The last, partial vector of a row goes
// through the same operations under a mask, never through other code.
//
// Only *_kernels.cpp include this: it lives in their namespace, because a function compiled for one
// instruction set must not be taken for its namesake of another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define LAYBY_INLINE inline __attribute__((always_inline))

namespace layby::LAYBY_ISA {

// Which lanes of a vector are in memory: all of them, or the first few.
struct AllLanes {};
struct FirstLanes {
  unsigned count;
};

#if defined(__AVX512F__)

struct F16 {
  __m512 v;
};

LAYBY_INLINE __mmask16 mask_of(FirstLanes lanes) {
  return static_cast<__mmask16>((1u << lanes.count) - 1);
}
LAYBY_INLINE F16 load(const float* p, AllLanes = {}) { return {_mm512_loadu_ps(p)}; }
LAYBY_INLINE F16 load(const float* p, FirstLanes n) {
  return {_mm512_maskz_loadu_ps(mask_of(n), p)};
}
// The lanes that are not in memory are those of `other`.
LAYBY_INLINE F16 load_or(const float* p, AllLanes, F16) { return load(p); }
LAYBY_INLINE F16 load_or(const float* p, FirstLanes n, F16 other) {
  return {_mm512_mask_loadu_ps(other.v, mask_of(n), p)};
}
LAYBY_INLINE F16 load(const std::int32_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))};
}
// Of 16 pairs of bfloat16, the first and the second numbers.
LAYBY_INLINE F16 load_bf16_firsts(const std::uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
LAYBY_INLINE F16 load_bf16_seconds(const std::uint16_t* p) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high))};
}
LAYBY_INLINE void store(float* p, F16 a, AllLanes = {}) { _mm512_storeu_ps(p, a.v); }
LAYBY_INLINE void store(float* p, F16 a, FirstLanes n) {
  _mm512_mask_storeu_ps(p, mask_of(n), a.v);
}
LAYBY_INLINE F16 broadcast(float a) { return {_mm512_set1_ps(a)}; }
LAYBY_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
LAYBY_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
LAYBY_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
LAYBY_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
LAYBY_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
LAYBY_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
LAYBY_INLINE F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
// Lane by lane, x >= bound ? a : b.
LAYBY_INLINE F16 if_at_least(F16 x, F16 bound, F16 a, F16 b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_GE_OQ), b.v, a.v)};
}
// Lane i as bit i: x >= bound, and whether x is NaN.
LAYBY_INLINE unsigned lanes_at_least(F16 x, F16 bound) {
  return _cvtmask16_u32(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_GE_OQ));
}
LAYBY_INLINE unsigned lanes_with_nan(F16 x) {
  return _cvtmask16_u32(_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q));
}
// a * b + c, rounded once (twice on a processor without the instruction).
LAYBY_INLINE F16 fused(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// a * 2^n, where the low bits of `exponent` hold n and those above bit 8 are clear or shifted out.
LAYBY_INLINE F16 times_power_of_two(F16 a, F16 exponent) {
  const __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(exponent.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), shifted))};
}
// To the nearest whole number, even on a tie; the lanes must lie within int8.
LAYBY_INLINE void store_i8(std::int8_t* p, F16 a, AllLanes = {}) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
LAYBY_INLINE void store_i8(std::int8_t* p, F16 a, FirstLanes n) {
  _mm512_mask_cvtsepi32_storeu_epi8(p, mask_of(n), _mm512_cvtps_epi32(a.v));
}
// Sum of lanes i and i + 8, then i + 4, i + 2, i + 1 of what remains.
LAYBY_INLINE float sum(F16 a) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 rest = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  rest = _mm_add_ps(rest, _mm_movehl_ps(rest, rest));
  return _mm_cvtss_f32(_mm_add_ss(rest, _mm_movehdup_ps(rest)));
}
LAYBY_INLINE float largest(F16 a) { return _mm512_reduce_max_ps(a.v); }

#elif defined(__AVX2__)

struct F16 {
  __m256 lo, hi;
};

LAYBY_INLINE __m256i mask_of(FirstLanes lanes, int first) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes.count) - first), lane);
}
LAYBY_INLINE F16 load(const float* p, AllLanes = {}) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
LAYBY_INLINE F16 load(const float* p, FirstLanes n) {
  return {_mm256_maskload_ps(p, mask_of(n, 0)), _mm256_maskload_ps(p + 8, mask_of(n, 8))};
}
LAYBY_INLINE F16 load_or(const float* p, AllLanes, F16) { return load(p); }
LAYBY_INLINE F16 load_or(const float* p, FirstLanes n, F16 other) {
  const F16 a = load(p, n);
  return {_mm256_blendv_ps(other.lo, a.lo, _mm256_castsi256_ps(mask_of(n, 0))),
          _mm256_blendv_ps(other.hi, a.hi, _mm256_castsi256_ps(mask_of(n, 8)))};
}
LAYBY_INLINE F16 load(const std::int32_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_cvtepi32_ps(_mm256_loadu_si256(q)), _mm256_cvtepi32_ps(_mm256_loadu_si256(q + 1))};
}
LAYBY_INLINE F16 load_bf16_firsts(const std::uint16_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q + 1), 16))};
}
LAYBY_INLINE F16 load_bf16_seconds(const std::uint16_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q), high)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q + 1), high))};
}
LAYBY_INLINE void store(float* p, F16 a, AllLanes = {}) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
LAYBY_INLINE void store(float* p, F16 a, FirstLanes n) {
  _mm256_maskstore_ps(p, mask_of(n, 0), a.lo);
  _mm256_maskstore_ps(p + 8, mask_of(n, 8), a.hi);
}
LAYBY_INLINE F16 broadcast(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
LAYBY_INLINE F16 operator+(F16 a, F16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
LAYBY_INLINE F16 operator-(F16 a, F16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
LAYBY_INLINE F16 operator*(F16 a, F16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
LAYBY_INLINE F16 operator/(F16 a, F16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
LAYBY_INLINE F16 max(F16 a, F16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
LAYBY_INLINE F16 min(F16 a, F16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
LAYBY_INLINE F16 abs(F16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
LAYBY_INLINE F16 if_at_least(F16 x, F16 bound, F16 a, F16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, bound.lo, _CMP_GE_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, bound.hi, _CMP_GE_OQ))};
}
LAYBY_INLINE unsigned bits_of(__m256 lo, __m256 hi) {
  return static_cast<unsigned>(_mm256_movemask_ps(lo)) |
         static_cast<unsigned>(_mm256_movemask_ps(hi)) << 8;
}
LAYBY_INLINE unsigned lanes_at_least(F16 x, F16 bound) {
  return bits_of(_mm256_cmp_ps(x.lo, bound.lo, _CMP_GE_OQ),
                 _mm256_cmp_ps(x.hi, bound.hi, _CMP_GE_OQ));
}
LAYBY_INLINE unsigned lanes_with_nan(F16 x) {
  return bits_of(_mm256_cmp_ps(x.lo, x.lo, _CMP_UNORD_Q), _mm256_cmp_ps(x.hi, x.hi, _CMP_UNORD_Q));
}
LAYBY_INLINE F16 fused(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
LAYBY_INLINE __m256 times_power_of_two(__m256 a, __m256 exponent) {
  const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(exponent), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shifted));
}
LAYBY_INLINE F16 times_power_of_two(F16 a, F16 exponent) {
  return {times_power_of_two(a.lo, exponent.lo), times_power_of_two(a.hi, exponent.hi)};
}
LAYBY_INLINE void store_i8(std::int8_t* p, F16 a, AllLanes = {}) {
  const __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(pairs, 0b11011000);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
LAYBY_INLINE void store_i8(std::int8_t* p, F16 a, FirstLanes n) {
  std::int8_t whole[16];
  store_i8(whole, a);
  std::memcpy(p, whole, n.count);
}
LAYBY_INLINE float sum(F16 a) {
  const __m256 half = _mm256_add_ps(a.lo, a.hi);
  __m128 rest = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  rest = _mm_add_ps(rest, _mm_movehl_ps(rest, rest));
  return _mm_cvtss_f32(_mm_add_ss(rest, _mm_movehdup_ps(rest)));
}
LAYBY_INLINE float largest(F16 a) {
  const __m256 half = _mm256_max_ps(a.lo, a.hi);
  __m128 rest = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  rest = _mm_max_ps(rest, _mm_movehl_ps(rest, rest));
  return _mm_cvtss_f32(_mm_max_ss(rest, _mm_movehdup_ps(rest)));
}

#else

// Plain loops of known length, which compilers turn into the vectors that the architecture has.
struct F16 {
  float v[16];
};

template <class Fn>
LAYBY_INLINE F16 each_lane(Fn fn) {
  F16 result;
  for (int i = 0; i < 16; ++i) result.v[i] = fn(i);
  return result;
}
LAYBY_INLINE F16 load(const float* p, AllLanes = {}) {
  return each_lane([&](int i) { return p[i]; });
}
LAYBY_INLINE F16 load(const float* p, FirstLanes n) {
  F16 result{};
  for (unsigned i = 0; i < n.count; ++i) result.v[i] = p[i];
  return result;
}
LAYBY_INLINE F16 load_or(const float* p, AllLanes, const F16&) { return load(p); }
LAYBY_INLINE F16 load_or(const float* p, FirstLanes n, const F16& other) {
  F16 result = other;
  for (unsigned i = 0; i < n.count; ++i) result.v[i] = p[i];
  return result;
}
LAYBY_INLINE F16 load(const std::int32_t* p) {
  return each_lane([&](int i) { return static_cast<float>(p[i]); });
}
LAYBY_INLINE F16 load_bf16_firsts(const std::uint16_t* p) {
  std::uint32_t bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = std::uint32_t{p[2 * i]} << 16;
  F16 result;
  std::memcpy(result.v, bits, sizeof bits);
  return result;
}
LAYBY_INLINE F16 load_bf16_seconds(const std::uint16_t* p) {
  std::uint32_t bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = std::uint32_t{p[2 * i + 1]} << 16;
  F16 result;
  std::memcpy(result.v, bits, sizeof bits);
  return result;
}
LAYBY_INLINE void store(float* p, const F16& a, AllLanes = {}) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
LAYBY_INLINE void store(float* p, const F16& a, FirstLanes n) {
  for (unsigned i = 0; i < n.count; ++i) p[i] = a.v[i];
}
LAYBY_INLINE F16 broadcast(float a) {
  return each_lane([&](int) { return a; });
}
LAYBY_INLINE F16 operator+(const F16& a, const F16& b) {
  return each_lane([&](int i) { return a.v[i] + b.v[i]; });
}
LAYBY_INLINE F16 operator-(const F16& a, const F16& b) {
  return each_lane([&](int i) { return a.v[i] - b.v[i]; });
}
LAYBY_INLINE F16 operator*(const F16& a, const F16& b) {
  return each_lane([&](int i) { return a.v[i] * b.v[i]; });
}
LAYBY_INLINE F16 operator/(const F16& a, const F16& b) {
  return each_lane([&](int i) { return a.v[i] / b.v[i]; });
}
LAYBY_INLINE F16 max(const F16& a, const F16& b) {
  return each_lane([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
LAYBY_INLINE F16 min(const F16& a, const F16& b) {
  return each_lane([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
LAYBY_INLINE F16 abs(const F16& a) {
  return each_lane([&](int i) { return __builtin_fabsf(a.v[i]); });
}
LAYBY_INLINE F16 if_at_least(const F16& x, const F16& bound, const F16& a, const F16& b) {
  std::uint32_t a_bits[16], b_bits[16];  // compilers make vectors of this, but not of choices
  std::memcpy(a_bits, a.v, sizeof a_bits);
  std::memcpy(b_bits, b.v, sizeof b_bits);
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t chosen = x.v[i] >= bound.v[i] ? 0xffffffffu : 0;
    a_bits[i] = (a_bits[i] & chosen) | (b_bits[i] & ~chosen);
  }
  F16 result;
  std::memcpy(result.v, a_bits, sizeof a_bits);
  return result;
}
LAYBY_INLINE unsigned lanes_at_least(const F16& x, const F16& bound) {
  unsigned bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<unsigned>(x.v[i] >= bound.v[i]) << i;
  return bits;
}
LAYBY_INLINE unsigned lanes_with_nan(const F16& x) {
  unsigned bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<unsigned>(x.v[i] != x.v[i]) << i;
  return bits;
}
LAYBY_INLINE F16 fused(const F16& a, const F16& b, const F16& c) {
  return each_lane([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
LAYBY_INLINE F16 times_power_of_two(const F16& a, const F16& exponent) {
  std::uint32_t bits[16], shift[16];
  std::memcpy(bits, a.v, sizeof bits);
  std::memcpy(shift, exponent.v, sizeof shift);
  for (int i = 0; i < 16; ++i) bits[i] += shift[i] << 23;
  F16 result;
  std::memcpy(result.v, bits, sizeof bits);
  return result;
}
// Adding 1.5 * 2^23 leaves no room for a fraction: the sum is rounded, its low bits a whole number.
LAYBY_INLINE void store_i8(std::int8_t* p, const F16& a, FirstLanes n) {
  std::int32_t bits[16];
  const F16 rounded = a + broadcast(12582912.0f);
  std::memcpy(bits, rounded.v, sizeof bits);
  for (unsigned i = 0; i < n.count; ++i) p[i] = static_cast<std::int8_t>(bits[i]);
}
LAYBY_INLINE void store_i8(std::int8_t* p, const F16& a, AllLanes = {}) {
  store_i8(p, a, FirstLanes{16});
}
LAYBY_INLINE float sum(const F16& a) {
  float v[16];
  std::memcpy(v, a.v, sizeof v);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  }
  return v[0];
}
LAYBY_INLINE float largest(const F16& a) {
  float result = a.v[0];
  for (int i = 1; i < 16; ++i) result = a.v[i] > result ? a.v[i] : result;
  return result;
}

#endif

// Calls fn(begin, lanes) for one vector after the other of `count` numbers.
template <class Fn>
LAYBY_INLINE void each_vector(std::size_t count, Fn fn) {
  std::size_t begin = 0;
  for (; begin + 16 <= count; begin += 16) fn(begin, AllLanes{});
  if (begin < count) fn(begin, FirstLanes{static_cast<unsigned>(count - begin)});
}

// e^x for x in [-87, 88]; numbers outside are moved to the nearer end. At most 1 ulp off.
//
// e^x = 2^n * e^r with n whole and |r| <= ln(2)/2. ln(2) is subtracted in two parts, the first
// short enough for n times it to be exact; e^r is 1 + r + r^2 * (a minimax polynomial of degree 4).
LAYBY_INLINE F16 exp(F16 x) {
  x = min(max(x, broadcast(-87.0f)), broadcast(88.0f));
  const F16 whole = broadcast(12582912.0f);  // 1.5 * 2^23, see store_i8 of the generic set
  const F16 shifted = x * broadcast(1.44269504f) + whole;
  const F16 n = shifted - whole;
  const F16 r = (x - n * broadcast(0.693359375f)) - n * broadcast(-2.12194440e-4f);
  F16 p = broadcast(0.0013814421836286783f);
  p = p * r + broadcast(0.008368785493075848f);
  p = p * r + broadcast(0.041668396443128586f);
  p = p * r + broadcast(0.1666651964187622f);
  p = p * r + broadcast(0.4999999403953552f);
  return times_power_of_two((p * (r * r) + r) + broadcast(1.0f), shifted);
}

}  // namespace layby::LAYBY_ISA
