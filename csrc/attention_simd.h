// Sixteen lanes of float or int32 in the instruction set that is being compiled for: what attention
// needs of them. Included by *_kernels.cpp only, inside their namespace.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define LAYBY_INLINE inline __attribute__((always_inline))

namespace layby {
namespace LAYBY_ISA {
namespace {

constexpr int kLanes = 16;

// How much the int8 kernels of attention_kernels.cpp do at once, which is a matter of registers; and
// how many variants of them there are to compile. kMaxVectors = 0: there is none for many rows.
#if defined(__AVX512VNNI__)

constexpr int kMaxFew = 4, kMaxVectors = 2, kAtOnce = 8;

struct Floats { __m512 v; };
struct Ints { __m512i v; };
struct Mask { __mmask16 m; };

LAYBY_INLINE Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
LAYBY_INLINE void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
LAYBY_INLINE Floats all(float x) { return {_mm512_set1_ps(x)}; }
LAYBY_INLINE Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
LAYBY_INLINE Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
LAYBY_INLINE Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
LAYBY_INLINE Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
LAYBY_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
LAYBY_INLINE Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
LAYBY_INLINE Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
LAYBY_INLINE Ints load_ints(const void* p) { return {_mm512_loadu_si512(p)}; }
LAYBY_INLINE void store_ints(void* p, Ints a) { _mm512_storeu_si512(p, a.v); }
LAYBY_INLINE Ints all_ints(int x) { return {_mm512_set1_epi32(x)}; }
LAYBY_INLINE Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
LAYBY_INLINE Mask at_most(Ints a, Ints b) { return {_mm512_cmple_epi32_mask(a.v, b.v)}; }
LAYBY_INLINE Floats select(Mask m, Floats a, Floats b) {
  return {_mm512_mask_blend_ps(m.m, b.v, a.v)};
}
LAYBY_INLINE float max_lane(Floats a) { return _mm512_reduce_max_ps(a.v); }
LAYBY_INLINE int sum_lanes(Ints a) { return _mm512_reduce_add_epi32(a.v); }

// x - floor(x). `floor` becomes what times_power takes for it: here x itself will do.
LAYBY_INLINE Floats fraction(Floats x, Floats* floor) {
  *floor = x;
  return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
}
// a * 2^floor, 0 (or next to it) where that is too small.
LAYBY_INLINE Floats times_power(Floats a, Floats floor) {
  return {_mm512_scalef_ps(a.v, floor.v)};
}

LAYBY_INLINE Floats load_bfloat16(const std::uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

// Four bytes, in every lane.
LAYBY_INLINE Ints all_bytes(const void* p) {
  int word;
  std::memcpy(&word, p, 4);
  return all_ints(word);
}

// sum + the lane's four products of unsigned with signed bytes.
LAYBY_INLINE Ints dot4(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  // Not the intrinsic: with it gcc 12 copies every sum to another register in every round.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(unsigned_bytes.v), "v"(signed_bytes.v));
  return sum;
}

// Lanes below 256 become the four bytes of a lane.
LAYBY_INLINE Ints pack(Ints a, Ints b, Ints c, Ints d) {
  const __m512i low = _mm512_or_si512(a.v, _mm512_slli_epi32(b.v, 8));
  const __m512i high = _mm512_or_si512(c.v, _mm512_slli_epi32(d.v, 8));
  return {_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
}

// The low byte of each lane.
LAYBY_INLINE void store_bytes(void* p, Ints a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

#elif defined(__AVX2__)

constexpr int kMaxFew = 1, kMaxVectors = 1, kAtOnce = 4;

struct Floats { __m256 v[2]; };
struct Ints { __m256i v[2]; };
struct Mask { __m256i m[2]; };

LAYBY_INLINE Floats load(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
LAYBY_INLINE void store(float* p, Floats a) {
  _mm256_storeu_ps(p, a.v[0]);
  _mm256_storeu_ps(p + 8, a.v[1]);
}
LAYBY_INLINE Floats all(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
LAYBY_INLINE Floats add(Floats a, Floats b) {
  return {{_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}};
}
LAYBY_INLINE Floats sub(Floats a, Floats b) {
  return {{_mm256_sub_ps(a.v[0], b.v[0]), _mm256_sub_ps(a.v[1], b.v[1])}};
}
LAYBY_INLINE Floats mul(Floats a, Floats b) {
  return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}};
}
LAYBY_INLINE Floats max(Floats a, Floats b) {
  return {{_mm256_max_ps(a.v[0], b.v[0]), _mm256_max_ps(a.v[1], b.v[1])}};
}
LAYBY_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return {{_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])}};
}
LAYBY_INLINE Floats to_floats(Ints a) {
  return {{_mm256_cvtepi32_ps(a.v[0]), _mm256_cvtepi32_ps(a.v[1])}};
}
LAYBY_INLINE Ints to_ints(Floats a) {
  return {{_mm256_cvtps_epi32(a.v[0]), _mm256_cvtps_epi32(a.v[1])}};
}
LAYBY_INLINE Ints load_ints(const void* p) {
  const __m256i* words = static_cast<const __m256i*>(p);
  return {{_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)}};
}
LAYBY_INLINE void store_ints(void* p, Ints a) {
  __m256i* words = static_cast<__m256i*>(p);
  _mm256_storeu_si256(words, a.v[0]);
  _mm256_storeu_si256(words + 1, a.v[1]);
}
LAYBY_INLINE Ints all_ints(int x) { return {{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}}; }
LAYBY_INLINE Ints add(Ints a, Ints b) {
  return {{_mm256_add_epi32(a.v[0], b.v[0]), _mm256_add_epi32(a.v[1], b.v[1])}};
}
LAYBY_INLINE Mask at_most(Ints a, Ints b) {
  const __m256i ones = _mm256_set1_epi32(-1);
  return {{_mm256_xor_si256(_mm256_cmpgt_epi32(a.v[0], b.v[0]), ones),
           _mm256_xor_si256(_mm256_cmpgt_epi32(a.v[1], b.v[1]), ones)}};
}
LAYBY_INLINE Floats select(Mask m, Floats a, Floats b) {
  return {{_mm256_blendv_ps(b.v[0], a.v[0], _mm256_castsi256_ps(m.m[0])),
           _mm256_blendv_ps(b.v[1], a.v[1], _mm256_castsi256_ps(m.m[1]))}};
}
LAYBY_INLINE float max_lane(Floats a) {
  const __m256 eight = _mm256_max_ps(a.v[0], a.v[1]);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
LAYBY_INLINE int sum_lanes(Ints a) {
  const __m256i eight = _mm256_add_epi32(a.v[0], a.v[1]);
  __m128i four =
      _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
LAYBY_INLINE Floats fraction(Floats x, Floats* floor) {
  *floor = {{_mm256_floor_ps(x.v[0]), _mm256_floor_ps(x.v[1])}};
  return sub(x, *floor);
}
LAYBY_INLINE __m256 times_power(__m256 a, __m256 floor) {
  const __m256 least = _mm256_set1_ps(-127.0f);  // whose bits below are those of 0
  const __m256i power = _mm256_cvtps_epi32(_mm256_max_ps(floor, least));
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(power, _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}
LAYBY_INLINE Floats times_power(Floats a, Floats floor) {
  return {{times_power(a.v[0], floor.v[0]), times_power(a.v[1], floor.v[1])}};
}
LAYBY_INLINE __m256 widen_bfloat16(const std::uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
LAYBY_INLINE Floats load_bfloat16(const std::uint16_t* p) {
  return {{widen_bfloat16(p), widen_bfloat16(p + 8)}};
}
LAYBY_INLINE Ints all_bytes(const void* p) {
  int word;
  std::memcpy(&word, p, 4);
  return all_ints(word);
}
// Through 16 bits, because vpmaddubsw saturates.
LAYBY_INLINE __m256i dot4(__m256i sum, __m256i u, __m256i s) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
LAYBY_INLINE Ints dot4(Ints sum, Ints u, Ints s) {
  return {{dot4(sum.v[0], u.v[0], s.v[0]), dot4(sum.v[1], u.v[1], s.v[1])}};
}
LAYBY_INLINE __m256i pack(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i low = _mm256_or_si256(a, _mm256_slli_epi32(b, 8));
  const __m256i high = _mm256_or_si256(c, _mm256_slli_epi32(d, 8));
  return _mm256_or_si256(low, _mm256_slli_epi32(high, 16));
}
LAYBY_INLINE Ints pack(Ints a, Ints b, Ints c, Ints d) {
  return {{pack(a.v[0], b.v[0], c.v[0], d.v[0]), pack(a.v[1], b.v[1], c.v[1], d.v[1])}};
}
LAYBY_INLINE void store_bytes(void* p, Ints a) {
  alignas(64) std::int32_t lanes[kLanes];
  store_ints(lanes, a);
  for (int i = 0; i < kLanes; ++i) static_cast<std::uint8_t*>(p)[i] = lanes[i];
}

#else

constexpr int kMaxFew = 1, kMaxVectors = 0, kAtOnce = 4;

typedef float FloatLanes __attribute__((vector_size(64), aligned(16)));
typedef std::int32_t IntLanes __attribute__((vector_size(64), aligned(16)));
typedef std::int16_t ShortLanes __attribute__((vector_size(64), aligned(16)));
typedef std::uint16_t UnsignedShortLanes __attribute__((vector_size(64), aligned(16)));

struct Floats { FloatLanes v; };
struct Ints { IntLanes v; };
struct Mask { IntLanes m; };

LAYBY_INLINE Floats load(const float* p) {
  Floats result;
  std::memcpy(&result.v, p, sizeof result.v);
  return result;
}
LAYBY_INLINE void store(float* p, Floats a) { std::memcpy(p, &a.v, sizeof a.v); }
LAYBY_INLINE Floats all(float x) { return {FloatLanes{} + x}; }
LAYBY_INLINE Floats add(Floats a, Floats b) { return {a.v + b.v}; }
LAYBY_INLINE Floats sub(Floats a, Floats b) { return {a.v - b.v}; }
LAYBY_INLINE Floats mul(Floats a, Floats b) { return {a.v * b.v}; }
LAYBY_INLINE Floats max(Floats a, Floats b) { return {a.v > b.v ? a.v : b.v}; }
// Rounds twice: a fused one is a library call here.
LAYBY_INLINE Floats fma(Floats a, Floats b, Floats c) { return {a.v * b.v + c.v}; }
LAYBY_INLINE Floats to_floats(Ints a) { return {__builtin_convertvector(a.v, FloatLanes)}; }
// Up to 2^30, to the nearest; ties go up.
LAYBY_INLINE Ints to_ints(Floats a) {
  const FloatLanes nearest = a.v + (a.v < 0.0f ? FloatLanes{} - 0.5f : FloatLanes{} + 0.5f);
  return {__builtin_convertvector(nearest, IntLanes)};
}
LAYBY_INLINE Ints load_ints(const void* p) {
  Ints result;
  std::memcpy(&result.v, p, sizeof result.v);
  return result;
}
LAYBY_INLINE void store_ints(void* p, Ints a) { std::memcpy(p, &a.v, sizeof a.v); }
LAYBY_INLINE Ints all_ints(int x) { return {IntLanes{} + x}; }
LAYBY_INLINE Ints add(Ints a, Ints b) { return {a.v + b.v}; }
LAYBY_INLINE Mask at_most(Ints a, Ints b) { return {a.v <= b.v}; }
LAYBY_INLINE Floats select(Mask m, Floats a, Floats b) { return {m.m ? a.v : b.v}; }
LAYBY_INLINE float max_lane(Floats a) {
  float result = a.v[0];
  for (int i = 1; i < kLanes; ++i) result = a.v[i] > result ? a.v[i] : result;
  return result;
}
LAYBY_INLINE int sum_lanes(Ints a) {
  int result = 0;
  for (int i = 0; i < kLanes; ++i) result += a.v[i];
  return result;
}
// Nothing below -127 needs telling apart: see times_power.
LAYBY_INLINE Floats fraction(Floats x, Floats* floor) {
  const FloatLanes least = FloatLanes{} - 127.0f;
  const FloatLanes bounded = x.v > least ? x.v : least;
  const FloatLanes toward_zero =
      __builtin_convertvector(__builtin_convertvector(bounded, IntLanes), FloatLanes);
  floor->v = toward_zero > bounded ? toward_zero - 1.0f : toward_zero;
  return {bounded - floor->v};
}
LAYBY_INLINE Floats times_power(Floats a, Floats floor) {
  const IntLanes bits = (__builtin_convertvector(floor.v, IntLanes) + 127) << 23;  // -127: 0
  return {a.v * (FloatLanes)bits};
}
LAYBY_INLINE Floats load_bfloat16(const std::uint16_t* p) {
  typedef std::uint16_t Half __attribute__((vector_size(32)));
  Half half;
  std::memcpy(&half, p, sizeof half);
  return {(FloatLanes)(__builtin_convertvector(half, IntLanes) << 16)};
}
LAYBY_INLINE Ints all_bytes(const void* p) {
  int word;
  std::memcpy(&word, p, 4);
  return all_ints(word);
}
LAYBY_INLINE Ints dot4(Ints sum, Ints u, Ints s) {
  const ShortLanes signed_pairs = (ShortLanes)s.v;
  const UnsignedShortLanes pairs = (UnsignedShortLanes)u.v;
  const IntLanes even = (IntLanes)((ShortLanes)(pairs & 255) * ((signed_pairs << 8) >> 8));
  const IntLanes odd = (IntLanes)((ShortLanes)(pairs >> 8) * (signed_pairs >> 8));
  return {sum.v + ((even << 16) >> 16) + (even >> 16) + ((odd << 16) >> 16) + (odd >> 16)};
}
LAYBY_INLINE Ints pack(Ints a, Ints b, Ints c, Ints d) {
  return {a.v | b.v << 8 | c.v << 16 | d.v << 24};
}
LAYBY_INLINE void store_bytes(void* p, Ints a) {
  for (int i = 0; i < kLanes; ++i) {
    static_cast<std::uint8_t*>(p)[i] = static_cast<std::uint8_t>(a.v[i]);
  }
}

#endif

// Asks for the cache line, to be there soon.
LAYBY_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// 2^x for x up to 100; 2^0 is 1 exactly.
// Relative error 8.6e-5: enough for numbers that are rounded to 8 bits.
LAYBY_INLINE Floats exp2_rough(Floats x) {
  Floats floor;
  const Floats rest = fraction(x, &floor);
  Floats y = fma(rest, all(0.077067069709301f), all(0.22764495015144348f));
  y = fma(rest, y, all(0.6951168179512024f));
  return times_power(fma(rest, y, all(1.0f)), floor);
}

// Relative error 1e-7.
LAYBY_INLINE Floats exp2_fine(Floats x) {
  Floats floor;
  const Floats rest = fraction(x, &floor);
  Floats y = fma(rest, all(0.00021612919226754457f), all(0.001246784464456141f));
  y = fma(rest, y, all(0.009675451554358006f));
  y = fma(rest, y, all(0.055485282093286514f));
  y = fma(rest, y, all(0.2402293086051941f));
  y = fma(rest, y, all(0.6931470632553101f));
  return times_power(fma(rest, y, all(1.0f)), floor);
}

}  // namespace
}  // namespace LAYBY_ISA
}  // namespace layby
