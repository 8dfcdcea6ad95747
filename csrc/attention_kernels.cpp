// The arithmetic of attention; see attention.h. Compiled once per instruction set.
//
// int8. A tile of context contributes to a row, with s_t = query . key_t in integers times the key's
// scale, and everything in powers of two:
//   top   = max_t s_t * c            c: scale of the query, 1/sqrt(D) and log2(e) in one
//   p_t   = 2^(s_t * c - top)        in (0, 1]
//   sum   = sum_t p_t                in units of 2^-24, an integer
//   acc_d = sum_t w_t value_td       w_t: p_t times the value's scale, as 8 bits of the largest scale
// and the row's maximum, sum and output follow as in Milakov & Gimelshein 2018 (fold).
// Two kernels compute this with other shapes but the same roundings. With few rows (decode), lanes
// are tokens, then dimensions; with many (prefill), lanes are rows throughout, and nothing is ever
// summed or compared across lanes.
//
// float. Lanes are tokens, then dimensions, for up to 4 rows at a time.
#include <algorithm>

// gcc 12 takes the deliberately undefined operands of its own intrinsics for a mistake (bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "attention.h"
#include "attention_simd.h"

namespace layby {
namespace LAYBY_ISA {
namespace {

constexpr int kGroups = kTileTokens / kGroupTokens;
constexpr float kLog2e = 1.44269504f;
constexpr float kLowest = -1e30f;  // the score of what may not be seen
constexpr float kUnitExponent = 24.0f;
constexpr float kUnit = 1.0f / (1 << 24);

static_assert(kGroupTokens == kLanes, "a lane is a token");

// ---- Rotary positions and the write ------------------------------------------------------------

LAYBY_INLINE float largest_magnitude(const float* x, int count) {
  Floats largest = all(0.0f);
  for (int i = 0; i < count; i += kLanes) {
    const Floats v = load(x + i);
    largest = max(largest, max(v, sub(all(0.0f), v)));
  }
  return max_lane(largest);
}

// Rounds x / scale to int8, one per 4 bytes of `out`.
LAYBY_INLINE void quantise(const float* x, int count, float scale, std::int8_t* out) {
  const Floats inverse = all(scale > 0.0f ? 1.0f / scale : 0.0f);
  for (int i = 0; i < count; i += kLanes) store_bytes(out + i, to_ints(mul(load(x + i), inverse)));
}

// A bfloat16 no smaller than x, so that what is divided by it stays within range.
LAYBY_INLINE std::uint16_t bfloat16_above(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<std::uint16_t>((bits + 0xffff) >> 16);
}

LAYBY_INLINE std::uint16_t nearest_bfloat16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

LAYBY_INLINE float from_bfloat16(std::uint16_t x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// Products and sums one by one, as the reference rounds them.
LAYBY_INLINE void rotate(const float* from, const float* cos_sin, int dim, float* to) {
  const int half = dim / 2;
  const float *cosines = cos_sin, *sines = cos_sin + half;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats low = load(from + i), high = load(from + half + i);
    const Floats cosine = load(cosines + i), sine = load(sines + i);
    store(to + i, sub(mul(low, cosine), mul(high, sine)));
    store(to + half + i, add(mul(high, cosine), mul(low, sine)));
  }
  for (; i < half; ++i) {
    const float low = from[i], high = from[half + i];
    to[i] = low * cosines[i] - high * sines[i];
    to[half + i] = high * cosines[i] + low * sines[i];
  }
}

LAYBY_INLINE void normalise(const float* from, const float* weight, float eps, int dim, float* to) {
  Floats squares = all(0.0f);
  for (int i = 0; i < dim; i += kLanes) squares = fma(load(from + i), load(from + i), squares);
  alignas(64) float lanes[kLanes];
  store(lanes, squares);
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
  for (int i = 0; i < dim; i += kLanes) {
    store(to + i, mul(mul(load(from + i), all(scale)), load(weight + i)));
  }
}

std::uint8_t* group_of(const KvLayer& layer, std::int64_t slot, int kv_head) {
  const std::int64_t group = slot / kGroupTokens;
  return layer.data + group / layer.groups_per_block * layer.block_bytes +
         kv_head * layer.head_bytes + group % layer.groups_per_block * layer.group_bytes;
}

void write_int8(const float* key, const float* value, int dim, std::uint8_t* group, int token) {
  alignas(64) std::int8_t bytes[kMaxHeadDim];
  auto* scales = reinterpret_cast<std::uint16_t*>(group + 2 * kGroupTokens * dim);

  scales[token] = bfloat16_above(largest_magnitude(key, dim) * (1.0f / 127.0f));
  quantise(key, dim, from_bfloat16(scales[token]), bytes);
  for (int d = 0; d < dim; d += 4) {
    std::uint32_t word;
    std::memcpy(&word, bytes + d, 4);
    word ^= 0x80808080u;
    std::memcpy(group + d * kGroupTokens + token * 4, &word, 4);
  }

  scales += kGroupTokens;
  scales[token] = bfloat16_above(largest_magnitude(value, dim) * (1.0f / 127.0f));
  quantise(value, dim, from_bfloat16(scales[token]), bytes);
  std::uint8_t* values = group + kGroupTokens * dim + token / 4 * 4 * dim + token % 4;
  for (int d = 0; d < dim; ++d) values[4 * d] = static_cast<std::uint8_t>(bytes[d]);
}

LAYBY_INLINE void convert(float x, float* out) { *out = x; }
LAYBY_INLINE void convert(float x, std::uint16_t* out) { *out = nearest_bfloat16(x); }

template <class Element>
void write_floats(const float* key, const float* value, int dim, std::uint8_t* group, int token) {
  auto* keys = reinterpret_cast<Element*>(group);
  Element* values = keys + kGroupTokens * dim + token * dim;
  for (int d = 0; d < dim; ++d) convert(key[d], keys + d * kGroupTokens + token);
  for (int d = 0; d < dim; ++d) convert(value[d], values + d);
}

void rope_write(const RopeWrite& job, const KvLayer& layer, KvType type, std::size_t begin,
                std::size_t end) {
  const int dim = layer.head_dim, kv_heads = layer.num_kv_heads, heads = job.num_heads;
  alignas(64) float head[kMaxHeadDim], normalised[kMaxHeadDim];
  for (std::size_t row = begin; row < end; ++row) {
    const float* qkv = job.qkv + static_cast<std::ptrdiff_t>(row) * job.row_stride;
    const float* cos_sin = job.cos_sin + job.positions[row] * dim;
    for (int h = 0; h < heads + kv_heads; ++h) {
      const float* norm = h < heads ? job.query_norm : job.key_norm;
      const float* from = qkv + h * dim;
      if (norm != nullptr) {
        normalise(from, norm, job.norm_eps, dim, normalised);
        from = normalised;
      }
      rotate(from, cos_sin, dim, head);
      if (h < heads) {
        const std::size_t index = row * heads + h;
        if (type == KvType::int8) {
          job.scales[index] = largest_magnitude(head, dim) * (1.0f / 127.0f);
          quantise(head, dim, job.scales[index], job.quantised + index * dim);
        } else {
          std::copy_n(head, dim, job.floats + index * dim);
        }
        continue;
      }
      const std::int64_t slot = job.slots[row];
      if (slot < 0) continue;
      const int token = static_cast<int>(slot % kGroupTokens);
      std::uint8_t* group = group_of(layer, slot, h - heads);
      const float* value = qkv + (h + kv_heads) * dim;
      switch (type) {
        case KvType::int8: write_int8(head, value, dim, group, token); break;
        case KvType::bfloat16: write_floats<std::uint16_t>(head, value, dim, group, token); break;
        case KvType::float32: write_floats<float>(head, value, dim, group, token); break;
      }
    }
  }
}

// ---- What both int8 kernels share --------------------------------------------------------------

// Context of one sequence and one KV head.
struct Context {
  const KvLayer& layer;
  const std::int32_t* blocks;
  const std::uint8_t* data;       // of this KV head in block 0
  const std::uint8_t* next_data;  // of the one that is likely to be read after it
  int length;                     // positions that hold something

  const std::uint8_t* group(int index) const { return group(index, data); }
  const std::uint8_t* group(int index, const std::uint8_t* head) const {
    return head + blocks[index / layer.groups_per_block] * layer.block_bytes +
           index % layer.groups_per_block * layer.group_bytes;
  }
};

// One tile of an int8 context. Where nothing was written scales are 0; groups of which nothing was
// are any other.
struct Tile {
  const std::uint8_t* groups[kGroups];
  const std::uint8_t* next_groups[kGroups];  // what will be read after this tile, or any other
  alignas(64) float key_scales[kTileTokens];
  alignas(64) float value_scales[kTileTokens];
};

LAYBY_INLINE Ints lane_numbers(int first) {
  alignas(64) static constexpr std::int32_t numbers[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                               8, 9, 10, 11, 12, 13, 14, 15};
  return add(load_ints(numbers), all_ints(first));
}

LAYBY_INLINE void open_tile(const Context& context, int first_position, Tile* tile) {
  const int dim = context.layer.head_dim, tokens = context.length - first_position;
  for (int g = 0; g < kGroups; ++g) {
    if (g * kGroupTokens >= tokens) {
      tile->groups[g] = tile->groups[0];
      store(tile->key_scales + g * kGroupTokens, all(0.0f));
      store(tile->value_scales + g * kGroupTokens, all(0.0f));
      continue;
    }
    tile->groups[g] = context.group(first_position / kGroupTokens + g);
    const auto* scales = reinterpret_cast<const std::uint16_t*>(tile->groups[g] + 32 * dim);
    const Mask held = at_most(lane_numbers(g * kGroupTokens), all_ints(tokens - 1));
    store(tile->key_scales + g * kGroupTokens, select(held, load_bfloat16(scales), all(0.0f)));
    store(tile->value_scales + g * kGroupTokens,
          select(held, load_bfloat16(scales + kGroupTokens), all(0.0f)));
  }
  const bool last = tokens <= kTileTokens;
  const int next = last ? 0 : first_position / kGroupTokens + kGroups;
  const int end = (context.length - 1) / kGroupTokens;
  for (int g = 0; g < kGroups; ++g) {
    tile->next_groups[g] =
        context.group(std::min(next + g, end), last ? context.next_data : context.data);
    prefetch(tile->next_groups[g] + 32 * dim);
  }
}

// Running state of sixteen rows.
struct Rows {
  Floats top, sum;
};

struct Factors {
  Floats decay, gain;  // output = output * decay + acc * gain
};

// What 8-bit weights are relative to the largest scale; the least scale is there to divide by.
LAYBY_INLINE Floats weight_unit(Floats largest_scale) {
  alignas(64) float lanes[kLanes];
  store(lanes, max(largest_scale, all(1e-30f)));
  for (float& lane : lanes) lane = 255.0f * kUnit / lane;
  return load(lanes);
}

LAYBY_INLINE Factors fold(Rows* rows, Floats top, Ints sum, Floats largest_scale) {
  const Floats new_top = max(rows->top, top);
  const Floats decay = exp2_fine(sub(rows->top, new_top));
  const Floats gain = exp2_fine(sub(top, new_top));
  rows->top = new_top;
  rows->sum = fma(rows->sum, decay, mul(to_floats(sum), mul(gain, all(kUnit))));
  return {decay, mul(gain, mul(max(largest_scale, all(1e-30f)), all(1.0f / 255.0f)))};
}

// ---- int8, few rows ----------------------------------------------------------------------------

// State of up to kMaxFew rows, whatever positions they have.
struct FewRows {
  const std::int8_t* queries[kMaxFew];
  int limits[kMaxFew];   // last position that the row sees
  int offsets[kMaxFew];  // -128 * the query's sum: keys are stored with 128 added
  alignas(64) float scales[kLanes];
  Rows state;
  alignas(64) float output[kMaxFew * kMaxHeadDim];
};

template <int R, int N>
LAYBY_INLINE void few_values(const Tile& tile, int groups, int dim, int first,
                             const std::uint8_t (*weights)[kTileTokens], const float* decay,
                             const float* gain, float* output) {
  Ints acc[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[r][n] = all_ints(0);
  }
  for (int g = 0; g < groups; ++g) {
    const std::size_t offset = kGroupTokens * dim + 4 * first;
    const std::uint8_t* values = tile.groups[g] + offset;
    const std::uint8_t* next_values = tile.next_groups[g] + offset;
#pragma GCC unroll 4
    for (int quad = 0; quad < kGroupTokens / 4; ++quad) {
      Ints value[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        value[n] = load_ints(values + quad * 4 * dim + n * 64);
        prefetch(next_values + quad * 4 * dim + n * 64);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Ints weight = all_bytes(weights[r] + g * kGroupTokens + quad * 4);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[r][n] = dot4(acc[r][n], weight, value[n]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const Floats down = all(decay[r]), up = all(gain[r]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* out = output + r * kMaxHeadDim + first + n * kLanes;
      store(out, fma(to_floats(acc[r][n]), up, mul(load(out), down)));
    }
  }
}

// Folds the first G groups of a tile into R rows. `Whole`: every row sees all 16 * G tokens.
template <int R, int G, bool Whole>
LAYBY_INLINE void few_tile(const Tile& tile, int first_position, int dim, FewRows* rows) {
  Ints score[R][G];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) score[r][g] = all_ints(rows->offsets[r]);
  }
  for (int d = 0; d < dim; d += 4) {
    Ints key[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      key[g] = load_ints(tile.groups[g] + d * kGroupTokens);
      prefetch(tile.next_groups[g] + d * kGroupTokens);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Ints query = all_bytes(rows->queries[r] + d);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) score[r][g] = dot4(score[r][g], key[g], query);
    }
  }

  alignas(64) std::uint8_t weights[R][kTileTokens];
  alignas(64) float tops[kLanes] = {}, largest[kLanes] = {};
  alignas(64) std::int32_t sums[kLanes] = {};
  Floats key_scale[G], value_scale[G];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    key_scale[g] = load(tile.key_scales + g * kGroupTokens);
    value_scale[g] = load(tile.value_scales + g * kGroupTokens);
  }
  Floats s[R][G];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    Floats best = all(kLowest), scale = all(0.0f);
    const Ints limit = all_ints(rows->limits[r] - first_position);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const Mask seen = at_most(lane_numbers(g * kGroupTokens), limit);
      s[r][g] = mul(to_floats(score[r][g]), key_scale[g]);
      best = max(best, Whole ? s[r][g] : select(seen, s[r][g], all(kLowest)));
      scale = max(scale, Whole ? value_scale[g] : select(seen, value_scale[g], all(0.0f)));
    }
    const bool any = Whole || rows->limits[r] >= first_position;
    tops[r] = any ? max_lane(best) * rows->scales[r] : kLowest;
    largest[r] = max_lane(scale);
  }
  alignas(64) float units[kLanes];
  store(units, weight_unit(load(largest)));
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const Floats scale = all(rows->scales[r]), shift = all(kUnitExponent - tops[r]);
    const Floats unit = all(units[r]);
    const Ints limit = all_ints(rows->limits[r] - first_position);
    Ints sum = all_ints(0);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      Floats p = exp2_rough(fma(s[r][g], scale, shift));
      if (!Whole) p = select(at_most(lane_numbers(g * kGroupTokens), limit), p, all(0.0f));
      sum = add(sum, to_ints(p));
      store_bytes(weights[r] + g * kGroupTokens, to_ints(mul(p, mul(value_scale[g], unit))));
    }
    sums[r] = sum_lanes(sum);
  }
  const Factors factors = fold(&rows->state, load(tops), load_ints(sums), load(largest));
  alignas(64) float decay[kLanes], gain[kLanes];
  store(decay, factors.decay);
  store(gain, factors.gain);
  int first = 0;
  for (; first + 4 * kLanes <= dim; first += 4 * kLanes) {
    few_values<R, 4>(tile, G, dim, first, weights, decay, gain, rows->output);
  }
  for (; first < dim; first += kLanes) {
    few_values<R, 1>(tile, G, dim, first, weights, decay, gain, rows->output);
  }
}

template <int R>
void few_rows(const Queries& queries, const Context& context, const QuerySpan& span, int kv_head,
              int first_pair, float* out) {
  const int dim = context.layer.head_dim;
  const int per_kv = queries.num_heads / context.layer.num_kv_heads;
  FewRows rows;
  std::size_t index[R];
  const float scale = kLog2e / std::sqrt(static_cast<float>(dim));
  for (int r = 0; r < kLanes; ++r) rows.scales[r] = 0.0f;
  for (int r = 0; r < R; ++r) {
    const int pair = first_pair + r;
    const std::size_t row = span.first_row + pair / per_kv;
    index[r] = row * queries.num_heads + kv_head * per_kv + pair % per_kv;
    rows.queries[r] = queries.quantised + index[r] * dim;
    rows.limits[r] = span.start + pair / per_kv;
    rows.scales[r] = queries.scales[index[r]] * scale;
    int sum = 0;
    for (int d = 0; d < dim; ++d) sum += rows.queries[r][d];
    rows.offsets[r] = -128 * sum;
    std::fill_n(rows.output + r * kMaxHeadDim, dim, 0.0f);
  }
  rows.state = {all(kLowest), all(0.0f)};
  Tile tile;
  for (int first = 0; first <= rows.limits[R - 1]; first += kTileTokens) {
    open_tile(context, first, &tile);
    if (first + kTileTokens - 1 <= rows.limits[0]) {
      few_tile<R, kGroups, true>(tile, first, dim, &rows);
      continue;
    }
    // What lies beyond the last row's position adds zeros.
    if (kMaxFew > 1 && rows.limits[R - 1] - first < kTileTokens / 2) {
      few_tile<R, kGroups / 2, false>(tile, first, dim, &rows);
    } else {
      few_tile<R, kGroups, false>(tile, first, dim, &rows);
    }
  }
  alignas(64) float sums[kLanes];
  store(sums, rows.state.sum);
  for (int r = 0; r < R; ++r) {
    const Floats inverse = all(1.0f / sums[r]);
    for (int d = 0; d < dim; d += kLanes) {
      store(out + index[r] * dim + d, mul(load(rows.output + r * kMaxHeadDim + d), inverse));
    }
  }
}

// ---- int8, many rows ---------------------------------------------------------------------------

// State of V vectors of rows.
template <int V>
struct ManyRows {
  alignas(64) std::int8_t queries[kMaxHeadDim / 4][V][kLanes][4];
  Ints offsets[V];
  Ints limits[V];
  Floats scales[V];
  Rows state[V];
  alignas(64) float output[kMaxHeadDim][V][kLanes];
  alignas(64) float scores[kTileTokens][V][kLanes];
  alignas(64) std::uint8_t weights[kTileTokens / 4][V][kLanes][4];
};

// Folds the first `tokens` (a multiple of kAtOnce) of a tile into the rows.
template <int V, bool Whole>
LAYBY_INLINE void many_tile(const Tile& tile, int first_position, int tokens, int dim,
                            ManyRows<V>* rows) {
  Floats best[V], largest[V];
  Ints limits[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    best[v] = all(kLowest);
    largest[v] = all(0.0f);
    limits[v] = add(rows->limits[v], all_ints(-first_position));
  }
  for (int t = 0; t < tokens; t += kAtOnce) {
    const std::uint8_t* keys = tile.groups[t / kGroupTokens] + t % kGroupTokens * 4;
    Ints score[V][kAtOnce];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 8
      for (int i = 0; i < kAtOnce; ++i) score[v][i] = rows->offsets[v];
    }
    for (int d = 0; d < dim; d += 4) {
      Ints query[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) query[v] = load_ints(rows->queries[d / 4][v]);
#pragma GCC unroll 8
      for (int i = 0; i < kAtOnce; ++i) {
        const Ints key = all_bytes(keys + d * kGroupTokens + 4 * i);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) score[v][i] = dot4(score[v][i], key, query[v]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kAtOnce; ++i) {
      const Floats key_scale = all(tile.key_scales[t + i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const Floats s = mul(to_floats(score[v][i]), key_scale);
        store(rows->scores[t + i][v], s);
        if (Whole) {
          best[v] = max(best[v], s);
        } else {
          const Mask seen = at_most(all_ints(t + i), limits[v]);
          best[v] = max(best[v], select(seen, s, all(kLowest)));
          largest[v] =
              max(largest[v], select(seen, all(tile.value_scales[t + i]), all(0.0f)));
        }
      }
    }
  }
  if (Whole) {
    Floats scale = load(tile.value_scales);
    for (int t = kLanes; t < kTileTokens; t += kLanes) scale = max(scale, load(tile.value_scales + t));
    const Floats largest_of_all = all(max_lane(scale));
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) largest[v] = largest_of_all;
  }

  Factors factors[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    Floats top = mul(best[v], rows->scales[v]);
    if (!Whole) top = select(at_most(all_ints(0), limits[v]), top, all(kLowest));
    const Floats shift = sub(all(kUnitExponent), top), unit = weight_unit(largest[v]);
    const Floats scale = rows->scales[v];
    Ints sum = all_ints(0);
    for (int t = 0; t < tokens; t += 4) {
      Ints weight[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Floats p = exp2_rough(fma(load(rows->scores[t + i][v]), scale, shift));
        if (!Whole) p = select(at_most(all_ints(t + i), limits[v]), p, all(0.0f));
        sum = add(sum, to_ints(p));
        weight[i] = to_ints(mul(p, mul(all(tile.value_scales[t + i]), unit)));
      }
      store_ints(rows->weights[t / 4][v], pack(weight[0], weight[1], weight[2], weight[3]));
    }
    factors[v] = fold(&rows->state[v], top, sum, largest[v]);
  }

  for (int d = 0; d < dim; d += kAtOnce) {
    Ints acc[kAtOnce][V];
#pragma GCC unroll 8
    for (int i = 0; i < kAtOnce; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[i][v] = all_ints(0);
    }
    for (int t = 0; t < tokens; t += 4) {
      const std::uint8_t* values = tile.groups[t / kGroupTokens] + kGroupTokens * dim +
                                   t % kGroupTokens * dim + 4 * d;
      Ints weight[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) weight[v] = load_ints(rows->weights[t / 4][v]);
#pragma GCC unroll 8
      for (int i = 0; i < kAtOnce; ++i) {
        const Ints value = all_bytes(values + 4 * i);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[i][v] = dot4(acc[i][v], weight[v], value);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kAtOnce; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        float* out = rows->output[d + i][v];
        store(out, fma(to_floats(acc[i][v]), factors[v].gain, mul(load(out), factors[v].decay)));
      }
    }
  }
}

template <int V>
void many_rows(const Queries& queries, const Context& context, const QuerySpan& span, int kv_head,
               int first_pair, int num_pairs, float* out) {
  const int dim = context.layer.head_dim;
  const int per_kv = queries.num_heads / context.layer.num_kv_heads;
  const float scale = kLog2e / std::sqrt(static_cast<float>(dim));
  ManyRows<V> rows;
  std::size_t index[V * kLanes];
  alignas(64) std::int32_t offsets[V * kLanes], limits[V * kLanes];
  alignas(64) float scales[V * kLanes];
  for (int r = 0; r < V * kLanes; ++r) {
    // Lanes beyond the last row repeat it.
    const int pair = first_pair + std::min(r, num_pairs - 1);
    const std::size_t row = span.first_row + pair / per_kv;
    index[r] = row * queries.num_heads + kv_head * per_kv + pair % per_kv;
    limits[r] = span.start + pair / per_kv;
    scales[r] = queries.scales[index[r]] * scale;
    const std::int8_t* query = queries.quantised + index[r] * dim;
    int sum = 0;
    for (int d = 0; d < dim; ++d) sum += query[d];
    offsets[r] = -128 * sum;
    for (int d = 0; d < dim; d += 4) {
      std::memcpy(rows.queries[d / 4][r / kLanes][r % kLanes], query + d, 4);
    }
  }
  for (int v = 0; v < V; ++v) {
    rows.offsets[v] = load_ints(offsets + v * kLanes);
    rows.limits[v] = load_ints(limits + v * kLanes);
    rows.scales[v] = load(scales + v * kLanes);
    rows.state[v] = {all(kLowest), all(0.0f)};
  }
  for (int d = 0; d < dim; ++d) {
    for (int v = 0; v < V; ++v) store(rows.output[d][v], all(0.0f));
  }
  const int last = limits[V * kLanes - 1];
  Tile tile;
  for (int first = 0; first <= last; first += kTileTokens) {
    open_tile(context, first, &tile);
    if (first + kTileTokens - 1 <= limits[0]) {
      many_tile<V, true>(tile, first, kTileTokens, dim, &rows);
    } else {
      const int tokens = std::min(kTileTokens, last - first + 1);
      many_tile<V, false>(tile, first, (tokens + kAtOnce - 1) / kAtOnce * kAtOnce, dim, &rows);
    }
  }
  for (int v = 0; v < V; ++v) {
    alignas(64) float sums[kLanes];
    store(sums, rows.state[v].sum);
    for (int lane = 0; lane < kLanes && v * kLanes + lane < num_pairs; ++lane) {
      const float inverse = 1.0f / sums[lane];
      float* to = out + index[v * kLanes + lane] * dim;
      for (int d = 0; d < dim; ++d) to[d] = rows.output[d][v][lane] * inverse;
    }
  }
}

// ---- float -------------------------------------------------------------------------------------

LAYBY_INLINE Floats load_lanes(const float* p) { return load(p); }
LAYBY_INLINE Floats load_lanes(const std::uint16_t* p) { return load_bfloat16(p); }

LAYBY_INLINE float sum_of(Floats a) {
  alignas(64) float lanes[kLanes];
  store(lanes, a);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

template <class Element, int R>
void float_rows(const Queries& queries, const Context& context, const QuerySpan& span, int kv_head,
                int first_pair, float* out) {
  const int dim = context.layer.head_dim;
  const int per_kv = queries.num_heads / context.layer.num_kv_heads;
  const Floats scale = all(kLog2e / std::sqrt(static_cast<float>(dim)));
  std::size_t index[R];
  int limits[R];
  alignas(64) float output[R][kMaxHeadDim];
  for (int r = 0; r < R; ++r) {
    const int pair = first_pair + r;
    const std::size_t row = span.first_row + pair / per_kv;
    index[r] = row * queries.num_heads + kv_head * per_kv + pair % per_kv;
    limits[r] = span.start + pair / per_kv;
    std::fill_n(output[r], dim, 0.0f);
  }
  Rows state = {all(kLowest), all(0.0f)};
  alignas(64) float weights[R][kTileTokens];
  for (int first = 0; first <= limits[R - 1]; first += kTileTokens) {
    const int seen_tokens = std::min(kTileTokens, limits[R - 1] - first + 1);
    const Element* groups[kGroups];
    for (int g = 0; g < kGroups; ++g) {
      const int held = std::min(g, (seen_tokens - 1) / kGroupTokens);
      groups[g] = reinterpret_cast<const Element*>(context.group(first / kGroupTokens + held));
    }
    alignas(64) float tops[kLanes] = {}, sums[kLanes] = {};
    Floats score[R][kGroups];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) score[r][g] = all(0.0f);
    }
    for (int d = 0; d < dim; ++d) {
      Floats key[kGroups];
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) key[g] = load_lanes(groups[g] + d * kGroupTokens);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Floats query = all(queries.floats[index[r] * dim + d]);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) score[r][g] = fma(query, key[g], score[r][g]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Ints limit = all_ints(limits[r] - first);
      Floats best = all(kLowest);
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const Mask seen = at_most(lane_numbers(g * kGroupTokens), limit);
        score[r][g] = select(seen, mul(score[r][g], scale), all(kLowest));
        best = max(best, score[r][g]);
      }
      tops[r] = max_lane(best);
      Floats sum = all(0.0f);
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const Mask seen = at_most(lane_numbers(g * kGroupTokens), limit);
        const Floats p = exp2_fine(sub(score[r][g], all(tops[r])));
        const Floats weight = select(seen, p, all(0.0f));
        sum = add(sum, weight);
        store(weights[r] + g * kGroupTokens, weight);
      }
      sums[r] = sum_of(sum);
    }
    const Floats top = load(tops), new_top = max(state.top, top);
    alignas(64) float decay[kLanes], gain[kLanes];
    store(decay, exp2_fine(sub(state.top, new_top)));
    store(gain, exp2_fine(sub(top, new_top)));
    state.top = new_top;
    state.sum = fma(state.sum, load(decay), mul(load(sums), load(gain)));

    for (int d = 0; d < dim; d += kLanes) {
      Floats acc[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r] = all(0.0f);
      for (int t = 0; t < seen_tokens; ++t) {
        const Element* values = groups[t / kGroupTokens] + (kGroupTokens + t % kGroupTokens) * dim;
        const Floats value = load_lanes(values + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[r] = fma(all(weights[r][t]), value, acc[r]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Floats old = mul(load(output[r] + d), all(decay[r]));
        store(output[r] + d, fma(acc[r], all(gain[r]), old));
      }
    }
  }
  alignas(64) float sums[kLanes];
  store(sums, state.sum);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const Floats inverse = all(1.0f / sums[r]);
    for (int d = 0; d < dim; d += kLanes) {
      store(out + index[r] * dim + d, mul(load(output[r] + d), inverse));
    }
  }
}

// ---- Dispatch over row counts ------------------------------------------------------------------

using Kernel = void (*)(const Queries&, const Context&, const QuerySpan&, int, int, float*);

// few<K>(count) is the kernel for `count` rows.
template <template <int> class Few>
Kernel few(int count) {
  if constexpr (kMaxFew >= 4) {
    if (count == 4) return Few<4>::run;
    if (count == 3) return Few<3>::run;
    if (count == 2) return Few<2>::run;
  }
  return Few<1>::run;
}

template <int R> struct FewInt8 { static constexpr Kernel run = few_rows<R>; };
template <int R> struct FewBfloat16 { static constexpr Kernel run = float_rows<std::uint16_t, R>; };
template <int R> struct FewFloat32 { static constexpr Kernel run = float_rows<float, R>; };

// Fewer rows than this leave so many lanes idle that lanes are better tokens.
constexpr int kMinMany = 11;

// Does the first of `left` rows in lanes; returns how many, 0 if they are too few.
int many([[maybe_unused]] const Queries& queries, [[maybe_unused]] const Context& context,
         [[maybe_unused]] const QuerySpan& span, [[maybe_unused]] int kv_head,
         [[maybe_unused]] int first_pair, int left, [[maybe_unused]] float* out) {
  if (left < kMinMany) return 0;
  if constexpr (kMaxVectors >= 2) {
    if (left >= kLanes + kMinMany) {
      const int count = std::min(left, 2 * kLanes);
      many_rows<2>(queries, context, span, kv_head, first_pair, count, out);
      return count;
    }
  }
  if constexpr (kMaxVectors >= 1) {
    const int count = std::min(left, kLanes);
    many_rows<1>(queries, context, span, kv_head, first_pair, count, out);
    return count;
  }
  return 0;
}

void attend(const Queries& queries, const KvLayer& layer, KvType type, const QuerySpan& span,
            const AttentionTask& task, float* out) {
  const std::uint8_t* data = layer.data + task.kv_head * layer.head_bytes;
  const bool last_head = task.kv_head + 1 == layer.num_kv_heads;
  const Context context = {layer, span.blocks, data, last_head ? data : data + layer.head_bytes,
                           span.start + span.num_rows};
  int pair = task.first_pair;
  const int end = task.first_pair + task.num_pairs;
  while (pair < end) {
    int count = 0;
    if (type == KvType::int8) {
      count = many(queries, context, span, task.kv_head, pair, end - pair, out);
    }
    if (count == 0) {
      count = std::min(end - pair, kMaxFew);
      const Kernel kernel = type == KvType::int8       ? few<FewInt8>(count)
                            : type == KvType::bfloat16 ? few<FewBfloat16>(count)
                                                       : few<FewFloat32>(count);
      kernel(queries, context, span, task.kv_head, pair, out);
    }
    pair += count;
  }
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {rope_write, attend};

}  // namespace LAYBY_ISA
}  // namespace layby
