// Walks the table: every row of a kind, at every number of ranks, against an oracle that simulates
// all ranks in one loop. A new row is tested as soon as it is there.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>

#include "collective/collective.h"
#include "collective/slices.h"
#include "common/errors.h"
#include "kernel/half.h"
#include "ranks.h"
#include "transport/loopback.h"

namespace bagua {
namespace {

class YieldingWaiter : public Waiter {
 public:
  void begin() override {}
  void pause() override { std::this_thread::yield(); }
};

// What one rank needs to run a collective.
struct Member {
  Member(LoopbackHub& hub, int rank) : transport(hub.connect(rank)) {
    for (int r = 0; r < hub.size(); ++r) ranks.push_back(r);
  }
  std::unique_ptr<Transport> transport;
  YieldingWaiter waiter;
  Scratch scratch;
  std::vector<int> ranks;
};

// Runs `body(rank, job)` on n ranks. The job has a group and an element type.
void with_jobs(int n, DType dtype, const std::function<void(int, Job&)>& body) {
  LoopbackHub hub(n);
  run_ranks(n, [&](int rank) {
    Member member(hub, rank);
    Group group(*member.transport, member.waiter, member.ranks, rank);
    Job job{group, member.scratch, dtype};
    body(rank, job);
  });
}

int small_number(int rank, int64_t i) { return static_cast<int>((rank * 5 + i * 3) % 11) - 5; }

void put(DType dtype, char* data, int64_t i, double x) {
  switch (dtype) {
    case DType::kF16:
      reinterpret_cast<F16*>(data)[i] = to_f16(static_cast<float>(x));
      break;
    case DType::kI32:
      reinterpret_cast<int32_t*>(data)[i] = static_cast<int32_t>(x);
      break;
    default:
      reinterpret_cast<float*>(data)[i] = static_cast<float>(x);
  }
}
double get(DType dtype, const char* data, int64_t i) {
  if (dtype == DType::kF16) return to_float(reinterpret_cast<const F16*>(data)[i]);
  if (dtype == DType::kI32) return reinterpret_cast<const int32_t*>(data)[i];
  return reinterpret_cast<const float*>(data)[i];
}

std::vector<const Collective*> rows_of(OpKind kind) {
  std::vector<const Collective*> rows;
  for (const Collective& row : collectives())
    if (row.kind == kind) rows.push_back(&row);
  return rows;
}

struct Case {
  int nranks;
  DType dtype;
};
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return std::to_string(info.param.nranks) + "_" + dtype_name(info.param.dtype);
}
std::vector<Case> cases() {
  std::vector<Case> all;
  for (int n = 1; n <= 7; ++n)
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kI32}) all.push_back({n, dtype});
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
    for (const int64_t edge : {segment - 1, segment, segment + 1}) {
      all.push_back(edge);
      all.push_back(edge * n());
    }
    all.push_back((2 * segment + 1) * n() + 1);
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(Collectives, EveryCase, testing::ValuesIn(cases()), case_name);

// The sum of small numbers is exact in every type, so any order of adding gives it.
double oracle(ReduceOp op, int n, int64_t i) {
  double result = small_number(0, i);
  for (int rank = 1; rank < n; ++rank) {
    const double x = small_number(rank, i);
    result = op == ReduceOp::kMax ? std::max(result, x) : result + x;
  }
  return result;
}

void check_allreduce(const Collective& row, Case c, ReduceOp op, int64_t count, Finish finish) {
  std::vector<std::vector<char>> results(static_cast<size_t>(c.nranks));
  std::atomic<bool> able{true};
  with_jobs(c.nranks, c.dtype, [&](int rank, Job& job) {
    auto& data = results[static_cast<size_t>(rank)];
    data.resize(static_cast<size_t>(count) * job.item() + 2, 'g');  // a guard behind
    for (int64_t i = 0; i < count; ++i) put(c.dtype, data.data(), i, small_number(rank, i));
    job.op = op;
    job.finish = finish;
    job.data = data.data();
    job.count = count;
    if (!row.can(job)) {
      able = false;
      return;
    }
    row.run(job);
  });
  if (!able) return;
  const auto& first = results[0];
  for (const auto& result : results) {
    ASSERT_EQ(result, first) << row.name << ": ranks differ in bits at count " << count;
    ASSERT_EQ(result.back(), 'g');
  }
  for (int64_t i = 0; i < count; ++i) {
    std::vector<char> expected(sizeof(float));
    const double x = oracle(op, c.nranks, i) / finish.divisor * finish.factor;
    put(c.dtype, expected.data(), 0,
        c.dtype == DType::kI32 ? std::trunc(x) : static_cast<float>(x));
    ASSERT_EQ(get(c.dtype, first.data(), i), get(c.dtype, expected.data(), 0))
        << row.name << " " << op_name(op) << " at " << i << " of " << count;
  }
}

TEST_P(EveryCase, AllreduceIsRightAndEqualInBits) {
  for (const Collective* row : rows_of(OpKind::kAllreduce)) {
    for (const int64_t count : counts()) {
      check_allreduce(*row, GetParam(), ReduceOp::kSum, count, {});
      if (HasFatalFailure()) return;
    }
    for (const int64_t count : {int64_t{1}, int64_t{1000}}) {
      check_allreduce(*row, GetParam(), ReduceOp::kMax, count, {});
      check_allreduce(*row, GetParam(), ReduceOp::kAverage, count, {static_cast<double>(n()), 1});
      check_allreduce(*row, GetParam(), ReduceOp::kSum, count, {1, 0.5});
      if (HasFatalFailure()) return;
    }
  }
}

// Values whose sum depends on the order: whatever a row's order is, all ranks have its result.
TEST_P(EveryCase, AllreduceOfAwkwardValuesIsEqualInBits) {
  for (const Collective* row : rows_of(OpKind::kAllreduce)) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kAdasum}) {
      if (op == ReduceOp::kAdasum && !is_float(dtype())) continue;
      std::vector<std::vector<char>> results(static_cast<size_t>(n()));
      with_jobs(n(), dtype(), [&](int rank, Job& job) {
        auto& data = results[static_cast<size_t>(rank)];
        data.resize(3000 * job.item());
        for (int64_t i = 0; i < 3000; ++i)
          put(dtype(), data.data(), i,
              std::sin(static_cast<double>(rank * 3001 + i)) * std::pow(10, i % 4));
        if (is_float(dtype()) && rank == 0)
          put(dtype(), data.data(), 7, op == ReduceOp::kAdasum ? 0 : INFINITY);
        job.op = op;
        job.finish.divisor = op == ReduceOp::kAverage ? n() : 1;
        job.data = data.data();
        job.count = 3000;
        if (row->can(job)) {
          row->run(job);
        } else {
          data.clear();
        }
      });
      for (const auto& result : results)
        ASSERT_EQ(result, results[0]) << row->name << " " << op_name(op);
    }
  }
}

TEST_P(EveryCase, BroadcastFromEveryRoot) {
  for (const Collective* row : rows_of(OpKind::kBroadcast))
    for (int root = 0; root < n(); ++root)
      for (const int64_t count : counts()) {
        if (root > 1 && count > 100000) continue;
        with_jobs(n(), dtype(), [&](int rank, Job& job) {
          std::vector<char> data(static_cast<size_t>(count) * job.item() + 1,
                                 static_cast<char>(rank));
          for (int64_t i = 0; i < count && rank == root; ++i)
            put(dtype(), data.data(), i, small_number(root, i));
          job.data = data.data();
          job.count = count;
          job.root = root;
          ASSERT_TRUE(row->can(job));
          row->run(job);
          for (int64_t i = 0; i < count; ++i)
            ASSERT_EQ(get(dtype(), data.data(), i), small_number(root, i))
                << "root " << root << ", at " << i;
          ASSERT_EQ(data.back(), static_cast<char>(rank));
        });
        if (HasFatalFailure()) return;
      }
}

// Block sizes of one exchange: from rank `from` to rank `to`.
using Blocks = std::function<int64_t(int from, int to)>;

std::vector<Blocks> block_patterns(int64_t segment) {
  return {
      [](int, int) { return 0; },
      [](int from, int to) { return from == to ? 5 : 0; },
      [](int from, int to) { return (from * 3 + to) % 4; },
      [](int from, int) { return from == 1 ? 1000 : 0; },
      [segment](int from, int to) { return from == 0 && to == 0 ? 1 : segment + from - to; },
  };
}

TEST_P(EveryCase, AllgatherOfUnevenAndEmptyBlocks) {
  for (const Collective* row : rows_of(OpKind::kAllgather))
    for (const Blocks& blocks : block_patterns(static_cast<int64_t>(kSegmentNbytes / item())))
      with_jobs(n(), dtype(), [&](int rank, Job& job) {
        const auto count = [&](int r) { return blocks(r, 1); };
        std::vector<char> in(static_cast<size_t>(count(rank)) * job.item());
        for (int64_t i = 0; i < count(rank); ++i) put(dtype(), in.data(), i, small_number(rank, i));
        int64_t total = 0;
        for (int r = 0; r < n(); ++r) {
          job.out_counts.push_back(count(r));
          total += count(r);
        }
        job.in_counts = job.out_counts;
        std::vector<char> out(static_cast<size_t>(total) * job.item());
        job.in = in.data();
        job.out = out.data();
        row->run(job);
        int64_t at = 0;
        for (int r = 0; r < n(); ++r)
          for (int64_t i = 0; i < count(r); ++i)
            ASSERT_EQ(get(dtype(), out.data(), at++), small_number(r, i));
      });
}

TEST_P(EveryCase, AlltoallOfUnevenAndEmptyBlocks) {
  for (const Collective* row : rows_of(OpKind::kAlltoall))
    for (const Blocks& blocks : block_patterns(static_cast<int64_t>(kSegmentNbytes / item())))
      with_jobs(n(), dtype(), [&](int rank, Job& job) {
        int64_t sent = 0, received = 0;
        for (int r = 0; r < n(); ++r) {
          job.in_counts.push_back(blocks(rank, r));
          job.out_counts.push_back(blocks(r, rank));
          sent += job.in_counts.back();
          received += job.out_counts.back();
        }
        std::vector<char> in(static_cast<size_t>(sent) * job.item()),
            out(static_cast<size_t>(received) * job.item());
        int64_t at = 0;
        for (int to = 0; to < n(); ++to)
          for (int64_t i = 0; i < blocks(rank, to); ++i)
            put(dtype(), in.data(), at++, small_number(rank * n() + to, i));
        job.in = in.data();
        job.out = out.data();
        row->run(job);
        at = 0;
        for (int from = 0; from < n(); ++from)
          for (int64_t i = 0; i < blocks(from, rank); ++i)
            ASSERT_EQ(get(dtype(), out.data(), at++), small_number(from * n() + rank, i))
                << "from " << from;
      });
}

TEST_P(EveryCase, ReducescatterOfUnevenAndEmptySlices) {
  for (const Collective* row : rows_of(OpKind::kReducescatter))
    for (const Blocks& blocks : block_patterns(static_cast<int64_t>(kSegmentNbytes / item())))
      with_jobs(n(), dtype(), [&](int rank, Job& job) {
        int64_t total = 0, begin = 0;
        for (int r = 0; r < n(); ++r) {
          if (r == rank) begin = total;
          job.in_counts.push_back(blocks(r, 1));
          total += blocks(r, 1);
        }
        std::vector<char> in(static_cast<size_t>(total) * job.item());
        for (int64_t i = 0; i < total; ++i) put(dtype(), in.data(), i, small_number(rank, i));
        const std::vector<char> before = in;
        const int64_t mine = blocks(rank, 1);
        std::vector<char> out(static_cast<size_t>(mine) * job.item() + 1, 'g');
        job.in = in.data();
        job.out = out.data();
        row->run(job);
        for (int64_t i = 0; i < mine; ++i)
          ASSERT_EQ(get(dtype(), out.data(), i), oracle(ReduceOp::kSum, n(), begin + i));
        ASSERT_EQ(out.back(), 'g');
        ASSERT_EQ(in, before) << "the input was written to";
      });
}

// ---- single promises ---------------------------------------------------------------------------

template <class T>
std::vector<T> allreduced(const char* name, DType dtype, const std::vector<T>& of_rank, ReduceOp op,
                          Finish finish) {
  std::vector<T> results(of_rank.size());
  with_jobs(static_cast<int>(of_rank.size()), dtype, [&](int rank, Job& job) {
    T value = of_rank[static_cast<size_t>(rank)];
    job.op = op;
    job.finish = finish;
    job.data = reinterpret_cast<char*>(&value);
    job.count = 1;
    choose_collective(OpKind::kAllreduce, job, name).run(job);
    results[static_cast<size_t>(rank)] = value;
  });
  return results;
}

// Whichever row is asked for: one that cannot keep the promise is not taken.
TEST(Allreduce, AverageOfNarrowIntegersIsExactInEveryRow) {
  for (const Collective* row : rows_of(OpKind::kAllreduce))
    EXPECT_EQ(
        allreduced<int8_t>(row->name, DType::kI8, {120, 110, 100}, ReduceOp::kAverage, {3, 1}),
        (std::vector<int8_t>{110, 110, 110}))
        << row->name;
}

TEST(Allreduce, SixteenBitSumsRoundOnceInEveryRow) {
  const std::vector<F16> values = {to_f16(2048), to_f16(1), to_f16(1), to_f16(1)};
  for (const Collective* row : rows_of(OpKind::kAllreduce))
    for (const F16 result : allreduced<F16>(row->name, DType::kF16, values, ReduceOp::kSum, {}))
      EXPECT_EQ(to_float(result), 2052) << row->name;
}

TEST(Allreduce, NanReachesEveryRank) {
  for (const Collective* row : rows_of(OpKind::kAllreduce))
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax})
      for (const float result : allreduced<float>(row->name, DType::kF32, {1, NAN, 2}, op, {}))
        EXPECT_TRUE(std::isnan(result)) << row->name << " " << op_name(op);
}

TEST(Adasum, EqualVectorsStayAndOrthogonalOnesAdd) {
  with_jobs(2, DType::kF32, [&](int rank, Job& job) {
    std::vector<float> same = {1, 2, 3}, apart = {rank == 0 ? 2.0f : 0.0f, rank == 1 ? 3.0f : 0.0f};
    job.op = ReduceOp::kAdasum;
    job.data = reinterpret_cast<char*>(same.data());
    job.count = 3;
    adasum(job);
    EXPECT_EQ(same, (std::vector<float>{1, 2, 3}));
    job.data = reinterpret_cast<char*>(apart.data());
    job.count = 2;
    adasum(job);
    EXPECT_EQ(apart, (std::vector<float>{2, 3}));
  });
}

// The definition, applied in the order that adasum.cc describes.
std::vector<double> adasum_oracle(std::vector<std::vector<double>> v) {
  const auto merge = [](std::vector<double>& a, const std::vector<double>& b) {
    double ab = 0, aa = 0, bb = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      ab += a[i] * b[i];
      aa += a[i] * a[i];
      bb += b[i] * b[i];
    }
    for (size_t i = 0; i < a.size(); ++i)
      a[i] = a[i] * (1 - ab / (2 * aa)) + b[i] * (1 - ab / (2 * bb));
  };
  size_t power = 1;
  while (power * 2 <= v.size()) power *= 2;
  for (size_t i = power; i < v.size(); ++i) merge(v[i - power], v[i]);
  for (size_t distance = 1; distance < power; distance *= 2)
    for (size_t i = 0; i < power; i += 2 * distance) merge(v[i], v[i + distance]);
  return v[0];
}

TEST(Adasum, FollowsItsDefinition) {
  for (int n = 1; n <= 7; ++n) {
    std::vector<std::vector<double>> inputs;
    for (int rank = 0; rank < n; ++rank) {
      inputs.emplace_back(100);
      for (size_t i = 0; i < 100; ++i)
        inputs.back()[i] = std::sin(rank * 101.0 + static_cast<double>(i));
    }
    const std::vector<double> expected = adasum_oracle(inputs);
    with_jobs(n, DType::kF64, [&](int rank, Job& job) {
      std::vector<double> data = inputs[static_cast<size_t>(rank)];
      job.op = ReduceOp::kAdasum;
      job.data = reinterpret_cast<char*>(data.data());
      job.count = 100;
      adasum(job);
      for (size_t i = 0; i < 100; ++i) EXPECT_NEAR(data[i], expected[i], 1e-12);
    });
  }
}

TEST(ChooseCollective, TakesWhatWasAskedForWhereItCan) {
  with_jobs(1, DType::kF32, [](int, Job& job) {
    job.count = 10;
    for (const Collective* row : rows_of(OpKind::kAllreduce)) {
      const Collective& chosen = choose_collective(OpKind::kAllreduce, job, row->name);
      if (row->can(job)) {
        EXPECT_STREQ(chosen.name, row->name);
      }
      EXPECT_TRUE(chosen.can(job));
    }
    job.op = ReduceOp::kAdasum;
    EXPECT_STREQ(choose_collective(OpKind::kAllreduce, job, "ring").name, "adasum");
    EXPECT_THROW(choose_collective(OpKind::kBarrier, job, "auto"), InternalError);
  });
}

TEST(Slices, CoverEverythingOnceAndGiveTheRestToLowParts) {
  for (int parts = 1; parts <= 7; ++parts)
    for (int64_t total = 0; total <= 30; ++total) {
      int64_t at = 0;
      for (int i = 0; i < parts; ++i) {
        const Slice slice = slice_of(total, parts, i);
        EXPECT_EQ(slice.begin, at);
        EXPECT_EQ(slice.count, total / parts + (i < total % parts ? 1 : 0));
        at += slice.count;
      }
      EXPECT_EQ(at, total);
    }
}

}  // namespace
}  // namespace bagua
