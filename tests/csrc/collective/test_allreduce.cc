// Walks the table: every row that reduces, at every number of ranks, against an oracle that
// simulates all ranks in one loop. A new row is tested as soon as it is there.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <random>

#include "collective/jobs.h"
#include "common/errors.h"

namespace bagua {
namespace {

class Allreduces : public EveryCase {};
INSTANTIATE_TEST_SUITE_P(Collectives, Allreduces, testing::ValuesIn(cases()), case_name);

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
  std::vector<char> expected(sizeof(double));
  for (int64_t i = 0; i < count; ++i) {
    const double x = oracle(op, c.nranks, i) / finish.divisor * finish.factor;
    put(c.dtype, expected.data(), 0,
        c.dtype == DType::kI32 ? std::trunc(x) : static_cast<float>(x));
    ASSERT_EACH_EQ(get(c.dtype, first.data(), i), get(c.dtype, expected.data(), 0))
        << row.name << " " << op_name(op) << " at " << i << " of " << count;
  }
}

TEST_P(Allreduces, AllreduceIsRightAndEqualInBits) {
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

TEST(AllreduceChoice, IsWhatWasMeasured) {
  const auto chosen = [](int n, size_t nbytes, DType dtype = DType::kF32, bool in_company = false) {
    std::string name;
    std::vector<int> nodes(static_cast<size_t>(n));
    std::iota(nodes.begin(), nodes.end(), 0);
    with_jobs(
        n, dtype,
        [&](int rank, Job& job) {
          job.count = static_cast<int64_t>(nbytes / job.item());
          job.in_company = in_company;
          if (rank == 0) name = choose_collective(OpKind::kAllreduce, job, "auto").name;
        },
        nodes);
    return name;
  };
  for (const int n : {2, 3, 15}) {
    EXPECT_EQ(chosen(n, 1 << 10), "gather_reduce");
    EXPECT_EQ(chosen(n, 4 << 10), "scatter_reduce");
    EXPECT_EQ(chosen(n, kAheadNbytes), "scatter_reduce");
    EXPECT_EQ(chosen(n, kAheadNbytes + 4), n == 2 ? "scatter_reduce" : "ring");
    EXPECT_EQ(chosen(n, 128 << 20, DType::kBF16), "scatter_reduce");
  }
  for (const int n : {16, 40}) {
    EXPECT_EQ(chosen(n, 16 << 10), "gather_reduce");
    EXPECT_EQ(chosen(n, 32 << 10), "scatter_reduce");
    EXPECT_EQ(chosen(n, 512 << 10), "halving");
    EXPECT_EQ(chosen(n, 8 << 20), "ring");
    EXPECT_EQ(chosen(n, 8 << 20, DType::kBF16), "scatter_reduce");  // others round it too often
    EXPECT_EQ(chosen(n, 8 << 20, DType::kF32, true), "scatter_reduce");
  }
}

// Which tensors travel together is a matter of time, so that it must not be one of their sums.
TEST(AllreduceChoice, CompanyChangesNoBit) {
  using Nodes = std::vector<int>;
  const Nodes sixteen = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (const Nodes& nodes : {Nodes{0, 1, 2}, sixteen, Nodes{0, 0, 1, 1}, Nodes{0, 0, 1, 2, 2, 2}})
    for (const DType dtype : {DType::kF32, DType::kF16})
      for (const int64_t own : {200, 60000}) {
        std::vector<std::vector<char>> sums;
        for (const int64_t others : {0, 500, 200000}) {
          with_jobs(
              static_cast<int>(nodes.size()), dtype,
              [&](int rank, Job& job) {
                job.count = others + own;
                job.in_company = others > 0;
                job.finish.divisor = static_cast<double>(nodes.size());
                job.op = ReduceOp::kAverage;
                std::vector<char> data(static_cast<size_t>(job.count) * job.item());
                std::mt19937 random(static_cast<unsigned>(rank));
                std::normal_distribution<double> normal;
                for (int64_t i = 0; i < job.count; ++i)  // what is ours comes last
                  put(dtype, data.data(), (others + i) % job.count, normal(random));
                job.data = data.data();
                choose_collective(OpKind::kAllreduce, job, "auto").run(job);
                if (rank == 0)
                  sums.emplace_back(data.end() - own * static_cast<int64_t>(job.item()),
                                    data.end());
              },
              nodes);
          ASSERT_EQ(sums.back(), sums[0]) << own << " beside " << others;
        }
      }
}

// A pipelined row asks for each element once before it looks at it, and tells of each once, when it
// is final.
TEST_P(Allreduces, PipelinedRowsAskAndTell) {
  if (n() == 1) return;  // there the engine has nothing to exchange
  const int64_t segments = static_cast<int64_t>(kSegmentNbytes / item() + 1) * n();
  for (const Collective* row : rows_of(OpKind::kAllreduce))
    for (const int64_t count : {int64_t{1}, int64_t{n() + 1}, int64_t{1000}, segments})
      with_jobs(n(), dtype(), [&](int rank, Job& job) {
        if (!row->pipelined || !row->can(job)) return;
        std::vector<char> data(static_cast<size_t>(count) * job.item(), 'x');  // no value yet
        std::vector<int> asked(static_cast<size_t>(count)), told(asked);
        job.data = data.data();
        job.count = count;
        job.prepare = [&](int64_t begin, int64_t many) {
          for (int64_t i = begin; i < begin + many; ++i) {
            ++asked[static_cast<size_t>(i)];
            put(dtype(), data.data(), i, small_number(rank, i));
          }
        };
        job.arrived = [&](int64_t begin, int64_t many) {
          for (int64_t i = begin; i < begin + many; ++i) {
            ++told[static_cast<size_t>(i)];
            ASSERT_EACH_EQ(get(dtype(), data.data(), i), oracle(ReduceOp::kSum, n(), i));
          }
        };
        row->run(job);
        const auto all = static_cast<std::ptrdiff_t>(count);
        ASSERT_EQ(std::count(asked.begin(), asked.end(), 1), all) << row->name;
        ASSERT_EQ(std::count(told.begin(), told.end(), 1), all) << row->name;
        for (int64_t i = 0; i < count; ++i)
          ASSERT_EACH_EQ(get(dtype(), data.data(), i), oracle(ReduceOp::kSum, n(), i)) << row->name;
      });
}

// Values whose sum depends on the order: whatever a row's order is, all ranks have its result.
TEST_P(Allreduces, AllreduceOfAwkwardValuesIsEqualInBits) {
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

// So much that receives are posted again where others have been.
TEST(Allreduce, OfMoreThanTravelsAtATime) {
  const int64_t count = 2 * static_cast<int64_t>(kAheadNbytes / sizeof(double)) + 200'001;
  for (const char* row : {"ring", "halving", "scatter_reduce"})
    with_jobs(2, DType::kF64,
              [&](int rank, Job& job) {
                std::vector<double> data(static_cast<size_t>(count));
                for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<double>(i + rank);
                job.data = reinterpret_cast<char*>(data.data());
                job.count = count;
                choose_collective(OpKind::kAllreduce, job, row).run(job);
                size_t wrong = 0;
                for (size_t i = 0; i < data.size(); ++i)
                  wrong += data[i] != static_cast<double>(2 * i + 1);
                EXPECT_EQ(wrong, 0) << row;
              },
              {0, 1});
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

void check_adasum(int n, size_t count) {
  std::vector<std::vector<double>> inputs(static_cast<size_t>(n)), results(inputs.size());
  for (size_t rank = 0; rank < inputs.size(); ++rank)
    for (size_t i = 0; i < count; ++i)
      inputs[rank].push_back(std::sin(static_cast<double>(rank * 101 + i + 1)) / (1.0 + rank));
  with_jobs(n, DType::kF64, [&](int rank, Job& job) {
    std::vector<double>& data = results[static_cast<size_t>(rank)];
    data = inputs[static_cast<size_t>(rank)];
    job.op = ReduceOp::kAdasum;
    job.data = reinterpret_cast<char*>(data.data());
    job.count = static_cast<int64_t>(count);
    adasum(job);
    const auto nbytes = static_cast<int64_t>(count * sizeof(double));
    if (n == 4 && nbytes >= 128 << 10) {
      EXPECT_NEAR(job.group.work().sent_nbytes, nbytes * 3 / 2, 512);
    }
  });
  const std::vector<double> expected = adasum_oracle(inputs);
  for (size_t i = 0; i < count; ++i) ASSERT_NEAR(results[0][i], expected[i], 1e-12) << i;
  for (const std::vector<double>& result : results) ASSERT_EQ(result, results[0]);
}

TEST(Adasum, FollowsItsDefinition) {
  for (int n = 1; n <= 9; ++n)
    // Never halved, sometimes, always; and around the length from which on a part is.
    for (const size_t count : {1, 100, 4095, 4096, 4097, 8191, 8192, 8193, 16383, 16385, 20001}) {
      SCOPED_TRACE(std::to_string(n) + " ranks, " + std::to_string(count));
      check_adasum(n, count);
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
