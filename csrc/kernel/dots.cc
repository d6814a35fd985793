// dots() and combine(), which Adasum is made of: for floats only.
#include <type_traits>

#include "kernel/half.h"
#include "kernel/reduce.h"

namespace bagua {
namespace {

// Sums grow side by side, value i in sum i % kLanes, so that vectors of any width add up alike.
// With fewer, GCC 12 unrolls the loop over them instead of making it one of vectors.
constexpr int kLanes = 16;

inline double widened(F16 x) { return to_float(x); }
inline double widened(BF16 x) { return to_float(x); }
inline double widened(float x) { return x; }
inline double widened(double x) { return x; }
inline void round_to(F16& to, double x) { to = to_f16(static_cast<float>(x)); }
inline void round_to(BF16& to, double x) { to = to_bf16(static_cast<float>(x)); }
inline void round_to(float& to, double x) { to = static_cast<float>(x); }
inline void round_to(double& to, double x) { to = x; }

template <class T>
[[gnu::always_inline]] inline void dots_body(const T* __restrict a, const T* __restrict b,
                                             int64_t count, double* __restrict ab,
                                             double* __restrict aa, double* __restrict bb) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const double u = widened(a[i + l]), v = widened(b[i + l]);
      ab[l] += u * v;
      aa[l] += u * u;
      bb[l] += v * v;
    }
  for (int l = 0; i < count; ++i, ++l) {
    const double u = widened(a[i]), v = widened(b[i]);
    ab[l] += u * v;
    aa[l] += u * u;
    bb[l] += v * v;
  }
}

double sum_of(const double* lanes) {
  double sum = 0;
  for (int l = 0; l < kLanes; ++l) sum += lanes[l];
  return sum;
}

template <class T>
struct Loops {
#define BAGUA_LOOPS(isa, attribute)                                                              \
  attribute static Dots dots_##isa(const T* a, const T* b, int64_t count) {                      \
    double ab[kLanes] = {}, aa[kLanes] = {}, bb[kLanes] = {};                                    \
    dots_body(a, b, count, ab, aa, bb);                                                          \
    return {sum_of(ab), sum_of(aa), sum_of(bb)};                                                 \
  }                                                                                              \
  attribute static void combine_##isa(T* __restrict a, const T* __restrict b, double ca,         \
                                      double cb, int64_t count) {                                \
    for (int64_t i = 0; i < count; ++i) round_to(a[i], ca * widened(a[i]) + cb * widened(b[i])); \
  }
  BAGUA_CLONES(BAGUA_LOOPS)
#undef BAGUA_LOOPS
};

// Calls f with a value of the type.
template <class F>
void of_floats(DType dtype, F&& f) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_floating_point_v<T> || std::is_same_v<T, F16> || std::is_same_v<T, BF16>)
      f(T{});
  });
}

}  // namespace

Dots dots(DType dtype, const void* a, const void* b, int64_t count, Isa isa) {
  Dots found;
  of_floats(dtype, [&](auto zero) {
    using T = decltype(zero);
#define BAGUA_ENTRY(isa, attribute) Loops<T>::dots_##isa,
    constexpr Dots (*all[])(const T*, const T*, int64_t) = {BAGUA_CLONES(BAGUA_ENTRY)};
#undef BAGUA_ENTRY
    found = all[static_cast<int>(isa)](static_cast<const T*>(a), static_cast<const T*>(b), count);
  });
  return found;
}

void combine(DType dtype, void* a, const void* b, double ca, double cb, int64_t count, Isa isa) {
  of_floats(dtype, [&](auto zero) {
    using T = decltype(zero);
#define BAGUA_ENTRY(isa, attribute) Loops<T>::combine_##isa,
    constexpr void (*all[])(T*, const T*, double, double, int64_t) = {BAGUA_CLONES(BAGUA_ENTRY)};
#undef BAGUA_ENTRY
    all[static_cast<int>(isa)](static_cast<T*>(a), static_cast<const T*>(b), ca, cb, count);
  });
}

}  // namespace bagua
