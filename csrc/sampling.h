// Choosing one token per row of logits: temperature, min-p, top-k, top-p and a draw.
// See sampling_kernels.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace layby {

// Probabilities are summed in blocks of this many, and the blocks' sums in order.
constexpr std::size_t kSumBlock = 256;

// Candidates for a cut are looked for among this many tokens before all are.
constexpr std::size_t kShortList = 4096;

// Dividing by lower temperatures would overflow.
constexpr float kGreedyBelow = 1e-5f;

// What one row is chosen from, and how.
struct TokenChoice {
  const float* logits;  // [vocab]
  std::size_t vocab;
  bool greedy;          // the likeliest token; what follows does not matter
  float temperature;
  float least;          // rules out the tokens with (logit - largest logit) / temperature below it
  std::size_t top_k;    // vocab: off
  double top_p;         // 1: off
  double uniform;       // in [0, 1)
};

// Where a thread keeps what it notes about its row.
struct SamplingScratch {
  float* maxima;         // [blocks, 16]
  float* sums;           // [blocks]
  float* weights;        // [vocab]
  float* short_logits;   // [kShortList]
  float* short_weights;  // [kShortList]
  std::int32_t* ids;     // [kShortList]
};

struct SamplingKernels {
  // False, and no token, if the largest logit is not finite or one is NaN.
  bool (*choose)(const TokenChoice& choice, const SamplingScratch& scratch, std::int64_t* token);
};

LAYBY_DISPATCH(SamplingKernels, sampling_kernels)

// One number per row in each array.
struct SamplingParameters {
  const float* temperature;   // below kGreedyBelow: greedy
  const std::int64_t* top_k;  // 0, less, or more than there are tokens: off
  const double* top_p;
  const float* min_p;
  const double* uniforms;
};

// logits [rows, vocab] -> tokens [rows] and whether a row has none to choose, on all threads.
void choose_tokens(const float* logits, const SamplingParameters& parameters, std::int64_t* tokens,
                   bool* faulty, std::size_t rows, std::size_t vocab);

}  // namespace layby
