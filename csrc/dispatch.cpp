// See dispatch.h. __builtin_cpu_supports asks the processor and the operating system both.
#include "dispatch.h"

#include <atomic>

namespace layby {
namespace {

Isa best_isa() {
#if defined(LAYBY_X86)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("bmi2")) {
    return Isa::generic;
  }
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512vnni")) {
    return Isa::avx2;
  }
  return __builtin_cpu_supports("avx512bf16") ? Isa::avx512_bf16 : Isa::avx512;
#else
  return Isa::generic;
#endif
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

}  // namespace

std::vector<std::string> cpu_features() {
  std::vector<std::string> features;
#if defined(LAYBY_X86)
  __builtin_cpu_init();
#define LAYBY_FEATURE(name) \
  if (__builtin_cpu_supports(name)) features.emplace_back(name)
  LAYBY_FEATURE("avx2");
  LAYBY_FEATURE("fma");
  LAYBY_FEATURE("avx512f");
  LAYBY_FEATURE("avx512bw");
  LAYBY_FEATURE("avx512dq");
  LAYBY_FEATURE("avx512vl");
  LAYBY_FEATURE("avx512vnni");
  LAYBY_FEATURE("avx512bf16");
#undef LAYBY_FEATURE
#endif
  return features;
}

std::vector<Isa> available_isas() {
  static const Isa best = best_isa();
  std::vector<Isa> isas;
  for (Isa isa : {Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
    if (isa <= best) isas.push_back(isa);
  }
  return isas;
}

Isa current_isa() { return chosen().load(std::memory_order_relaxed); }

void set_isa(Isa isa) { chosen().store(isa); }

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::avx512_bf16: return "avx512_bf16";
    default: return "generic";
  }
}

}  // namespace layby
