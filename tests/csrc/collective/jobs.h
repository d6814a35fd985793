// What the tests of collectives share: jobs on n ranks, small numbers whose sums are exact, and the
// numbers of ranks, element types and sizes at which every row of the table is tried.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/collective.h"
#include "collective/slices.h"
#include "kernel/half.h"
#include "ranks.h"
#include "transport/loopback.h"

namespace bagua {

class YieldingWaiter : public Waiter {
 public:
  void begin(int) override {}
  void pause(Node*) override { std::this_thread::yield(); }
};

// What one rank needs to run a collective.
struct Member {
  Member(LoopbackHub& hub, int n, int rank)
      : transport(hub.connect(rank)),
        scratch(transport->node() ? transport->node()->arenas() : nullptr) {
    for (int r = 0; r < n; ++r) ranks.push_back(r);
  }
  std::unique_ptr<Transport> transport;
  YieldingWaiter waiter;
  Scratch scratch;
  std::vector<int> ranks;
};

// Runs `body(rank, job)` on n ranks of one node, or of the nodes given by rank. The job has a group
// and an element type. One rank of a node has a neighbor that takes no part, else it would share no
// memory.
inline void with_jobs(int n, DType dtype, const std::function<void(int, Job&)>& body,
                      std::vector<int> node_of = {}) {
  if (node_of.empty()) node_of.assign(static_cast<size_t>(std::max(n, 2)), 0);
  LoopbackHub hub(static_cast<int>(node_of.size()), node_of);
  run_ranks(n, [&](int rank) {
    Member member(hub, n, rank);
    Group group(*member.transport, member.waiter, member.ranks, rank);
    Job job{group, member.scratch, dtype};
    body(rank, job);
  });
}

// Where a rank has its data: where the others of its node see it, or not, or every other rank so.
enum class Where { kArenas, kElsewhere, kMixed };
constexpr Where kEverywhere[] = {Where::kArenas, Where::kElsewhere, Where::kMixed};

inline std::shared_ptr<char> allocate(const Job& job, Where where, size_t nbytes) {
  const bool arena = where == Where::kArenas || (where == Where::kMixed && job.group.me() % 2);
  if (arena && job.group.node()) return job.group.node()->arenas()->allocate(nbytes);
  return {new char[nbytes], std::default_delete<char[]>()};
}

inline int small_number(int rank, int64_t i) {
  return static_cast<int>((rank * 5 + i * 3) % 11) - 5;
}

inline void put(DType dtype, char* data, int64_t i, double x) {
  switch (dtype) {
    case DType::kF16:
      reinterpret_cast<F16*>(data)[i] = to_f16(static_cast<float>(x));
      break;
    case DType::kBF16:
      reinterpret_cast<BF16*>(data)[i] = to_bf16(static_cast<float>(x));
      break;
    case DType::kI32:
      reinterpret_cast<int32_t*>(data)[i] = static_cast<int32_t>(x);
      break;
    case DType::kI64:
      reinterpret_cast<int64_t*>(data)[i] = static_cast<int64_t>(x);
      break;
    case DType::kF64:
      reinterpret_cast<double*>(data)[i] = x;
      break;
    default:
      reinterpret_cast<float*>(data)[i] = static_cast<float>(x);
  }
}
inline double get(DType dtype, const char* data, int64_t i) {
  if (dtype == DType::kF16) return to_float(reinterpret_cast<const F16*>(data)[i]);
  if (dtype == DType::kBF16) return to_float(reinterpret_cast<const BF16*>(data)[i]);
  if (dtype == DType::kI32) return reinterpret_cast<const int32_t*>(data)[i];
  if (dtype == DType::kI64) return static_cast<double>(reinterpret_cast<const int64_t*>(data)[i]);
  if (dtype == DType::kF64) return reinterpret_cast<const double*>(data)[i];
  return reinterpret_cast<const float*>(data)[i];
}

// ASSERT_EQ for loops over many values, most of which are right.
#define ASSERT_EACH_EQ(got, expected) \
  switch (0)                          \
  case 0:                             \
  default:                            \
    if ((got) == (expected)) {        \
    } else                            \
      ASSERT_EQ(got, expected)

inline std::vector<const Collective*> rows_of(OpKind kind) {
  std::vector<const Collective*> rows;
  for (const Collective& row : collectives())
    if (row.kind == kind) rows.push_back(&row);
  return rows;
}

struct Case {
  int nranks;
  DType dtype;
};
inline std::string case_name(const testing::TestParamInfo<Case>& info) {
  return std::to_string(info.param.nranks) + "_" + dtype_name(info.param.dtype);
}
inline std::vector<Case> cases(const std::vector<DType>& dtypes = {DType::kF32, DType::kF16,
                                                                   DType::kI32}) {
  std::vector<Case> all;
  for (int n = 1; n <= 7; ++n)
    for (const DType dtype : dtypes) all.push_back({n, dtype});
  return all;
}

class EveryCase : public testing::TestWithParam<Case> {
 protected:
  int n() const { return GetParam().nranks; }
  DType dtype() const { return GetParam().dtype; }
  size_t item() const { return dtype_nbytes(dtype()); }
  // Around the ends of a slice and of a segment; two segments and a bit in the slowest.
  std::vector<int64_t> counts() const {
    const auto segment = static_cast<int64_t>(kSegmentNbytes / item());
    std::vector<int64_t> all = {0, 1, n() - 1, n(), n() + 1, 1000};
    if (n() > 4) return {0, 1, n() + 1, 1000, (segment + 1) * n()};  // the edges are the same
    for (const int64_t edge : {segment - 1, segment, segment + 1}) {
      all.push_back(edge);
      all.push_back(edge * n());
    }
    all.push_back((2 * segment + 1) * n() + 1);
    return all;
  }
};
// The sum of small numbers is exact in every type, so any order of adding gives it.
inline double oracle(ReduceOp op, int n, int64_t i) {
  double result = small_number(0, i);
  for (int rank = 1; rank < n; ++rank) {
    const double x = small_number(rank, i);
    result = op == ReduceOp::kMax ? std::max(result, x) : result + x;
  }
  return result;
}

}  // namespace bagua
