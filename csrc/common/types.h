// The vocabulary every layer shares: element types, reductions and kinds of operation.
#pragma once

#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>

namespace bagua {

enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kI16,
  kI32,
  kI64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kC64,
  kC128
};
constexpr int kDTypeCount = 12;

enum class ReduceOp : uint8_t { kAverage, kSum, kAdasum, kMin, kMax, kProduct };

enum class OpKind : uint8_t {
  kAllreduce,
  kAllgather,
  kBroadcast,
  kAlltoall,
  kReducescatter,
  kBarrier,
  kJoin,
  kAddProcessSet,
  kRemoveProcessSet,
};
constexpr int kOpKindCount = 9;

// 16-bit floats travel as bits; arithmetic on them happens in float (see kernel/half.h).
struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

constexpr size_t dtype_nbytes(DType dtype) {
  constexpr size_t nbytes[kDTypeCount] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16};
  return nbytes[static_cast<int>(dtype)];
}

constexpr const char* dtype_name(DType dtype) {
  constexpr const char* names[kDTypeCount] = {"bool",    "uint8",   "int8",      "int16",
                                              "int32",   "int64",   "float16",   "bfloat16",
                                              "float32", "float64", "complex64", "complex128"};
  return names[static_cast<int>(dtype)];
}

constexpr const char* op_name(ReduceOp op) {
  constexpr const char* names[] = {"average", "sum", "adasum", "min", "max", "product"};
  return names[static_cast<int>(op)];
}

constexpr const char* kind_name(OpKind kind) {
  constexpr const char* names[kOpKindCount] = {
      "allreduce", "allgather", "broadcast",       "alltoall",          "reducescatter",
      "barrier",   "join",      "add_process_set", "remove_process_set"};
  return names[static_cast<int>(kind)];
}

// Whether results are some of the values.
constexpr bool picks(ReduceOp op) { return op == ReduceOp::kMin || op == ReduceOp::kMax; }
// A factor may be applied before or after.
constexpr bool is_linear(ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAverage; }
constexpr bool is_float(DType dtype) { return dtype >= DType::kF16 && dtype <= DType::kF64; }
constexpr bool is_complex(DType dtype) { return dtype >= DType::kC64; }

template <class T>
struct Tag {
  using type = T;
};

// The one place where a run-time element type becomes a compile-time one.
template <class F>
decltype(auto) dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBool:
      return f(Tag<bool>{});
    case DType::kU8:
      return f(Tag<uint8_t>{});
    case DType::kI8:
      return f(Tag<int8_t>{});
    case DType::kI16:
      return f(Tag<int16_t>{});
    case DType::kI32:
      return f(Tag<int32_t>{});
    case DType::kI64:
      return f(Tag<int64_t>{});
    case DType::kF16:
      return f(Tag<F16>{});
    case DType::kBF16:
      return f(Tag<BF16>{});
    case DType::kF32:
      return f(Tag<float>{});
    case DType::kF64:
      return f(Tag<double>{});
    case DType::kC64:
      return f(Tag<std::complex<float>>{});
    default:
      return f(Tag<std::complex<double>>{});
  }
}

// Rows [begin, begin + count) of `total` that belong to part `index` of `parts`: the remainder
// goes to the low parts, as reducescatter promises its users.
struct Slice {
  int64_t begin;
  int64_t count;
};
constexpr Slice slice_of(int64_t total, int parts, int index) {
  const int64_t base = total / parts;
  const int64_t rest = total % parts;
  const int64_t extra = index < rest ? index : rest;
  return {base * index + extra, base + (index < rest ? 1 : 0)};
}

// Memory that an exchange keeps for the next one: up to three floats for each value.
using Kept = std::array<float*, 3>;

// Elements [begin, begin + count) of a stretch that is not in one place: where they are and where
// their results go, which may be the same.
struct Fragment {
  int64_t begin;
  int64_t count;
  const char* in;
  char* out;
};

}  // namespace bagua
