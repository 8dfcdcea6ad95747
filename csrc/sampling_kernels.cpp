// Choosing a token from a row of logits, compiled once per instruction set and giving the same
// token on each (see simd.h).
//
// A token's weight is its probability over that of the likeliest: e^((logit - peak) / temperature),
// or zero where min-p or float32 have it so. Tokens rank by logit, equals by id.
//
// Where nothing is cut off, two passes are enough: one finds the peak, one sums the weights in
// blocks; then one block is looked at token by token. With top-k or top-p, no token is ever sorted.
// A place in the ranking is a logit (the level) and a number of tokens that equal it, and the level
// is found by bisection: how many tokens are at or above it, and what do they weigh? That takes 40
// passes at the most, whatever the logits are. Hardly any of them go over the whole row: as a rule
// the first pass has made a short list easy to find, and otherwise few tokens are left soon.
#include "sampling.h"

#include "simd.h"

namespace layby::LAYBY_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kLowest = -3.40282347e38f;
constexpr float kSmallestNormal = 1.17549435e-38f;

// Top-p looks at about this many of the likeliest tokens before it looks at all.
constexpr std::size_t kCandidates = 256;

// So many times a range of logits is halved by their values, before it is by their bits.
constexpr int kRoughPasses = 8;

// Calls fn(block, begin, size) for one block after the other.
template <class Fn>
LAYBY_INLINE void each_block(std::size_t count, Fn fn) {
  std::size_t begin = 0;
  for (; begin + kSumBlock <= count; begin += kSumBlock) fn(begin / kSumBlock, begin, kSumBlock);
  if (begin < count) fn(begin / kSumBlock, begin, count - begin);
}

// What turns a row's logits into weights.
struct Scale {
  F16 peak, inverse_temperature, least;
};

LAYBY_INLINE F16 weight(F16 logit, const Scale& scale) {
  const F16 x = (logit - scale.peak) * scale.inverse_temperature;
  return if_at_least(x, scale.least, exp(x), broadcast(0.0f));
}

LAYBY_INLINE void put_weights(const float* logits, std::size_t count, const Scale& scale,
                              float* weights) {
  each_vector(count, [&](std::size_t i, auto lanes) {
    store(weights + i, weight(load(logits + i, lanes), scale), lanes);
  });
}

float weight_of(float logit, const Scale& scale) {
  float result;
  put_weights(&logit, 1, scale, &result);
  return result;
}

// Of each block of logits, the largest of every sixteenth: [blocks, 16]. The largest of all goes
// to `peak`. False if one of them is NaN.
bool find_maxima(const float* logits, std::size_t count, float* maxima, float* peak) {
  const F16 none = broadcast(-kInfinity);
  F16 highest = none;
  unsigned nans = 0;
  each_block(count, [&](std::size_t block, std::size_t begin, std::size_t size) {
    F16 largest_here = none;
    each_vector(size, [&](std::size_t i, auto lanes) {
      const F16 x = load_or(logits + begin + i, lanes, none);
      nans |= lanes_with_nan(x);
      largest_here = max(largest_here, x);
    });
    store(maxima + 16 * block, largest_here);
    highest = max(highest, largest_here);
  });
  *peak = largest(highest) + 0.0f;  // never -0, which differs from 0 in its bits
  return nans == 0;
}

// Place of the nth number, from 0, that equals `value`. There must be one.
std::size_t find_equal(const float* x, std::size_t count, float value, std::size_t nth) {
  const F16 wanted = broadcast(value), other = broadcast(-kInfinity);
  for (std::size_t begin = 0;; begin += 16) {
    const F16 here = begin + 16 <= count
                         ? load(x + begin)
                         : load_or(x + begin, FirstLanes{static_cast<unsigned>(count - begin)},
                                   other);
    unsigned equal = lanes_at_least(here, wanted) & lanes_at_least(wanted, here);
    const auto found = static_cast<std::size_t>(__builtin_popcount(equal));
    if (nth < found) {
      for (; nth > 0; --nth) equal &= equal - 1;
      return begin + static_cast<std::size_t>(__builtin_ctz(equal));
    }
    nth -= found;
  }
}

// The weights' sum in each block, and that of all.
double sum_weights(const float* logits, std::size_t count, const Scale& scale, float* sums) {
  double total = 0;
  each_block(count, [&](std::size_t block, std::size_t begin, std::size_t size) {
    F16 weights = broadcast(0.0f);
    each_vector(size, [&](std::size_t i, auto lanes) {
      const F16 x = load_or(logits + begin + i, lanes, broadcast(-kInfinity));
      weights = weights + weight(x, scale);
    });
    sums[block] = sum(weights);
    total += sums[block];
  });
  return total;
}

// The first place where the running sum of `weights`, which starts at *before, exceeds the target;
// or, if for rounding there is none, the last one with a weight. *before becomes the sum of those
// in front of it.
std::size_t invert(const float* weights, std::size_t count, double target, double* before) {
  std::size_t place = 0;
  double sum = *before;
  for (std::size_t i = 0; i < count && sum <= target; ++i) {
    if (weights[i] > 0) {
      place = i;
      *before = sum;
    }
    sum += weights[i];
  }
  return place;
}

// A draw from all tokens, in order of id.
std::size_t draw(const TokenChoice& choice, const Scale& scale, float* sums) {
  const double total = sum_weights(choice.logits, choice.vocab, scale, sums);
  const double target = choice.uniform * total;
  const std::size_t blocks = (choice.vocab + kSumBlock - 1) / kSumBlock;
  double before = 0;
  const std::size_t begin = kSumBlock * invert(sums, blocks, target, &before);
  const std::size_t rest = choice.vocab - begin;
  const std::size_t size = rest < kSumBlock ? rest : kSumBlock;
  float weights[kSumBlock];
  put_weights(choice.logits + begin, size, scale, weights);
  return begin + invert(weights, size, target, &before);
}

// Tokens in order of id.
struct Tokens {
  const float* logits;
  const float* weights;
  std::size_t count;
};

// How many tokens there are at or above some level, and what they weigh.
struct Share {
  std::size_t count;
  double weight;
};

Share share_at_least(const Tokens& tokens, float level) {
  Share share{0, 0.0};
  const F16 bound = broadcast(level), one = broadcast(1.0f), zero = broadcast(0.0f);
  each_block(tokens.count, [&](std::size_t, std::size_t begin, std::size_t size) {
    F16 counts = zero, weights = zero;
    each_vector(size, [&](std::size_t i, auto lanes) {
      const F16 x = load_or(tokens.logits + begin + i, lanes, broadcast(-kInfinity));
      counts = counts + if_at_least(x, bound, one, zero);
      weights = weights + if_at_least(x, bound, load(tokens.weights + begin + i, lanes), zero);
    });
    share.count += static_cast<std::size_t>(sum(counts));
    share.weight += sum(weights);
  });
  return share;
}

// Floats as numbers of the same order, one apart if neighbours.
std::uint32_t rank_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

float of_rank(std::uint32_t rank) {
  const std::uint32_t bits = rank >> 31 ? rank & 0x7fffffffu : ~rank;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

float next_above(float x) { return of_rank(rank_of(x) + 1); }

// The smallest x of those whose y is `least` or more; there must be one.
float find_lowest(const float* x, const float* y, std::size_t count, float least) {
  const F16 bound = broadcast(least), none = broadcast(-kInfinity), most = broadcast(kInfinity);
  F16 lowest = most;
  each_vector(count, [&](std::size_t i, auto lanes) {
    lowest = min(lowest, if_at_least(load_or(y + i, lanes, none), bound, load(x + i, lanes), most));
  });
  return -largest(broadcast(0.0f) - lowest) + 0.0f;
}

// Where tokens between two levels are copied to, kShortList of them at the most.
struct Room {
  float* logits;
  float* weights;
};

// Copies the tokens from level `low` to below level `end`.
Tokens copy_between(const Tokens& tokens, float low, float end, const Room& room) {
  const F16 bound = broadcast(low), limit = broadcast(end);
  std::size_t count = 0;
  each_vector(tokens.count, [&](std::size_t i, auto lanes) {
    const F16 x = load_or(tokens.logits + i, lanes, broadcast(-kInfinity));
    unsigned found = lanes_at_least(x, bound) & ~lanes_at_least(x, limit);
    for (; found != 0; found &= found - 1) {
      const std::size_t place = i + static_cast<std::size_t>(__builtin_ctz(found));
      room.logits[count] = tokens.logits[place];
      room.weights[count] = tokens.weights[place];
      ++count;
    }
  });
  return {room.logits, room.weights, count};
}

// A logit, the number of tokens that have it, and the share of those above it.
struct Level {
  float logit;
  std::size_t equals;
  Share above;
};

// The highest level in [low, high] at which enough(share) holds. `low` must be the logit of a token
// and hold; `high` is the largest logit. The result is a token's logit, for between two of these
// the share does not change.
template <class Enough>
LAYBY_INLINE Level find_level(const Tokens& tokens, float low, float high, const Room& room,
                              Enough enough) {
  std::uint32_t first = rank_of(low), last = rank_of(high);
  Share from_first = share_at_least(tokens, low), above_last{0, 0.0};
  Tokens between = tokens;
  Share above_between{0, 0.0};
  for (int pass = 0; first < last; ++pass) {
    // Few tokens are left soon: these are then looked at alone.
    const std::size_t left = from_first.count - above_last.count;
    if (between.count > kShortList && left <= kShortList) {
      between = copy_between(tokens, of_rank(first), of_rank(last + 1), room);
      above_between = above_last;
      // Now that sums are rounded differently, even what holds for sure must be a token.
      first = rank_of(find_lowest(between.logits, between.logits, between.count, kLowest));
      continue;
    }
    // Logits are spread evenly rather than their bits, but halving bits comes to an end.
    std::uint32_t middle = rank_of(0.5f * of_rank(first) + 0.5f * of_rank(last));
    if (pass >= kRoughPasses || middle <= first || middle > last) {
      middle = first + (last - first + 1) / 2;
    }
    Share share = share_at_least(between, of_rank(middle));
    share.count += above_between.count;
    share.weight += above_between.weight;
    if (enough(share)) {
      first = middle;
      from_first = share;
    } else {
      last = middle - 1;
      above_last = share;
    }
  }
  return {of_rank(first), from_first.count - above_last.count, above_last};
}

// The best of the ranking: all tokens above a level, and the first few of those at it.
struct Cut {
  float logit;
  std::size_t equals;
  double weight;
};

Cut cut_after(const Level& level, std::size_t equals, const Scale& scale) {
  const double each = weight_of(level.logit, scale);
  return {level.logit, equals, level.above.weight + static_cast<double>(equals) * each};
}

// How many of the tokens at the level are within the cut, which must not end above it.
std::size_t equals_left(const Level& level, const Cut& cut) {
  return level.logit == cut.logit && cut.equals < level.equals ? cut.equals : level.equals;
}

// How many times the level's weight fits in between those above it and `weight`.
double times_to(double weight, const Level& level, const Scale& scale) {
  return (weight - level.above.weight) / weight_of(level.logit, scale);
}

std::size_t clamp(double x, std::size_t low, std::size_t high) {
  if (!(x > static_cast<double>(low))) return low;
  return x < static_cast<double>(high) ? static_cast<std::size_t>(x) : high;
}

// Place of a draw, in order of rank, from what top-k and top-p leave of `tokens`. These must hold
// whatever is left; `total` is the weight of all tokens of the row.
std::size_t draw_ranked(const TokenChoice& choice, const Scale& scale, float peak, double total,
                        const Tokens& tokens, const Room& room) {
  // Weights in place of logits: this counts the tokens that have one.
  const Share all = share_at_least({tokens.weights, tokens.weights, tokens.count}, kSmallestNormal);
  const float lowest =
      find_lowest(tokens.logits, tokens.weights, tokens.count, kSmallestNormal);
  Cut cut{lowest, all.count, all.weight};
  if (choice.top_k < all.count) {
    const Level level = find_level(tokens, cut.logit, peak, room, [&](const Share& share) {
      return share.count >= choice.top_k;
    });
    cut = cut_after(level, choice.top_k - level.above.count, scale);
  }
  if (choice.top_p < 1) {
    // After top-k, top-p counts against what top-k left.
    const double goal = choice.top_p * (choice.top_k < choice.vocab ? cut.weight : total);
    const Level level = find_level(tokens, cut.logit, peak, room, [&](const Share& share) {
      return share.weight >= goal;
    });
    const double equals = __builtin_ceil(times_to(goal, level, scale));
    cut = cut_after(level, clamp(equals, 1, equals_left(level, cut)), scale);
  }
  const double target = choice.uniform * cut.weight;
  const Level level = find_level(tokens, cut.logit, peak, room, [&](const Share& share) {
    return share.weight > target;
  });
  const std::size_t last = equals_left(level, cut) - 1;
  const std::size_t nth = clamp(times_to(target, level, scale), 0, last);
  return find_equal(tokens.logits, tokens.count, level.logit, nth);
}

// The tokens from `logit` up, in order of id, into the short list; false if it is too short.
bool gather(const TokenChoice& choice, const SamplingScratch& scratch, float logit,
            std::size_t* count) {
  const F16 bound = broadcast(logit);
  *count = 0;
  bool fits = true;
  each_block(choice.vocab, [&](std::size_t block, std::size_t begin, std::size_t size) {
    if (!fits || !lanes_at_least(load(scratch.maxima + 16 * block), bound)) return;
    each_vector(size, [&](std::size_t i, auto lanes) {
      const F16 x = load_or(choice.logits + begin + i, lanes, broadcast(-kInfinity));
      for (unsigned found = lanes_at_least(x, bound); found != 0; found &= found - 1) {
        if (*count == kShortList) {
          fits = false;
          return;
        }
        const std::size_t id = begin + i + static_cast<std::size_t>(__builtin_ctz(found));
        scratch.short_logits[*count] = choice.logits[id];
        scratch.ids[*count] = static_cast<std::int32_t>(id);
        ++*count;
      }
    });
  });
  return fits;
}

// A draw from what top-k and top-p leave, in order of rank.
std::size_t draw_cut(const TokenChoice& choice, const Scale& scale, float peak,
                     const SamplingScratch& scratch) {
  const bool by_count = choice.top_k < choice.vocab;
  const double total =
      by_count ? 0.0 : sum_weights(choice.logits, choice.vocab, scale, scratch.sums);
  const std::size_t wanted = by_count ? choice.top_k : kCandidates;
  const Room room{scratch.short_logits, scratch.short_weights};
  const std::size_t groups = 16 * ((choice.vocab + kSumBlock - 1) / kSumBlock);
  if (wanted <= groups / 2) {
    // At least that many tokens are as high as the same number of maxima.
    const Tokens maxima{scratch.maxima, scratch.maxima, groups};
    const auto enough = [&](const Share& share) { return share.count >= wanted; };
    float bound = kLowest;
    if (enough(share_at_least(maxima, kLowest))) {
      const float lowest = find_lowest(scratch.maxima, scratch.maxima, groups, kLowest);
      bound = find_level(maxima, lowest, peak, room, enough).logit;
    }
    std::size_t count;
    if (gather(choice, scratch, bound, &count)) {
      put_weights(scratch.short_logits, count, scale, scratch.short_weights);
      const Tokens tokens{scratch.short_logits, scratch.short_weights, count};
      if (by_count || share_at_least(tokens, kLowest).weight >= choice.top_p * total) {
        return static_cast<std::size_t>(
            scratch.ids[draw_ranked(choice, scale, peak, total, tokens, room)]);
      }
    }
  }
  put_weights(choice.logits, choice.vocab, scale, scratch.weights);
  const Tokens tokens{choice.logits, scratch.weights, choice.vocab};
  return draw_ranked(choice, scale, peak, total, tokens, room);
}

bool choose(const TokenChoice& choice, const SamplingScratch& scratch, std::int64_t* token) {
  float peak;
  if (!find_maxima(choice.logits, choice.vocab, scratch.maxima, &peak)) return false;
  if (!(peak >= kLowest && peak < kInfinity)) return false;
  std::size_t place;
  if (choice.greedy) {
    place = find_equal(choice.logits, choice.vocab, peak, 0);
  } else {
    const Scale scale{broadcast(peak), broadcast(1.0f / choice.temperature),
                      broadcast(choice.least)};
    place = choice.top_p < 1 || choice.top_k < choice.vocab
                ? draw_cut(choice, scale, peak, scratch)
                : draw(choice, scale, scratch.sums);
  }
  *token = static_cast<std::int64_t>(place);
  return true;
}

}  // namespace

const SamplingKernels sampling_kernels = {choose};

}  // namespace layby::LAYBY_ISA
