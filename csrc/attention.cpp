// See attention.h: geometry, the cutting of a batch into tasks, and their spread over threads.
#include "attention.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

namespace layby {
namespace {

// Rows that one task handles: as many as attention_kernels.cpp takes at once.
constexpr int kTaskPairs = 32;
// Tasks per KV head from which on the threads are kept busy by whole sequences.
constexpr std::size_t kManyTasks = 16;
constexpr std::size_t kRowsPerChunk = 8;

}  // namespace

std::size_t KvLayout::group_bytes() const {
  const std::size_t numbers = std::size_t{2} * kGroupTokens * head_dim;
  switch (type) {
    case KvType::int8: return numbers + 2 * kGroupTokens * sizeof(std::uint16_t);
    case KvType::bfloat16: return numbers * 2;
    default: return numbers * 4;
  }
}

KvLayer layer_of(const KvLayout& layout, std::uint8_t* pool, int layer) {
  return {pool + layer * layout.layer_bytes(), layout.block_bytes(),   layout.head_bytes(),
          layout.group_bytes(),                layout.block_size / kGroupTokens,
          layout.num_kv_heads,                 layout.head_dim};
}

AttentionBatch::AttentionBatch(const KvLayout& layout, int num_heads, std::size_t num_blocks,
                               const std::int32_t* first_rows, const std::int32_t* num_rows,
                               const std::int32_t* starts, const std::int32_t* tables,
                               std::size_t num_spans, std::size_t table_width)
    : layout_(layout),
      num_heads_(num_heads),
      num_blocks_(num_blocks),
      tables_(tables, tables + num_spans * table_width) {
  if (num_heads <= 0 || num_heads % layout.num_kv_heads != 0) {
    throw std::invalid_argument(std::to_string(num_heads) + " heads cannot share " +
                                std::to_string(layout.num_kv_heads) + " KV heads evenly");
  }
  const int per_kv = num_heads / layout.num_kv_heads;
  for (std::size_t s = 0; s < num_spans; ++s) {
    const std::string who = "sequence " + std::to_string(s);
    if (first_rows[s] < 0 || num_rows[s] < 0 || starts[s] < 0) {
      throw std::invalid_argument(who + " has a negative row, count or position");
    }
    const std::int64_t length = std::int64_t{starts[s]} + num_rows[s];
    const std::size_t held = (length + layout.block_size - 1) / layout.block_size;
    if (num_rows[s] > 0 && held > table_width) {
      throw std::invalid_argument(who + " needs " + std::to_string(held) +
                                  " blocks and its table holds " + std::to_string(table_width));
    }
    const std::int32_t* blocks = tables_.data() + s * table_width;
    for (std::size_t i = 0; num_rows[s] > 0 && i < held; ++i) {
      if (blocks[i] < 0 || static_cast<std::size_t>(blocks[i]) >= num_blocks) {
        throw std::invalid_argument(who + " has block " + std::to_string(blocks[i]) +
                                    " in a pool of " + std::to_string(num_blocks));
      }
    }
    spans_.push_back({blocks, first_rows[s], num_rows[s], starts[s]});
    num_rows_ = std::max(num_rows_, first_rows[s] + num_rows[s]);
    const int pairs = num_rows[s] * per_kv;
    for (int head = 0; head < layout.num_kv_heads; ++head) {
      for (int pair = 0; pair < pairs; pair += kTaskPairs) {
        tasks_.push_back(
            {static_cast<int>(s), head, pair, std::min(kTaskPairs, pairs - pair)});
      }
    }
  }
  // The longest first, so that the threads end together.
  const auto cost = [&](const AttentionTask& task) {
    const QuerySpan& span = spans_[task.span];
    const std::int64_t context = span.start + (task.first_pair + task.num_pairs - 1) / per_kv + 1;
    return context * (task.num_pairs + kGroupTokens);
  };
  std::stable_sort(tasks_.begin(), tasks_.end(),
                   [&](const AttentionTask& a, const AttentionTask& b) { return cost(a) > cost(b); });
}

void AttentionBatch::attend(std::uint8_t* pool, int layer, const Queries& queries,
                            float* out) const {
  const KvLayer where = layer_of(layout_, pool, layer);
  const AttentionKernels& kernels = attention_kernels();
  // Heads of one sequence lie side by side in memory: with tasks enough, one thread does them all.
  const auto heads = static_cast<std::size_t>(layout_.num_kv_heads);
  const std::size_t grain = tasks_.size() >= kManyTasks * heads ? heads : 1;
  parallel_ranges(tasks_.size(), grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t index = begin; index < end; ++index) {
      const AttentionTask& task = tasks_[index];
      kernels.attend(queries, where, layout_.type, spans_[task.span], task, out);
    }
  });
}

void rope_write(const RopeWrite& job, const KvLayout& layout, std::uint8_t* pool, int layer,
                std::size_t num_rows) {
  const KvLayer where = layer_of(layout, pool, layer);
  const AttentionKernels& kernels = attention_kernels();
  parallel_ranges(num_rows, kRowsPerChunk, [&](std::size_t begin, std::size_t end) {
    kernels.rope_write(job, where, layout.type, begin, end);
  });
}

}  // namespace layby
