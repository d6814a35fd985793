#include "kernel/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/memory.h"
#include "kernel/half.h"
#include "kernel/stream.h"

namespace bagua {
namespace {

// Elements reduced at a time. Accumulators stay in L1, and so do the sources: where they are
// targets, too, they are written before they have left it.
constexpr int64_t kBlock = 512;

// An element type: what its values are accumulated in, and the way there and back.
template <class T, class A = T>
struct Plain {
  using Value = T;
  using Acc = A;
  static Acc load(T x) { return x; }
  static T store(Acc a) { return static_cast<T>(a); }
};
template <class T>
using Wider = std::conditional_t<!std::is_integral_v<T>, T,
                                 std::conditional_t<(sizeof(T) < 4), int32_t, int64_t>>;
template <class T>
struct Element : Plain<T, Wider<T>> {};
template <>
struct Element<bool> {  // sum is "any", product is "all"
  using Value = bool;
  using Acc = int32_t;
  static Acc load(bool x) { return x; }
  static bool store(Acc a) { return a != 0; }
};
template <>
struct Element<F16> {
  using Value = F16;
  using Acc = float;
  static Acc load(F16 x) { return to_float(x); }
  static F16 store(Acc a) { return to_f16(a); }
};
template <>
struct Element<BF16> {
  using Value = BF16;
  using Acc = float;
  static Acc load(BF16 x) { return to_float(x); }
  static BF16 store(Acc a) { return to_bf16(a); }
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

// The language leaves conversions of what T does not hold undefined, and x86 and Arm differ.
template <class T>
inline T saturated(double x) {
  using L = std::numeric_limits<T>;
  constexpr auto least = static_cast<double>(L::min());
  constexpr double beyond = static_cast<double>(L::max()) + 1;
  if (x >= beyond) return L::max();
  return static_cast<T>(x > least ? x : least);  // a NaN, too, is the least
}

// What T is to hold, in its accumulator.
template <class T>
using Held = std::conditional_t<std::is_same_v<T, bool>, typename Element<T>::Acc, T>;
template <class T, class A>
inline A multiplied(A a, double factor) {
  if constexpr (std::is_integral_v<A>) {
    return saturated<Held<T>>(static_cast<double>(a) * factor);
  } else if constexpr (is_complex_type<A>::value) {
    return a * static_cast<typename A::value_type>(factor);
  } else {
    return a * static_cast<A>(factor);
  }
}
template <class T, class A>
inline A finished(A a, Finish f) {
  if constexpr (std::is_integral_v<A>) {
    using L = std::numeric_limits<Held<T>>;
    if constexpr (sizeof(A) > 4)  // smaller ones divide alike, and faster, as doubles
      if (f.factor == 1) return std::clamp<A>(a / static_cast<A>(f.divisor), L::min(), L::max());
    return saturated<Held<T>>(static_cast<double>(a) / f.divisor * f.factor);
  } else if constexpr (is_complex_type<A>::value) {
    return multiplied<T>(a / static_cast<typename A::value_type>(f.divisor), f.factor);
  } else {
    return multiplied<T>(a / static_cast<A>(f.divisor), f.factor);
  }
}

// The bits of a float without its sign, by which NaN and Inf are the largest; of others nothing.
template <class A>
struct Magnitude {
  using Bits = uint32_t;
  static Bits of(A) { return 0; }
  static bool is_odd(Bits) { return false; }
};
template <class Float, class Unsigned>
struct FloatMagnitude {
  using Bits = Unsigned;
  static Bits of(Float x) {
    Bits bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & ~(Bits{1} << (8 * sizeof bits - 1));
  }
  static bool is_odd(Bits bits) { return bits >= of(std::numeric_limits<Float>::infinity()); }
};
template <>
struct Magnitude<float> : FloatMagnitude<float, uint32_t> {};
template <>
struct Magnitude<double> : FloatMagnitude<double, uint64_t> {};

// What a block goes through: from the sources into accumulators, whose greatest magnitude is told,
// from those into results. Each loop is a function by itself, which is compiled once for each
// instruction set, and for all reductions if it is the same for them, and knows that its arrays are
// apart.
template <class E>
struct Loops {
  using T = typename E::Value;
  using A = typename E::Acc;
  using Bits = typename Magnitude<A>::Bits;
  Bits (*load)(const T* in, int64_t n, A* acc);
  void (*store)(const A* acc, int64_t n, T* out);
  void (*finish)(const A* acc, int64_t n, Finish finish, T* out);
  Bits (*first_two)(const T* a, const T* b, int64_t n, A* acc);
  Bits (*next)(const T* in, int64_t n, A* acc);
};
template <class E>
struct Ends {
  using T = typename E::Value;
  using A = typename E::Acc;
  using M = Magnitude<A>;
#define BAGUA_ENDS(isa, attribute)                                                           \
  attribute static typename M::Bits load_##isa(const T* __restrict in, int64_t n,            \
                                               A* __restrict acc) {                          \
    typename M::Bits most = 0;                                                               \
    for (int64_t i = 0; i < n; ++i) most = std::max(most, M::of(acc[i] = E::load(in[i])));   \
    return most;                                                                             \
  }                                                                                          \
  attribute static void store_##isa(const A* __restrict acc, int64_t n, T* __restrict out) { \
    for (int64_t i = 0; i < n; ++i) out[i] = E::store(acc[i]);                               \
  }                                                                                          \
  attribute static void finish_##isa(const A* __restrict acc, int64_t n, Finish f,           \
                                     T* __restrict out) {                                    \
    if (f.divisor == 1) /* see without_division */                                           \
      for (int64_t i = 0; i < n; ++i) out[i] = E::store(multiplied<T>(acc[i], f.factor));    \
    else                                                                                     \
      for (int64_t i = 0; i < n; ++i) out[i] = E::store(finished<T>(acc[i], f));             \
  }
  BAGUA_CLONES(BAGUA_ENDS)
#undef BAGUA_ENDS
};
template <class E, class Op>
struct Folds {
  using T = typename E::Value;
  using A = typename E::Acc;
  using M = Magnitude<A>;
#define BAGUA_FOLDS(isa, attribute)                                                               \
  attribute static typename M::Bits first_two_##isa(const T* __restrict a, const T* __restrict b, \
                                                    int64_t n, A* __restrict acc) {               \
    typename M::Bits most = 0;                                                                    \
    for (int64_t i = 0; i < n; ++i)                                                               \
      most = std::max(most, M::of(acc[i] = Op::apply(E::load(a[i]), E::load(b[i]))));             \
    return most;                                                                                  \
  }                                                                                               \
  attribute static typename M::Bits next_##isa(const T* __restrict in, int64_t n,                 \
                                               A* __restrict acc) {                               \
    typename M::Bits most = 0;                                                                    \
    for (int64_t i = 0; i < n; ++i)                                                               \
      most = std::max(most, M::of(acc[i] = Op::apply(acc[i], E::load(in[i]))));                   \
    return most;                                                                                  \
  }
  BAGUA_CLONES(BAGUA_FOLDS)
#undef BAGUA_FOLDS
};
template <class E, class Op>
const Loops<E>& loops(Isa isa) {
#define BAGUA_ENTRY(isa, attribute)                                  \
  {Ends<E>::load_##isa, Ends<E>::store_##isa, Ends<E>::finish_##isa, \
   Folds<E, Op>::first_two_##isa, Folds<E, Op>::next_##isa},
  static constexpr Loops<E> all[] = {BAGUA_CLONES(BAGUA_ENTRY)};
#undef BAGUA_ENTRY
  return all[static_cast<int>(isa)];
}

template <class E>
const Loops<E>& loops(ReduceOp op, Isa isa) {
  if constexpr (is_complex_type<typename E::Value>::value) {
    // The only one that mixes the two parts. Where there is FMA, GCC 12 uses it for such products
    // whatever it is told about contraction.
    return loops<E, Multiply>(Isa::kBaseline);
  } else {
    if (op == ReduceOp::kProduct) return loops<E, Multiply>(isa);
    if (op == ReduceOp::kMin) return loops<E, Lesser>(isa);
    if (op == ReduceOp::kMax) return loops<E, Greater>(isa);
    return loops<E, Add>(isa);
  }
}

Finish without_division(Finish f) {
  const double inverse = exact_inverse(f.divisor);
  return inverse != 0 && f.factor == 1 ? Finish{1, inverse} : f;
}

// Where the factor is 1/k, k whole, integers are divided by k: 64 bits of which a double would
// round, and of 49 * (1/49.0) nothing would be left.
Finish without_rounding(Finish f) {
  constexpr double kExact = int64_t{1} << 53;  // up to here a double has every integer
  const double by = std::round(1 / f.factor), divisor = f.divisor * by;
  const bool divides = std::abs(by) >= 2 && std::abs(divisor) <= kExact && f.factor == 1 / by;
  return divides ? Finish{divisor, 1} : f;
}

template <class E>
void reduce_blocks(ReduceOp op, const Targets& targets, const void* const* srcs, int nsrcs,
                   int64_t count, Finish finish, Isa isa, OddSources* odd) {
  using T = typename E::Value;
  using A = typename E::Acc;
  const Loops<E>& to = loops<E>(op, isa);
  const bool direct = targets.count == 1 && targets.streamed == 0;
  alignas(kLineNbytes) A acc[kBlock];
  alignas(kLineNbytes) T results[kBlock];
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = std::min(count - at, kBlock);
    const auto source = [&](int s) { return static_cast<const T*>(srcs[s]) + at; };
    auto most =
        nsrcs == 1 ? to.load(source(0), n, acc) : to.first_two(source(0), source(1), n, acc);
    for (int s = 2; s < nsrcs; ++s) most = to.next(source(s), n, acc);
    if (odd && Magnitude<A>::is_odd(most)) {  // a source may be a target, but is not written yet
      bool found = false;
      for (int s = 0; s < nsrcs; ++s) {
        const auto is_odd = [](T x) { return Magnitude<A>::is_odd(Magnitude<A>::of(E::load(x))); };
        if (std::none_of(source(s), source(s) + n, is_odd)) continue;
        odd->add(s);
        found = true;
      }
      if (!found) odd->add(OddSources::kMost - 1);
    }
    T* out = direct ? static_cast<T*>(targets.all[0]) + at : results;
    const void* final = out;
    if (!finish.identity()) {
      to.finish(acc, n, finish, out);
    } else if (direct || !std::is_same_v<T, A>) {
      to.store(acc, n, out);
    } else {
      final = acc;
    }
    if (!direct) deliver(targets, at * sizeof(T), final, static_cast<size_t>(n) * sizeof(T), isa);
  }
}

}  // namespace

void reduce(DType dtype, ReduceOp op, const Targets& targets, const void* const* srcs, int nsrcs,
            int64_t count, Finish finish, Isa isa, OddSources* odd) {
  if (is_complex(dtype) && op != ReduceOp::kProduct) {  // real and imaginary part each by itself
    dtype = dtype == DType::kC64 ? DType::kF32 : DType::kF64;
    count *= 2;
  }
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
      finish = without_rounding(finish);
    else if constexpr (!std::is_integral_v<T>)
      finish = without_division(finish);
    // Where nothing is done at the end, the bits that wider accumulators add would be dropped.
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool> && sizeof(T) < 8)
      if (finish.identity())
        return reduce_blocks<Plain<T>>(op, targets, srcs, nsrcs, count, finish, isa, odd);
    reduce_blocks<Element<T>>(op, targets, srcs, nsrcs, count, finish, isa, odd);
  });
}

void scale(DType dtype, void* data, int64_t count, double factor) {
  if (factor == 1) return;
  const void* srcs[] = {data};
  reduce(dtype, ReduceOp::kSum, data, srcs, 1, count, Finish{1, factor});
}

}  // namespace bagua
