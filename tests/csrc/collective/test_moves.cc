// Walks the table: the rows that move blocks, of even, uneven and no size.
#include <gtest/gtest.h>

#include "collective/jobs.h"

namespace bagua {
namespace {

class Moves : public EveryCase {};
INSTANTIATE_TEST_SUITE_P(Collectives, Moves, testing::ValuesIn(cases()), case_name);

TEST_P(Moves, BroadcastFromEveryRoot) {
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

TEST_P(Moves, AllgatherOfUnevenAndEmptyBlocks) {
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

TEST_P(Moves, AlltoallOfUnevenAndEmptyBlocks) {
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

TEST_P(Moves, ReducescatterOfUnevenAndEmptySlices) {
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

}  // namespace
}  // namespace bagua
