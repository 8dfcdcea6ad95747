// Rows of logits, spread over the threads; each row is one thread's alone.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "thread_pool.h"

namespace layby {
namespace {

// Below this e^x counts as zero: what `exp` of simd.h is made for ends here.
constexpr float kLeastExponent = -87.0f;

// The largest number that a draw may be looked up by.
constexpr double kBelowOne = 1 - 0x1p-53;

// Rows per chunk: some 16 thousand numbers, as in elementwise.cpp.
std::size_t rows_per_chunk(std::size_t vocab) { return 16384 / (vocab + 1) + 1; }

// This thread's, as large as any vocabulary so far needed it.
SamplingScratch scratch_for(std::size_t vocab) {
  static thread_local std::vector<float> numbers;
  static thread_local std::vector<std::int32_t> ids(kShortList);
  const std::size_t blocks = (vocab + kSumBlock - 1) / kSumBlock;
  numbers.resize(std::max(numbers.size(), 17 * blocks + vocab + 2 * kShortList));
  SamplingScratch scratch;
  scratch.maxima = numbers.data();
  scratch.sums = scratch.maxima + 16 * blocks;
  scratch.weights = scratch.sums + blocks;
  scratch.short_logits = scratch.weights + vocab;
  scratch.short_weights = scratch.short_logits + kShortList;
  scratch.ids = ids.data();
  return scratch;
}

TokenChoice choice_of(const float* logits, const SamplingParameters& parameters, std::size_t row,
                      std::size_t vocab) {
  TokenChoice choice;
  choice.logits = logits + row * vocab;
  choice.vocab = vocab;
  choice.temperature = parameters.temperature[row];
  choice.greedy = !(choice.temperature >= kGreedyBelow);
  // e^x with x no less than this is a token's probability over the largest; which itself stays.
  const float min_p = parameters.min_p[row];
  choice.least = min_p > 0 ? std::clamp(std::log(min_p), kLeastExponent, 0.0f) : kLeastExponent;
  const std::int64_t top_k = parameters.top_k[row];
  choice.top_k = top_k > 0 ? std::min(static_cast<std::size_t>(top_k), vocab) : vocab;
  choice.top_p = parameters.top_p[row];
  const double uniform = parameters.uniforms[row];
  choice.uniform = uniform > 0 ? std::min(uniform, kBelowOne) : 0;
  return choice;
}

}  // namespace

void choose_tokens(const float* logits, const SamplingParameters& parameters, std::int64_t* tokens,
                   bool* faulty, std::size_t rows, std::size_t vocab) {
  const SamplingKernels& kernels = sampling_kernels();
  parallel_ranges(rows, rows_per_chunk(vocab), [&](std::size_t begin, std::size_t end) {
    const SamplingScratch scratch = scratch_for(vocab);
    for (std::size_t row = begin; row < end; ++row) {
      tokens[row] = 0;
      faulty[row] =
          !kernels.choose(choice_of(logits, parameters, row, vocab), scratch, tokens + row);
    }
  });
}

}  // namespace layby
