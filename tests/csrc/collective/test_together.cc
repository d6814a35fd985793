// Rows of the table that carry out several jobs at a time end with the bits of one after the other.
#include <gtest/gtest.h>

#include <cmath>
#include <deque>

#include "collective/jobs.h"
#include "common/scaled.h"

namespace bagua {
namespace {

// A job, its elements, and what is kept of them.
struct Load {
  DType dtype;
  std::vector<char> data;
  std::vector<std::vector<float>> kept;
};

// From less than a block to more than a message, of the element types that the row can, each rank
// with its own values.
std::vector<Load> loads_of(const Collective& row, int rank) {
  const bool copies = row.name == std::string("mirrored");
  const bool exact = row.name == std::string("scatter_reduce");
  constexpr int64_t kHalves = scaled(40'001);
  std::vector<Load> loads;
  for (const int64_t count :
       std::vector<int64_t>{scaled(30'007), 1, kHalves, 513, scaled(600'000)}) {
    DType dtype = DType::kF32;
    if (count == kHalves && !copies) dtype = exact ? DType::kF16 : DType::kBF16;
    if (count == 513 && exact) dtype = DType::kF64;
    Load load{dtype, std::vector<char>(static_cast<size_t>(count) * dtype_nbytes(dtype)), {}};
    for (int64_t i = 0; i < count; ++i)
      put(dtype, load.data.data(), i, std::sin(rank * 7919.0 + static_cast<double>(count + i)));
    load.kept.assign(3, std::vector<float>(static_cast<size_t>(count)));
    loads.push_back(std::move(load));
  }
  return loads;
}

// What a rank has after two rounds; `together` or one by one.
std::vector<Load> carried_out(const Collective& row, const Coding* coding, bool together, int rank,
                              Job& like) {
  std::vector<Load> loads = loads_of(row, rank);
  for (int round = 0; round < 2; ++round) {
    std::deque<Job> jobs;
    Jobs all;
    int told = 0;  // that values are final
    for (Load& load : loads) {
      Job& job = jobs.emplace_back(like);
      job.dtype = load.dtype;
      job.op = ReduceOp::kAverage;
      job.finish.divisor = like.group.size();
      job.data = load.data.data();
      job.count = static_cast<int64_t>(load.data.size() / job.item());
      job.coding = coding;
      for (size_t i = 0; coding && i < load.kept.size(); ++i) job.kept[i] = load.kept[i].data();
      if (row.name == std::string("mirrored")) {
        job.peers.kind = Peers::kRing;
        if (!together || &load == &loads.back()) job.values_final = [&] { ++told; };
      }
      all.push_back(&job);
    }
    if (together) {
      const auto under_way = row.begin(all);
      for (int i = 0; i < 100; ++i) under_way->advance();  // as far as others have got
      under_way->finish();
    } else {
      for (Job* job : all) row.run(*job);
    }
    if (row.name == std::string("mirrored")) {
      EXPECT_EQ(told, together ? 1 : 5);
    }
  }
  return loads;
}

TEST(Together, SeveralJobsEndWithTheBitsOfOneAfterTheOther) {
  int tried = 0;
  for (const Collective* row : rows_of(OpKind::kAllreduce)) {
    if (!row->begin) continue;
    ++tried;
    for (const Codec& codec : codecs()) {
      const Coding coding{&codec, 41, find_codec("raw")};
      const bool exact = row->name == std::string("scatter_reduce");
      if (exact && &codec != &codecs()[0]) continue;
      if (codec.sparse != (row->name == std::string("sparse")) && !exact) continue;
      const Coding* chosen = exact ? nullptr : &coding;
      const bool many = exact || codec.name == std::string("minmax_u8") || codec.sparse;
      for (const int n : many ? std::vector<int>{2, 5} : std::vector<int>{3})
        with_jobs(
            n, DType::kF32,
            [&](int rank, Job& job) {
              const auto one_by_one = carried_out(*row, chosen, false, rank, job);
              const auto together = carried_out(*row, chosen, true, rank, job);
              for (size_t i = 0; i < together.size(); ++i) {
                const std::string what = std::string(row->name) + " " + codec.name + " job " +
                                         std::to_string(i) + " of rank " + std::to_string(rank);
                EXPECT_TRUE(together[i].data == one_by_one[i].data) << what;
                EXPECT_TRUE(together[i].kept == one_by_one[i].kept) << what;
              }
            },
            std::vector<int>{0, 1, 2, 3, 4});
    }
  }
  EXPECT_EQ(tried, 4);
}

}  // namespace
}  // namespace bagua
