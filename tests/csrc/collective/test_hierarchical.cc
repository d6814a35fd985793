// Nodes of equal and unequal size, ranks of a node that are no neighbours, data in arenas or not.
#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "collective/jobs.h"
#include "common/scaled.h"

namespace bagua {
namespace {

using Layout = std::vector<int>;  // the node of each rank

class Hierarchical : public testing::TestWithParam<Layout> {
 protected:
  int n() const { return static_cast<int>(GetParam().size()); }
  size_t node_count() const { return std::set<int>(GetParam().begin(), GetParam().end()).size(); }

  // Reduces `count` elements; returns the bytes that all ranks sent.
  int64_t check(int64_t count, ReduceOp op, bool arenas, DType dtype = DType::kF32,
                const std::string& between_nodes = "auto") {
    std::atomic<int64_t> sent{0}, leaders{0};
    with_jobs(
        n(), dtype,
        [&](int rank, Job& job) {
          const size_t nbytes = static_cast<size_t>(count) * job.item();
          std::vector<char> own(nbytes + 1, 'g');
          job.data = own.data();
          job.count = count;
          job.op = op;
          job.finish.divisor = op == ReduceOp::kAverage ? n() : 1;
          std::shared_ptr<char> arena;
          if (arenas && rank % 3 != 1) {  // and some are not
            arena = arena_of(job, nbytes + 1);
            if (arena) job.data = arena.get();
          }
          for (int64_t i = 0; i < count; ++i) put(job.dtype, job.data, i, small_number(rank, i));
          job.between_nodes = between_nodes;
          std::set<std::string> leaders_chose;
          job.chosen = [&](const Collective& row, const Job&) { leaders_chose.insert(row.name); };
          hierarchical(job);
          for (const std::string& row : leaders_chose) {
            ASSERT_TRUE(between_nodes == "auto" || row == between_nodes) << row;
            ++leaders;
          }
          const auto expect = [&](int64_t i) {
            char rounded[sizeof(float)];
            put(dtype, rounded, 0, oracle(op, n(), i) / job.finish.divisor);
            return get(dtype, rounded, 0);
          };
          for (int64_t i = 0; i < count; ++i)
            ASSERT_EACH_EQ(get(job.dtype, job.data, i), expect(i)) << "at " << i << " of " << count;
          sent += job.group.work().sent_nbytes;
        },
        GetParam());
    EXPECT_EQ(leaders > 0, node_count() > 1 && count > 0);
    return sent;
  }
  static std::shared_ptr<char> arena_of(Job& job, size_t nbytes) {
    Group alone = job.group.part({job.group.me()});
    return alone.node() ? alone.node()->arenas()->allocate(nbytes) : nullptr;
  }
};

class LargeHierarchical : public Hierarchical {};
INSTANTIATE_TEST_SUITE_P(Collectives, LargeHierarchical, testing::Values(Layout{0, 1, 0, 1}));
TEST_P(LargeHierarchical, LargerThanAChunk) { check(scaled(9 << 20) + 1, ReduceOp::kSum, false); }

INSTANTIATE_TEST_SUITE_P(Collectives, Hierarchical,
                         testing::Values(Layout{0, 0, 1, 1}, Layout{0, 1, 0, 1}, Layout{0, 0, 0, 1},
                                         Layout{0, 1, 1, 2, 2, 2}, Layout{0, 1, 2}, Layout{0, 0, 0},
                                         Layout{5, 5, 5, 5, 2, 2, 2}));

TEST_P(Hierarchical, SumsAndAveragesOverUnequalNodes) {
  for (const int64_t count : std::vector<int64_t>{0, 1, 2, 1000, scaled(300'000)})
    for (const bool arenas : {false, true}) {
      check(count, ReduceOp::kSum, arenas);
      check(count, ReduceOp::kAverage, arenas);
      check(count, ReduceOp::kMax, arenas);
    }
}

TEST(HierarchicalChoice, IsForSeveralNodesOfSeveralRanks) {
  const auto chosen = [](const Layout& layout, int64_t count) {
    std::string name;
    with_jobs(
        static_cast<int>(layout.size()), DType::kF32,
        [&](int rank, Job& job) {
          job.count = count;
          if (rank == 0) name = choose_collective(OpKind::kAllreduce, job, "auto").name;
        },
        layout);
    return name;
  };
  EXPECT_EQ(chosen({0, 0, 1, 1}, 1 << 20), "hierarchical");
  EXPECT_EQ(chosen({0, 0, 1}, 1 << 20), "hierarchical");
  EXPECT_EQ(chosen({0, 0, 1, 1}, 10), "hierarchical");
  EXPECT_EQ(chosen({0, 0, 0}, 1 << 20), "shared");
  EXPECT_EQ(chosen({0, 1, 2}, 1 << 20), "scatter_reduce");
}

TEST_P(Hierarchical, LeadersDoAsTheyAreTold) {
  for (const char* row : {"scatter_reduce", "ring", "halving", "gather_reduce"})
    for (const int64_t count : std::vector<int64_t>{1, 1000, scaled(700'000) + 1})
      for (const DType dtype : {DType::kF32, DType::kF16}) {
        if (count <= 1000 || dtype == DType::kF32) check(count, ReduceOp::kSum, true, dtype, row);
        if (count <= 1000 || dtype == DType::kF16) check(count, ReduceOp::kMax, false, dtype, row);
      }
}

TEST_P(Hierarchical, ReducesHalvesAndIntegers) {
  for (const int64_t count : std::vector<int64_t>{1, 1000, scaled(300'000)})
    for (const DType dtype : {DType::kF16, DType::kI32}) {
      check(count, ReduceOp::kSum, true, dtype);
      check(count, ReduceOp::kMax, false, dtype);
      if (dtype == DType::kF16) check(count, ReduceOp::kAverage, false, dtype);
    }
}

// What two nodes of two make of one number of each rank.
void reduce_halves(const std::vector<float>& numbers, int64_t count, ReduceOp op, float expected,
                   const std::string& between_nodes = "auto", double factor = 1) {
  with_jobs(4, DType::kF16,
            [&](int rank, Job& job) {
              std::vector<F16> data(static_cast<size_t>(count), to_f16(numbers[rank]));
              job.data = reinterpret_cast<char*>(data.data());
              job.count = count;
              job.op = op;
              job.finish.divisor = op == ReduceOp::kAverage ? 4 : 1;
              job.finish.factor = factor;
              job.between_nodes = between_nodes;
              hierarchical(job);
              for (const F16 x : data) ASSERT_EQ(to_float(x), expected);
            },
            {0, 0, 1, 1});
}

// Of 24 bytes an element, 4 are for a leader's half of the sums as float32, and 3 for rounding it.
TEST(HierarchicalHalves, AllThatIsTouchedCounts) {
  constexpr int64_t kCount = 1 << 20;
  with_jobs(4, DType::kF16,
            [&](int, Job& job) {
              std::vector<F16> data(kCount, to_f16(1));
              job.data = reinterpret_cast<char*>(data.data());
              job.count = kCount;
              job.between_nodes = "ring";
              hierarchical(job);
              EXPECT_GE(job.group.work().touched_nbytes, 24 * kCount);
            },
            {0, 0, 1, 1});
}

// 2048 + 1 is no float16, so a sum that rounds each node's loses both ones.
TEST(HierarchicalHalves, NamedRowsRoundOnce) {
  const std::vector<float> numbers = {2048, 1, 1, 0};
  for (const int64_t count : {10, 100000}) {
    reduce_halves(numbers, count, ReduceOp::kSum, 2050, "ring");
    reduce_halves(numbers, count, ReduceOp::kSum, 2048);
  }
}

// A node's sum would be Inf, or next to nothing if it were divided by all ranks.
TEST(HierarchicalHalves, ReachAsFarAsFloat16) {
  const float most = 65504, least = 1.0f / (1 << 24);
  for (const int64_t count : {1000, 100000}) {
    for (const float x : {most, least, 3 * least})
      reduce_halves({x, x, x, x}, count, ReduceOp::kAverage, x);
    for (const float x : {1.0f, 3.0f, 2500.0f})
      reduce_halves({x * least, 0, 0, 0}, count, ReduceOp::kSum, x * least);
    reduce_halves({40000, 40000, 40000, 40000}, count, ReduceOp::kSum, 40000, "auto", 0.25);
    reduce_halves({least, least, 0, least}, count, ReduceOp::kAverage, 768 * least, "auto", 1024);
  }
}

TEST_P(Hierarchical, SendsAsIfEachNodeWereOneRank) {
  const int64_t count = 840 * scaled(1000);  // divisible by every number of leaders and nodes
  const auto k = static_cast<int64_t>(node_count());
  EXPECT_EQ(check(count, ReduceOp::kSum, true), 2 * (k - 1) * count * 4);
  for (const DType dtype : {DType::kF16, DType::kBF16})
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax})
      EXPECT_EQ(check(count, op, true, dtype), 2 * (k - 1) * count * 2) << dtype_name(dtype);
}

}  // namespace
}  // namespace bagua
