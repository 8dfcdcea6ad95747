// Which copy of the kernels runs: one per instruction set, chosen at run time.
#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__)
#define LAYBY_X86 1
#endif

namespace layby {

// In rising order; each includes what stands before it. `avx512` means F, BW, DQ, VL and VNNI.
enum class Isa { generic, avx2, avx512, avx512_bf16 };

// What this processor has, of the features that kernels ask for.
std::vector<std::string> cpu_features();

// The instruction sets that this processor can run, in rising order.
std::vector<Isa> available_isas();

// The one in use: the last of the available ones unless set_isa chose another.
Isa current_isa();
void set_isa(Isa isa);

const char* name_of(Isa isa);

}  // namespace layby

// Every instruction set's namespace holds a table of functions `const Type name`. This declares
// them and `const Type& name()`, which gives the table in use.
#if defined(LAYBY_X86)
#define LAYBY_DISPATCH(Type, name)                       \
  namespace generic { extern const Type name; }          \
  namespace avx2 { extern const Type name; }             \
  namespace avx512 { extern const Type name; }           \
  namespace avx512_bf16 { extern const Type name; }      \
  inline const Type& name() {                            \
    switch (current_isa()) {                             \
      case Isa::avx2: return avx2::name;                 \
      case Isa::avx512: return avx512::name;             \
      case Isa::avx512_bf16: return avx512_bf16::name;   \
      default: return generic::name;                     \
    }                                                    \
  }
#else
#define LAYBY_DISPATCH(Type, name)              \
  namespace generic { extern const Type name; } \
  inline const Type& name() { return generic::name; }
#endif
