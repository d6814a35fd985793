#include "kernel/isa.h"

namespace bagua {

const char* isa_name(Isa isa) {
#if defined(__x86_64__)
  constexpr const char* names[kIsaCount] = {"sse2", "avx2", "avx512"};
#elif defined(__aarch64__)
  constexpr const char* names[kIsaCount] = {"neon"};
#else
  constexpr const char* names[kIsaCount] = {"baseline"};
#endif
  return names[static_cast<int>(isa)];
}

bool has_isa(Isa isa) {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (isa == Isa::kAvx512)
    return has_isa(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
#endif
  return isa == Isa::kBaseline;
}

Isa best_isa() {
  static const Isa best = [] {
    Isa found = Isa::kBaseline;
    for (int i = 1; i < kIsaCount; ++i)
      if (has_isa(static_cast<Isa>(i))) found = static_cast<Isa>(i);
    return found;
  }();
  return best;
}

}  // namespace bagua
