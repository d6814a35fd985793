// Allreduce through every codec of the table, against one loop that simulates all ranks.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <set>
#include <utility>

#include "collective/coded.h"
#include "collective/jobs.h"
#include "common/scaled.h"

namespace bagua {
namespace {

using Numbers = std::vector<float>;

float noise(int rank, int round, int64_t i) {
  return static_cast<float>(std::sin(rank * 7919.0 + round * 104729.0 + static_cast<double>(i)));
}

// What all ranks agree on after each round, and what each keeps for the next.
class Simulation {
 public:
  Simulation(const Coding& coding, int n, int64_t count, bool feedback, Finish finish)
      : coding_(coding),
        count_(count),
        feedback_(feedback),
        finish_(finish),
        residuals_(static_cast<size_t>(n), Numbers(static_cast<size_t>(count))),
        residual_of_mean_(static_cast<size_t>(count)) {}

  Numbers round(std::vector<Numbers> values) {
    return coding_.codec->sparse ? gathered(values) : scattered(values);
  }

 private:
  Numbers gathered(const std::vector<Numbers>& values) {
    Numbers sum(static_cast<size_t>(count_));
    for (size_t rank = 0; rank < values.size(); ++rank) {
      const Numbers said = travel(values[rank], residuals_[rank], 0, count_);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += said[i];
    }
    for (float& value : sum)
      value = value / static_cast<float>(finish_.divisor) * static_cast<float>(finish_.factor);
    return sum;
  }

  Numbers scattered(const std::vector<Numbers>& values) {
    const auto n = static_cast<int>(values.size());
    const int64_t block = coding_.block(), blocks = (count_ + block - 1) / block;
    Numbers result(static_cast<size_t>(count_));
    for (int owner = 0; owner < n; ++owner) {
      const Slice slice = slice_of(blocks, n, owner);
      const int64_t begin = std::min(slice.begin * block, count_);
      const int64_t end = std::min((slice.begin + slice.count) * block, count_);
      Numbers sum(static_cast<size_t>(end - begin));
      for (int rank = 0; rank < n; ++rank) {
        const auto at = static_cast<size_t>(rank);
        const Numbers said = travel(values[at], residuals_[at], begin, end);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += said[i];
      }
      Numbers whole(static_cast<size_t>(count_));
      for (size_t i = 0; i < sum.size(); ++i)
        whole[static_cast<size_t>(begin) + i] =
            sum[i] / static_cast<float>(finish_.divisor) * static_cast<float>(finish_.factor);
      const Numbers said = travel(whole, residual_of_mean_, begin, end);
      std::copy(said.begin(), said.end(), result.begin() + begin);
    }
    return result;
  }

  Numbers travel(const Numbers& values, Numbers& residual, int64_t begin, int64_t end) {
    Numbers whole(values.begin() + begin, values.begin() + end), said(whole.size());
    for (size_t i = 0; feedback_ && i < whole.size(); ++i)
      whole[i] += residual[static_cast<size_t>(begin) + i];
    std::vector<char> wire(static_cast<size_t>(coding_.wire_nbytes(end - begin)));
    coding_.encode(whole.data(), end - begin, wire.data());
    coding_.decode(wire.data(), end - begin, said.data());
    for (size_t i = 0; feedback_ && i < whole.size(); ++i)
      residual[static_cast<size_t>(begin) + i] = whole[i] - said[i];
    return said;
  }

  const Coding coding_;
  const int64_t count_;
  const bool feedback_;
  const Finish finish_;
  std::vector<Numbers> residuals_;
  Numbers residual_of_mean_;
};

void check(const Coding& coding, int n, int64_t count, bool feedback) {
  constexpr int kRounds = 3;
  const Finish finish{static_cast<double>(n), 0.5};
  Simulation simulation(coding, n, count, feedback, finish);
  std::vector<Numbers> expected;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<Numbers> values(static_cast<size_t>(n), Numbers(static_cast<size_t>(count)));
    for (int rank = 0; rank < n; ++rank)
      for (int64_t i = 0; i < count; ++i)
        values[static_cast<size_t>(rank)][static_cast<size_t>(i)] = noise(rank, round, i);
    expected.push_back(simulation.round(std::move(values)));
  }
  with_jobs(n, DType::kF32, [&](int rank, Job& job) {
    Numbers data(static_cast<size_t>(count) + 1), residual(data.size()), of_mean(data.size());
    job.op = ReduceOp::kAverage;
    job.finish = finish;
    job.count = count;
    job.coding = &coding;
    job.leaves = true;  // past the caches, where there is enough
    if (feedback) job.kept = {residual.data(), of_mean.data()};
    for (int round = 0; round < kRounds; ++round) {
      for (int64_t i = 0; i < count; ++i) data[static_cast<size_t>(i)] = noise(rank, round, i);
      data.back() = 42;
      job.data = reinterpret_cast<char*>(data.data());
      const Collective& row = choose_collective(OpKind::kAllreduce, job, "auto");
      ASSERT_STREQ(row.name, coding.codec->sparse ? "sparse" : "compressed");
      row.run(job);
      ASSERT_EQ(data.back(), 42) << "behind the end";
      const Numbers& mean = expected[static_cast<size_t>(round)];
      const auto wrong = std::mismatch(mean.begin(), mean.end(), data.begin()).first;
      ASSERT_EQ(wrong - mean.begin(), count) << coding.codec->name << " round " << round;
    }
  });
}

std::vector<Coding> every_coding() {
  std::vector<Coding> all;
  for (const Codec& codec : codecs()) all.push_back(parse_coding(codec.name));
  all.push_back(parse_coding("topk:7:fp16"));
  all.push_back(parse_coding("topk:600:minmax_u8"));
  all.push_back(parse_coding("topk:4096"));  // so many that they travel densely
  return all;
}

TEST(Compressed, IsWhatOneLoopOverAllRanksGives) {
  for (const Coding& coding : every_coding())
    for (const int n : {2, 3, 4})
      for (const int64_t count : {1, 513, 9000})
        for (const bool feedback : {false, true}) {
          check(coding, n, count, feedback);
          if (HasFatalFailure()) return;
        }
}

TEST(Compressed, InSeveralSegments) {
  check(parse_coding("minmax_u8"), 2, scaled(600'000) + 1, true);
}

TEST(Compressed, MoreThanCachesHold) {
  for (const char* codec : {"minmax_u4", "topk"})
    check(parse_coding(codec), 3, scaled(2'200'000) + 1, true);
}

// What n ranks together send for an allreduce of so many values.
int64_t sent_by_all(const Coding& coding, int n, int64_t count) {
  if (coding.codec->sparse) {
    const int64_t wire = coding.wire_nbytes(count);
    if (n * wire <= 2 * count * 4) return n * (n - 1) * wire;
    const bool small = (n - 1) * count * 4 <= 16 << 10;  // then whole vectors travel
    return (n - 1) * count * 4 * (small ? n : 2);
  }
  const int64_t block = coding.block(), blocks = (count + block - 1) / block;
  int64_t nbytes = 0;
  for (int i = 0; i < n; ++i) {
    const Slice slice = slice_of(blocks, n, i);
    const int64_t begin = std::min(slice.begin * block, count);
    const int64_t end = std::min((slice.begin + slice.count) * block, count);
    nbytes += 2 * (n - 1) * coding.wire_nbytes(end - begin);
  }
  return nbytes;
}

// The first is one value longer, so its segments are, too, and it has half as many.
TEST(Compressed, SlicesOfUnlikeNumbersOfSegments) {
  const Coding coding = parse_coding("raw");
  const int64_t count = 2 * (256 * kTile) - 1;
  ASSERT_LT(stretches(coding, 0, count - count / 2).size(), stretches(coding, 0, count / 2).size());
  with_jobs(2, DType::kF32,
            [&](int rank, Job& job) {
              Numbers data(static_cast<size_t>(count), static_cast<float>(rank + 1));
              job.data = reinterpret_cast<char*>(data.data());
              job.count = count;
              job.coding = &coding;
              choose_collective(OpKind::kAllreduce, job, "auto").run(job);
              EXPECT_EQ(data, Numbers(static_cast<size_t>(count), 3));
            },
            {0, 1});
}

TEST(Compressed, SendsTheCodecsBytes) {
  for (const Coding& coding : every_coding())
    with_jobs(4, DType::kF32,
              [&](int, Job& job) {
                const int64_t count = 4 * 4096 * 4;
                Numbers data(static_cast<size_t>(count), 1);
                job.data = reinterpret_cast<char*>(data.data());
                job.count = count;
                job.coding = &coding;
                choose_collective(OpKind::kAllreduce, job, "auto").run(job);
                EXPECT_EQ(job.group.work().sent_nbytes, sent_by_all(coding, 4, count) / 4)
                    << coding.codec->name;
              },
              {0, 1, 2, 3});
}

TEST(Compressed, WhatTravelsDenselySaysHow) {
  const Coding coding = parse_coding("topk:4096");
  with_jobs(2, DType::kF32,
            [&](int, Job& job) {
              Numbers data(4096, 1);
              std::vector<std::string> chosen;
              job.data = reinterpret_cast<char*>(data.data());
              job.count = 4096;
              job.coding = &coding;
              job.chosen = [&](const Collective& row, const Job& exact) {
                EXPECT_EQ(exact.count, 4096);
                chosen.emplace_back(row.name);
              };
              choose_collective(OpKind::kAllreduce, job, "auto").run(job);
              ASSERT_EQ(chosen.size(), 1u);
              EXPECT_NE(chosen[0], "sparse");
            },
            {0, 1});
}

// A leader gives the sum of its node, in which nobody knows whose NaN it was.
TEST(Compressed, WhatTravelsDenselyBlamesNoLeader) {
  const Coding coding = parse_coding("topk:4096");
  for (const auto& [weights, told] :
       {std::pair(std::vector<int>{}, 1), std::pair(std::vector<int>{2, 2}, OddRanks::kSome)}) {
    std::mutex mutex;
    std::set<int> odd;
    with_jobs(2, DType::kF32,
              [&, weights = weights](int rank, Job& job) {
                Numbers data(4096, 1);
                if (rank == 1) data[5] = std::numeric_limits<float>::quiet_NaN();
                job.data = reinterpret_cast<char*>(data.data());
                job.count = 4096;
                job.coding = &coding;
                job.weights = weights;
                choose_collective(OpKind::kAllreduce, job, "auto").run(job);
                const std::lock_guard<std::mutex> lock(mutex);
                odd.insert(job.group.odd()->ranks.begin(), job.group.odd()->ranks.end());
              },
              {0, 1});
    EXPECT_EQ(odd, std::set<int>{told});
  }
}

// Exact inside the nodes, whose numbers of ranks may differ; through the codec between them, where
// leader i of each node speaks for slice i of everything.
void check_between_nodes(const Coding& coding, const std::vector<int>& node_of, int leaders,
                         int64_t count, bool feedback) {
  constexpr int kRounds = 3;
  const int n = static_cast<int>(node_of.size());
  const int nodes = node_of.back() + 1;
  const Finish finish{static_cast<double>(n), 1};
  std::vector<Numbers> expected(kRounds, Numbers(static_cast<size_t>(count)));
  int64_t nbytes = 0;
  for (int leader = 0; leader < leaders; ++leader) {
    const Slice slice = slice_of(count, leaders, leader);
    Simulation simulation(coding, nodes, slice.count, feedback, finish);
    for (int round = 0; round < kRounds; ++round) {
      std::vector<Numbers> sums(static_cast<size_t>(nodes),
                                Numbers(static_cast<size_t>(slice.count)));
      for (int rank = 0; rank < n; ++rank)
        for (int64_t i = 0; i < slice.count; ++i)
          sums[static_cast<size_t>(node_of[static_cast<size_t>(rank)])][static_cast<size_t>(i)] +=
              noise(rank, round, slice.begin + i);
      const Numbers mean = simulation.round(std::move(sums));
      std::copy(mean.begin(), mean.end(),
                expected[static_cast<size_t>(round)].begin() + slice.begin);
    }
    nbytes += kRounds * sent_by_all(coding, nodes, slice.count);
  }
  std::atomic<int64_t> sent{0};
  with_jobs(
      n, DType::kF32,
      [&](int rank, Job& job) {
        Numbers data(static_cast<size_t>(count)), residual(data.size()), of_mean(data.size());
        job.op = ReduceOp::kAverage;
        job.finish = finish;
        job.count = count;
        job.coding = &coding;
        job.exact_in_nodes = true;
        job.data = reinterpret_cast<char*>(data.data());
        if (feedback) job.kept = {residual.data(), of_mean.data()};
        for (int round = 0; round < kRounds; ++round) {
          for (int64_t i = 0; i < count; ++i) data[static_cast<size_t>(i)] = noise(rank, round, i);
          const Collective& row = choose_collective(OpKind::kAllreduce, job, "auto");
          ASSERT_STREQ(row.name, "hierarchical");
          row.run(job);
          ASSERT_TRUE(data == expected[static_cast<size_t>(round)])
              << coding.codec->name << " round " << round;
        }
        sent += job.group.work().sent_nbytes;
      },
      node_of);
  EXPECT_EQ(sent, nbytes) << coding.codec->name;
}

TEST(Compressed, BetweenNodesOnly) {
  for (const Coding& coding : every_coding())
    for (const bool feedback : {false, true}) {
      for (const int64_t count : {1, 2, 9001})
        check_between_nodes(coding, {0, 0, 0, 1, 1, 2}, 1, count, feedback);
      check_between_nodes(coding, {0, 0, 1, 1}, 2, 1, feedback);
      check_between_nodes(coding, {0, 0, 1, 1, 1}, 2, 9001, feedback);
      if (HasFatalFailure()) return;
    }
}

TEST(Compressed, NotAtAllInsideOneNodeThatIsExact) {
  const Coding coding = parse_coding("sign1");
  with_jobs(3, DType::kF32, [&](int, Job& job) {
    job.coding = &coding;
    job.count = 5000;
    EXPECT_STREQ(choose_collective(OpKind::kAllreduce, job, "ring").name, "compressed");
    job.exact_in_nodes = true;
    EXPECT_STREQ(choose_collective(OpKind::kAllreduce, job, "auto").name, "shared");
    // Whatever the user wants: one node has nobody to encode for.
    Numbers data(5000, 1.5f);
    job.data = reinterpret_cast<char*>(data.data());
    const Collective& row = choose_collective(OpKind::kAllreduce, job, "hierarchical");
    row.run(job);
    EXPECT_EQ(data, Numbers(5000, 4.5f)) << row.name;
  });
}

}  // namespace
}  // namespace bagua
