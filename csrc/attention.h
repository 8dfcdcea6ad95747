// Attention over a paged KV cache: rotary positions and the write of keys and values, and the read.
//
// Every row is exact: the bits of a row's result depend on its own query and its own context alone,
// not on the rest of the batch, on how its sequence was cut into chunks, or on the threads. The
// context is walked in tiles of kTileTokens positions, counted from position 0. A tile that a row
// may not see leaves the row untouched, and what a row computes in a tile is the same sequence of
// roundings in every kernel here; only sums of integers, and maxima, are taken in varying order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dispatch.h"

namespace layby {

enum class KvType { int8, bfloat16, float32 };

// Tokens whose keys, or values, lie interleaved. Block sizes are multiples of it.
constexpr int kGroupTokens = 16;
// Context positions that are handled at once.
constexpr int kTileTokens = 64;
constexpr int kMaxHeadDim = 256;

// Where things lie in the pool of blocks.
//
// A block holds its tokens for all layers, so that parking it is one copy: [layers][kv heads][groups
// of 16 tokens][group]. A group is, for D dimensions,
//   int8:      keys   [D/4][16 tokens][4]  uint8, 128 + number
//              values [16/4][D][4 tokens]  int8
//              scales [2][16]              bfloat16, of keys, then of values; one per token
//   bfloat16,  keys   [D][16 tokens]
//   float32:   values [16 tokens][D]
struct KvLayout {
  KvType type;
  int num_layers;
  int num_kv_heads;
  int head_dim;
  int block_size;

  std::size_t group_bytes() const;
  std::size_t head_bytes() const { return group_bytes() * (block_size / kGroupTokens); }
  std::size_t layer_bytes() const { return head_bytes() * num_kv_heads; }
  std::size_t block_bytes() const { return layer_bytes() * num_layers; }
};

// One layer's part of the pool.
struct KvLayer {
  std::uint8_t* data;  // of block 0
  std::size_t block_bytes;
  std::size_t head_bytes;
  std::size_t group_bytes;
  int groups_per_block;
  int num_kv_heads;
  int head_dim;
};

// Rows of one sequence in the flat batch.
struct QuerySpan {
  const std::int32_t* blocks;  // block table
  int first_row;
  int num_rows;
  int start;  // position of the first row, which sees positions 0 … start
};

// The part of an attention that one thread does at a time: some rows of one sequence, one KV head.
// Rows are pairs (position, head of the group of query heads), position-major.
struct AttentionTask {
  int span;
  int kv_head;
  int first_pair;
  int num_pairs;
};

// Rotated queries: int8 with a scale for each row and head, or float32.
struct Queries {
  const std::int8_t* quantised;  // [T, H, D]
  const float* scales;           // [T, H]
  const float* floats;           // [T, H, D]
  int num_heads;
};

struct RopeWrite {
  const float* qkv;               // [T, H + 2 Hkv, D], row_stride apart
  std::ptrdiff_t row_stride;
  const std::int64_t* positions;  // [T]
  const float* cos_sin;           // [positions, D]: cosines, then sines, D/2 of each
  const std::int64_t* slots;      // [T], block * block_size + offset; negative: not stored
  const float* query_norm;        // [D], or null
  const float* key_norm;
  float norm_eps;
  int num_heads;
  std::int8_t* quantised;         // as in Queries; null if the cache is not int8
  float* scales;
  float* floats;                  // null if the cache is int8
};

struct AttentionKernels {
  void (*rope_write)(const RopeWrite&, const KvLayer&, KvType, std::size_t begin, std::size_t end);
  // out [T, H * D]
  void (*attend)(const Queries&, const KvLayer&, KvType, const QuerySpan&, const AttentionTask&,
                 float* out);
};

LAYBY_DISPATCH(AttentionKernels, attention_kernels)

// What all layers of one step share: who attends to what, cut into tasks.
class AttentionBatch {
 public:
  // `tables` [S, table_width] is copied. Throws std::invalid_argument on a span that its table, the
  // pool or the batch cannot hold.
  AttentionBatch(const KvLayout& layout, int num_heads, std::size_t num_blocks,
                 const std::int32_t* first_rows, const std::int32_t* num_rows,
                 const std::int32_t* starts, const std::int32_t* tables, std::size_t num_spans,
                 std::size_t table_width);

  const KvLayout& layout() const { return layout_; }
  int num_heads() const { return num_heads_; }
  std::size_t num_blocks() const { return num_blocks_; }
  int num_rows() const { return num_rows_; }  // that the flat batch must have at least

  void attend(std::uint8_t* pool, int layer, const Queries& queries, float* out) const;

 private:
  KvLayout layout_;
  int num_heads_;
  std::size_t num_blocks_;
  int num_rows_ = 0;
  std::vector<std::int32_t> tables_;
  std::vector<QuerySpan> spans_;
  std::vector<AttentionTask> tasks_;  // the longest first
};

void rope_write(const RopeWrite& job, const KvLayout& layout, std::uint8_t* pool, int layer,
                std::size_t num_rows);

KvLayer layer_of(const KvLayout& layout, std::uint8_t* pool, int layer);

}  // namespace layby
