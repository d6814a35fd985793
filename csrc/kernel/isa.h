// Instruction sets that hot loops are compiled for. The best that the processor has is picked at
// run time, so one build serves all; every loop gives the same bits whatever it is compiled for.
//
//   BAGUA_CLONES(clone)   expands `clone(isa, attribute)` for each of them: define one function per
//                         instruction set that inlines the common body, then a table
//                         indexed by Isa.
#pragma once

namespace bagua {

#if defined(__x86_64__) && defined(__GNUC__)
enum class Isa { kBaseline, kAvx2, kAvx512 };
constexpr int kIsaCount = 3;
#define BAGUA_CLONES(clone)                                             \
  clone(kBaseline, ) clone(kAvx2, __attribute__((target("avx2,f16c")))) \
      clone(kAvx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c"))))
#else  // on Arm the baseline has NEON
enum class Isa { kBaseline };
constexpr int kIsaCount = 1;
#define BAGUA_CLONES(clone) clone(kBaseline, )
#endif

const char* isa_name(Isa isa);
bool has_isa(Isa isa);
Isa best_isa();

}  // namespace bagua
