// Walks the table: the rows that move blocks, of even, uneven and no size, out of memory that
// others see and out of other memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>

#include "collective/jobs.h"
#include "common/scaled.h"

namespace bagua {
namespace {

// Elements of one exchange from rank `from` to rank `to`.
using Blocks = std::function<int64_t(int from, int to)>;

class Moves : public EveryCase {
 protected:
  struct Way {
    const Collective* row;
    Where where;
    Blocks blocks;
  };
  void walk(OpKind kind,
            const std::function<void(int rank, Job& job, const Way& way)>& body) const {
    const std::vector<Blocks> all = patterns();
    for (const Collective* row : rows_of(kind))
      for (size_t i = 0; i < all.size(); ++i) {
        // With one number of ranks or another everything has been everywhere.
        const Where where = kEverywhere[(i + static_cast<size_t>(n())) % 3];
        with_jobs(n(), dtype(), [&](int rank, Job& job) { body(rank, job, {row, where, all[i]}); });
        if (HasFatalFailure()) return;
      }
  }

 private:
  std::vector<Blocks> patterns() const {
    const auto segment = static_cast<int64_t>(kSegmentNbytes / item());
    return {
        [](int, int) { return 0; },
        [](int from, int to) { return from == to ? 5 : 0; },
        [](int from, int to) { return (from * 3 + to) % 4; },
        [](int from, int) { return from == 1 ? 1000 : 0; },
        [this, segment](int from, int) { return from + 1 == n() ? 2 * segment + 5 : from; },
        [segment](int from, int to) { return from == 0 && to == 0 ? 1 : segment + from - to; },
    };
  }
};
INSTANTIATE_TEST_SUITE_P(Collectives, Moves, testing::ValuesIn(cases()), case_name);

TEST_P(Moves, BroadcastFromEveryRoot) {
  for (const Collective* row : rows_of(OpKind::kBroadcast))
    for (int root = 0; root < n(); ++root)
      for (const int64_t count : counts()) {
        if (root > 1 && count > 100000) continue;
        with_jobs(n(), dtype(), [&](int rank, Job& job) {
          const auto nbytes = static_cast<size_t>(count) * job.item();
          const auto data = allocate(job, static_cast<Where>((root + count) % 3), nbytes + 1);
          std::memset(data.get(), rank, nbytes + 1);
          for (int64_t i = 0; i < count && rank == root; ++i)
            put(dtype(), data.get(), i, small_number(root, i));
          job.data = data.get();
          job.count = count;
          job.root = root;
          ASSERT_TRUE(row->can(job));
          row->run(job);
          for (int64_t i = 0; i < count; ++i)
            ASSERT_EACH_EQ(get(dtype(), data.get(), i), small_number(root, i))
                << "root " << root << ", at " << i;
          ASSERT_EQ(data.get()[nbytes], static_cast<char>(rank));
        });
        if (HasFatalFailure()) return;
      }
}

TEST_P(Moves, AllgatherOfUnevenAndEmptyBlocks) {
  walk(OpKind::kAllgather, [&](int rank, Job& job, const Way& way) {
    const auto count = [&](int r) { return way.blocks(r, 1); };
    const auto in = allocate(job, way.where, static_cast<size_t>(count(rank)) * job.item());
    for (int64_t i = 0; i < count(rank); ++i) put(dtype(), in.get(), i, small_number(rank, i));
    int64_t total = 0;
    for (int r = 0; r < n(); ++r) {
      job.out_counts.push_back(count(r));
      total += count(r);
    }
    job.in_counts = job.out_counts;
    std::vector<char> out(static_cast<size_t>(total) * job.item());
    job.in = in.get();
    job.out = out.data();
    way.row->run(job);
    int64_t at = 0;
    for (int r = 0; r < n(); ++r)
      for (int64_t i = 0; i < count(r); ++i, ++at)
        ASSERT_EACH_EQ(get(dtype(), out.data(), at), small_number(r, i));
  });
}

TEST_P(Moves, AlltoallOfUnevenAndEmptyBlocks) {
  walk(OpKind::kAlltoall, [&](int rank, Job& job, const Way& way) {
    int64_t sent = 0, received = 0;
    for (int r = 0; r < n(); ++r) {
      job.in_counts.push_back(way.blocks(rank, r));
      job.out_counts.push_back(way.blocks(r, rank));
      sent += job.in_counts.back();
      received += job.out_counts.back();
    }
    const auto in = allocate(job, way.where, static_cast<size_t>(sent) * job.item());
    std::vector<char> out(static_cast<size_t>(received) * job.item());
    int64_t at = 0;
    for (int to = 0; to < n(); ++to)
      for (int64_t i = 0; i < way.blocks(rank, to); ++i)
        put(dtype(), in.get(), at++, small_number(rank * n() + to, i));
    job.in = in.get();
    job.out = out.data();
    way.row->run(job);
    at = 0;
    for (int from = 0; from < n(); ++from)
      for (int64_t i = 0; i < way.blocks(from, rank); ++i, ++at)
        ASSERT_EACH_EQ(get(dtype(), out.data(), at), small_number(from * n() + rank, i))
            << "from " << from;
  });
}

TEST_P(Moves, ReducescatterOfUnevenAndEmptySlices) {
  walk(OpKind::kReducescatter, [&](int rank, Job& job, const Way& way) {
    int64_t total = 0, begin = 0;
    for (int r = 0; r < n(); ++r) {
      if (r == rank) begin = total;
      job.in_counts.push_back(way.blocks(r, 1));
      total += way.blocks(r, 1);
    }
    const auto nbytes = static_cast<size_t>(total) * job.item();
    const auto in = allocate(job, way.where, nbytes);
    for (int64_t i = 0; i < total; ++i) put(dtype(), in.get(), i, small_number(rank, i));
    const std::string before(in.get(), nbytes);
    const int64_t mine = way.blocks(rank, 1);
    std::vector<char> out(static_cast<size_t>(mine) * job.item() + 1, 'g');
    job.in = in.get();
    job.out = out.data();
    way.row->run(job);
    for (int64_t i = 0; i < mine; ++i)
      ASSERT_EACH_EQ(get(dtype(), out.data(), i), oracle(ReduceOp::kSum, n(), begin + i));
    ASSERT_EQ(out.back(), 'g');
    ASSERT_EQ(std::string(in.get(), nbytes), before) << "the input was written to";
  });
}

// What others read where it is may be written to as soon as the exchange is over.
TEST(SharedMoves, ReadNothingAfterwards) {
  constexpr int64_t kCount = 50'000;
  for (const Where where : kEverywhere)
    with_jobs(3, DType::kF32, [&](int rank, Job& job) {
      const auto data = allocate(job, where, kCount * sizeof(float));
      auto* values = reinterpret_cast<float*>(data.get());
      job.data = data.get();
      job.count = kCount;
      for (int again = 0; again < 60; ++again) {
        job.root = again % 3;
        std::fill(values, values + kCount, static_cast<float>(100 * rank + again));
        shared_broadcast(job);
        const auto expected = static_cast<float>(100 * job.root + again);
        ASSERT_EQ(std::count(values, values + kCount, expected), kCount) << again;
      }
    });
}

// Results beyond the caches, again and again: stages are written in both ways, and every input is
// overwritten as soon as an exchange is over.
TEST(SharedMoves, OfLargeResults) {
  constexpr int64_t kCount = scaled(2'100'000) + 7;  // of which a rank gets more than 8 MB
  for (const OpKind kind :
       {OpKind::kBroadcast, OpKind::kAllgather, OpKind::kAlltoall, OpKind::kReducescatter})
    for (const Where where : kEverywhere)
      with_jobs(2, DType::kF32, [&](int rank, Job& job) {
        const auto data = allocate(job, where, 2 * kCount * sizeof(float));
        auto* in = reinterpret_cast<float*>(data.get());
        std::vector<float> out(2 * kCount);
        job.data = data.get();
        job.in = data.get();
        job.out = reinterpret_cast<char*>(out.data());
        job.root = 1;
        job.count = kCount;
        job.in_counts = job.out_counts = {kCount, kCount};
        for (int again = 0; again < 5; ++again) {
          const auto value = [&](int r, int64_t i) {
            return static_cast<float>((i + 1000 * again + 10 * r) % 999);
          };
          for (int64_t i = 0; i < 2 * kCount; ++i) in[i] = value(rank, i);
          rows_of(kind).front()->run(job);
          for (int64_t i = 0; i < kCount; i += 97) {
            const int64_t mine = i + rank * kCount;  // of what others have for this rank
            if (kind == OpKind::kBroadcast) {
              ASSERT_EQ(in[i], value(1, i));
            } else if (kind == OpKind::kReducescatter) {
              ASSERT_EQ(out[static_cast<size_t>(i)], value(0, mine) + value(1, mine));
            } else {
              const bool all = kind == OpKind::kAllgather;
              ASSERT_EQ(out[static_cast<size_t>(i)], value(0, all ? i : mine));
              ASSERT_EQ(out[static_cast<size_t>(i + kCount)], value(1, all ? i : mine));
            }
          }
          std::fill_n(in, kind == OpKind::kBroadcast ? 0 : 2 * kCount, -1.0f);
        }
      });
}

// What lies in an arena is read once and written once by everyone who gets it.
TEST(SharedMoves, CopyOnceOutOfArenas) {
  constexpr int64_t kCount = 100'000, kNbytes = kCount * 4;
  const auto touched = [](OpKind kind, Where where) {
    int64_t all = 0;
    std::mutex mutex;
    with_jobs(2, DType::kF32, [&](int, Job& job) {
      const auto in = allocate(job, where, 2 * kNbytes);
      std::memset(in.get(), 0, 2 * kNbytes);
      std::vector<char> out(2 * kNbytes);
      job.data = in.get();
      job.in = in.get();
      job.out = out.data();
      job.root = 0;
      job.count = kCount;
      job.in_counts = job.out_counts = {kCount, kCount};
      rows_of(kind).front()->run(job);
      const std::lock_guard<std::mutex> lock(mutex);
      all += job.group.work().touched_nbytes;
    });
    return static_cast<double>(all) / kNbytes;
  };
  EXPECT_EQ(touched(OpKind::kBroadcast, Where::kArenas), 2);
  EXPECT_EQ(touched(OpKind::kBroadcast, Where::kElsewhere), 4);
  EXPECT_EQ(touched(OpKind::kAllgather, Where::kArenas), 8);  // with a copy of one's own
  EXPECT_EQ(touched(OpKind::kAllgather, Where::kElsewhere), 12);
  EXPECT_EQ(touched(OpKind::kAlltoall, Where::kArenas), 8);
  EXPECT_EQ(touched(OpKind::kAlltoall, Where::kElsewhere), 12);
  EXPECT_EQ(touched(OpKind::kReducescatter, Where::kArenas), 6);  // two sources and a result
  EXPECT_EQ(touched(OpKind::kReducescatter, Where::kElsewhere), 10);
}

}  // namespace
}  // namespace bagua
