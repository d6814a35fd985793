#include "kernel/reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernel/half.h"
#include "kernel/stream.h"

namespace bagua {
namespace {

constexpr int64_t kBlock = 2048;  // elements reduced at a time: accumulators stay in L1

// Accumulator type, load and store of each element type.
template <class T>
struct Element {
  using Acc = std::conditional_t<(sizeof(T) < 4), int32_t, int64_t>;
  static Acc load(T x) { return x; }
  static T store(Acc a) { return static_cast<T>(a); }
};
template <>
struct Element<bool> {  // sum is "any", product is "all"
  using Acc = int32_t;
  static Acc load(bool x) { return x; }
  static bool store(Acc a) { return a != 0; }
};
template <>
struct Element<float> {
  using Acc = float;
  static Acc load(float x) { return x; }
  static float store(Acc a) { return a; }
};
template <>
struct Element<double> {
  using Acc = double;
  static Acc load(double x) { return x; }
  static double store(Acc a) { return a; }
};
template <>
struct Element<F16> {
  using Acc = float;
  static Acc load(F16 x) { return to_float(x); }
  static F16 store(Acc a) { return to_f16(a); }
};
template <>
struct Element<BF16> {
  using Acc = float;
  static Acc load(BF16 x) { return to_float(x); }
  static BF16 store(Acc a) { return to_bf16(a); }
};
template <class T>
struct Element<std::complex<T>> {
  using Acc = std::complex<T>;
  static Acc load(Acc x) { return x; }
  static Acc store(Acc a) { return a; }
};

template <class T>
struct is_complex_type : std::false_type {};
template <class T>
struct is_complex_type<std::complex<T>> : std::true_type {};

// Integers wrap around, as in NumPy; on signed ones the language leaves that undefined.
template <class A>
struct Wrapping {
  using type = A;
};
template <>
struct Wrapping<int32_t> {
  using type = uint32_t;
};
template <>
struct Wrapping<int64_t> {
  using type = uint64_t;
};
struct Add {
  template <class A>
  static A apply(A a, A b) {
    using W = typename Wrapping<A>::type;
    return static_cast<A>(static_cast<W>(a) + static_cast<W>(b));
  }
};
struct Multiply {
  template <class A>
  static A apply(A a, A b) {
    using W = typename Wrapping<A>::type;
    return static_cast<A>(static_cast<W>(a) * static_cast<W>(b));
  }
};
// Comparisons that let a NaN on either side through.
struct Lesser {
  template <class A>
  static A apply(A a, A b) {
    return (a < b || a != a) ? a : b;
  }
};
struct Greater {
  template <class A>
  static A apply(A a, A b) {
    return (a > b || a != a) ? a : b;
  }
};

void deliver(const Targets& targets, size_t at, const void* from, size_t nbytes, Isa isa) {
  for (int i = 0; i < targets.count; ++i) {
    char* to = static_cast<char*>(targets.all[i]) + at;
    if (i >= targets.count - targets.streamed) {
      stream_copy(to, from, nbytes, isa);
    } else {
      plain_copy(to, from, nbytes, isa);
    }
  }
}

template <class A>
inline A finished(A a, Finish f) {
  if constexpr (std::is_integral_v<A>) {
    if (f.factor == 1) return a / static_cast<A>(f.divisor);
    return static_cast<A>(static_cast<double>(a) / f.divisor * f.factor);
  } else if constexpr (is_complex_type<A>::value) {
    using Real = typename A::value_type;
    return a / static_cast<Real>(f.divisor) * static_cast<Real>(f.factor);
  } else {
    return a / static_cast<A>(f.divisor) * static_cast<A>(f.factor);
  }
}

// The compiler must see the loops with T and Op known, inside a function per instruction set, so
// each of those inlines this body.
template <class T, class Op>
[[gnu::always_inline]] inline void reduce_body(const Targets& targets, const void* const* srcs,
                                               int nsrcs, int64_t count, Finish finish, Isa isa) {
  using E = Element<T>;
  using A = typename E::Acc;
  A acc[kBlock];
  T results[kBlock];
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = count - at < kBlock ? count - at : kBlock;
    const T* first = static_cast<const T*>(srcs[0]) + at;
    if (nsrcs == 1) {
      for (int64_t i = 0; i < n; ++i) acc[i] = E::load(first[i]);
    } else {
      const T* second = static_cast<const T*>(srcs[1]) + at;
      for (int64_t i = 0; i < n; ++i) acc[i] = Op::apply(E::load(first[i]), E::load(second[i]));
    }
    for (int s = 2; s < nsrcs; ++s) {
      const T* src = static_cast<const T*>(srcs[s]) + at;
      for (int64_t i = 0; i < n; ++i) acc[i] = Op::apply(acc[i], E::load(src[i]));
    }
    const bool direct = targets.count == 1 && targets.streamed == 0;
    T* out = direct ? static_cast<T*>(targets.all[0]) + at : results;
    if (finish.identity()) {
      for (int64_t i = 0; i < n; ++i) out[i] = E::store(acc[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) out[i] = E::store(finished(acc[i], finish));
    }
    if (!direct) deliver(targets, at * sizeof(T), results, static_cast<size_t>(n) * sizeof(T), isa);
  }
}

template <class T>
[[gnu::always_inline]] inline void reduce_op(ReduceOp op, const Targets& targets,
                                             const void* const* srcs, int nsrcs, int64_t count,
                                             Finish finish, Isa isa) {
  switch (op) {
    case ReduceOp::kProduct:
      return reduce_body<T, Multiply>(targets, srcs, nsrcs, count, finish, isa);
    case ReduceOp::kMin:
      if constexpr (!is_complex_type<T>::value)
        return reduce_body<T, Lesser>(targets, srcs, nsrcs, count, finish, isa);
      return;
    case ReduceOp::kMax:
      if constexpr (!is_complex_type<T>::value)
        return reduce_body<T, Greater>(targets, srcs, nsrcs, count, finish, isa);
      return;
    default:
      return reduce_body<T, Add>(targets, srcs, nsrcs, count, finish, isa);
  }
}

// The hot types get a function per instruction set, the others the baseline.
#define BAGUA_REDUCE(isa, attribute)                                                              \
  attribute void reduce_##isa(DType dtype, ReduceOp op, const Targets& targets,                   \
                              const void* const* srcs, int nsrcs, int64_t count, Finish finish) { \
    switch (dtype) {                                                                              \
      case DType::kF32:                                                                           \
        return reduce_op<float>(op, targets, srcs, nsrcs, count, finish, Isa::isa);               \
      case DType::kF64:                                                                           \
        return reduce_op<double>(op, targets, srcs, nsrcs, count, finish, Isa::isa);              \
      case DType::kF16:                                                                           \
        return reduce_op<F16>(op, targets, srcs, nsrcs, count, finish, Isa::isa);                 \
      default:                                                                                    \
        return reduce_op<BF16>(op, targets, srcs, nsrcs, count, finish, Isa::isa);                \
    }                                                                                             \
  }
BAGUA_CLONES(BAGUA_REDUCE)
#define BAGUA_ENTRY(isa, attribute) reduce_##isa,
constexpr void (*reduces[kIsaCount])(DType, ReduceOp, const Targets&, const void* const*, int,
                                     int64_t, Finish) = {BAGUA_CLONES(BAGUA_ENTRY)};
#undef BAGUA_ENTRY
#undef BAGUA_REDUCE

}  // namespace

void reduce(DType dtype, ReduceOp op, const Targets& targets, const void* const* srcs, int nsrcs,
            int64_t count, Finish finish, Isa isa) {
  if (is_float(dtype))
    return reduces[static_cast<int>(isa)](dtype, op, targets, srcs, nsrcs, count, finish);
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_floating_point_v<T> && !std::is_same_v<T, F16> &&
                  !std::is_same_v<T, BF16>)
      reduce_op<T>(op, targets, srcs, nsrcs, count, finish, isa);
  });
}

void scale(DType dtype, void* data, int64_t count, double factor) {
  if (factor == 1) return;
  const void* srcs[] = {data};
  reduce(dtype, ReduceOp::kSum, data, srcs, 1, count, Finish{1, factor});
}

Dots dots(DType dtype, const void* a, const void* b, int64_t count) {
  return dispatch(dtype, [&](auto tag) {
    using E = Element<typename decltype(tag)::type>;
    Dots d;
    if constexpr (!is_complex_type<typename E::Acc>::value) {
      const auto* x = static_cast<const typename decltype(tag)::type*>(a);
      const auto* y = static_cast<const typename decltype(tag)::type*>(b);
      for (int64_t i = 0; i < count; ++i) {
        const double u = static_cast<double>(E::load(x[i]));
        const double v = static_cast<double>(E::load(y[i]));
        d.ab += u * v;
        d.aa += u * u;
        d.bb += v * v;
      }
    }
    return d;
  });
}

void combine(DType dtype, void* a, const void* b, double ca, double cb, int64_t count) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using E = Element<T>;
    using A = typename E::Acc;
    if constexpr (!is_complex_type<A>::value) {
      T* x = static_cast<T*>(a);
      const T* y = static_cast<const T*>(b);
      for (int64_t i = 0; i < count; ++i) {
        x[i] = E::store(static_cast<A>(ca * static_cast<double>(E::load(x[i])) +
                                       cb * static_cast<double>(E::load(y[i]))));
      }
    }
  });
}

}  // namespace bagua
