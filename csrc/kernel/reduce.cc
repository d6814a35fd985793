#include "kernel/reduce.h"

#include <cstring>
#include <type_traits>

#include "kernel/half.h"

// One source, several instruction sets: the loader picks the best at run time.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define BAGUA_MULTI_ISA __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define BAGUA_MULTI_ISA
#endif

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

// The compiler must see the loops with T and Op known, inside a function cloned per ISA; a
// template cannot be cloned, so each clone inlines this body.
template <class T, class Op>
[[gnu::always_inline]] inline void reduce_body(T* dst, const void* const* srcs, int nsrcs,
                                               int64_t count, Finish finish) {
  using E = Element<T>;
  using A = typename E::Acc;
  A acc[kBlock];
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
    T* out = dst + at;
    if (finish.identity()) {
      for (int64_t i = 0; i < n; ++i) out[i] = E::store(acc[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) out[i] = E::store(finished(acc[i], finish));
    }
  }
}

template <class T>
[[gnu::always_inline]] inline void reduce_op(ReduceOp op, void* dst, const void* const* srcs,
                                             int nsrcs, int64_t count, Finish finish) {
  T* out = static_cast<T*>(dst);
  switch (op) {
    case ReduceOp::kProduct:
      return reduce_body<T, Multiply>(out, srcs, nsrcs, count, finish);
    case ReduceOp::kMin:
      if constexpr (!is_complex_type<T>::value)
        return reduce_body<T, Lesser>(out, srcs, nsrcs, count, finish);
      return;
    case ReduceOp::kMax:
      if constexpr (!is_complex_type<T>::value)
        return reduce_body<T, Greater>(out, srcs, nsrcs, count, finish);
      return;
    default:
      return reduce_body<T, Add>(out, srcs, nsrcs, count, finish);
  }
}

// The hot types get a clone per ISA, the others the baseline.
BAGUA_MULTI_ISA void reduce_f32(ReduceOp op, void* dst, const void* const* srcs, int nsrcs,
                                int64_t count, Finish finish) {
  reduce_op<float>(op, dst, srcs, nsrcs, count, finish);
}
BAGUA_MULTI_ISA void reduce_f64(ReduceOp op, void* dst, const void* const* srcs, int nsrcs,
                                int64_t count, Finish finish) {
  reduce_op<double>(op, dst, srcs, nsrcs, count, finish);
}
BAGUA_MULTI_ISA void reduce_f16(ReduceOp op, void* dst, const void* const* srcs, int nsrcs,
                                int64_t count, Finish finish) {
  reduce_op<F16>(op, dst, srcs, nsrcs, count, finish);
}
BAGUA_MULTI_ISA void reduce_bf16(ReduceOp op, void* dst, const void* const* srcs, int nsrcs,
                                 int64_t count, Finish finish) {
  reduce_op<BF16>(op, dst, srcs, nsrcs, count, finish);
}

}  // namespace

void reduce(DType dtype, ReduceOp op, void* dst, const void* const* srcs, int nsrcs, int64_t count,
            Finish finish) {
  switch (dtype) {
    case DType::kF32:
      return reduce_f32(op, dst, srcs, nsrcs, count, finish);
    case DType::kF64:
      return reduce_f64(op, dst, srcs, nsrcs, count, finish);
    case DType::kF16:
      return reduce_f16(op, dst, srcs, nsrcs, count, finish);
    case DType::kBF16:
      return reduce_bf16(op, dst, srcs, nsrcs, count, finish);
    default:
      dispatch(dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if constexpr (!std::is_floating_point_v<T> && !std::is_same_v<T, F16> &&
                      !std::is_same_v<T, BF16>)
          reduce_op<T>(op, dst, srcs, nsrcs, count, finish);
      });
  }
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
