#include "kernel/half.h"

#include "kernel/isa.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace bagua {
namespace {

template <class T>
[[gnu::always_inline]] inline void widen_body(float* to, const void* from, int64_t count) {
  const T* in = static_cast<const T*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(in[i]);
}
[[gnu::always_inline]] inline void narrow_body(F16* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_f16(from[i]);
}
[[gnu::always_inline]] inline void narrow_body(BF16* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
}

#define BAGUA_CONVERT(isa, attribute)                                                    \
  attribute void widen_##isa(DType dtype, float* to, const void* from, int64_t count) {  \
    if (dtype == DType::kF16) return widen_body<F16>(to, from, count);                   \
    widen_body<BF16>(to, from, count);                                                   \
  }                                                                                      \
  attribute void narrow_##isa(DType dtype, void* to, const float* from, int64_t count) { \
    if (dtype == DType::kF16) return narrow_body(static_cast<F16*>(to), from, count);    \
    narrow_body(static_cast<BF16*>(to), from, count);                                    \
  }
BAGUA_CLONES(BAGUA_CONVERT)
#undef BAGUA_CONVERT
#define BAGUA_WIDEN(isa, attribute) widen_##isa,
#define BAGUA_NARROW(isa, attribute) narrow_##isa,
constexpr void (*widens[kIsaCount])(DType, float*, const void*,
                                    int64_t) = {BAGUA_CLONES(BAGUA_WIDEN)};
constexpr void (*narrows[kIsaCount])(DType, void*, const float*,
                                     int64_t) = {BAGUA_CLONES(BAGUA_NARROW)};
#undef BAGUA_WIDEN
#undef BAGUA_NARROW

#ifdef __x86_64__
// The instruction has the bits of to_f16, also of NaNs; the compiler does not find it by itself.
__attribute__((target("avx2,f16c"))) void narrow_f16c(F16* to, const float* from, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), eight);
  }
  narrow_body(to + i, from + i, count - i);
}
#endif

}  // namespace

void widen(DType dtype, float* to, const void* from, int64_t count, Isa isa) {
  widens[static_cast<int>(isa)](dtype, to, from, count);
}

void narrow(DType dtype, void* to, const float* from, int64_t count, Isa isa) {
#ifdef __x86_64__
  if (dtype == DType::kF16 && isa == Isa::kAvx2)
    return narrow_f16c(static_cast<F16*>(to), from, count);
#endif
  narrows[static_cast<int>(isa)](dtype, to, from, count);
}

}  // namespace bagua
