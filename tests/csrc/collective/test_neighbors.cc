// Averages with some peers: who meets whom, the means, and copies of neighbors that stay true.
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <map>
#include <set>
#include <utility>

#include "collective/jobs.h"
#include "common/errors.h"

namespace bagua {
namespace {

using Numbers = std::vector<float>;
constexpr Peers::Kind kKinds[] = {Peers::kShiftOne, Peers::kRandom, Peers::kRing,
                                  Peers::kExponential};

std::vector<int> with_me(const Peers& peers, int n, int me) {
  std::vector<int> ranks = meeting(peers, n, me).take_from;
  ranks.push_back(me);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

TEST(Meeting, WhoGivesIsWhoIsTakenFrom) {
  for (const Peers::Kind kind : kKinds)
    for (int n = 1; n <= 17; ++n)
      for (int round = 0; round < 2 * n; ++round)
        for (int me = 0; me < n; ++me)
          for (const int to : meeting({kind, round}, n, me).give_to) {
            const auto from = meeting({kind, round}, n, to).take_from;
            EXPECT_EQ(std::count(from.begin(), from.end(), me), 1) << n << " " << round;
            EXPECT_NE(to, me);
          }
}

TEST(Meeting, ShiftOneIsATournament) {
  for (int n = 2; n <= 17; ++n) {
    const int rounds = n % 2 ? n : n - 1;
    std::set<std::pair<int, int>> met;
    for (int round = 0; round < rounds; ++round) {
      int resting = 0;
      for (int me = 0; me < n; ++me) {
        const auto peer = meeting({Peers::kShiftOne, round}, n, me).take_from;
        resting += peer.empty();
        if (peer.empty()) continue;
        ASSERT_EQ(peer.size(), 1u);
        EXPECT_EQ(meeting({Peers::kShiftOne, round}, n, peer[0]).take_from[0], me);
        EXPECT_TRUE(met.insert({me, peer[0]}).second) << "met before, " << n << " ranks";
      }
      EXPECT_EQ(resting, n % 2);
    }
    EXPECT_EQ(met.size(), static_cast<size_t>(n * (n - 1))) << "not every pair met";
  }
}

// All pairs about equally often, and other pairs with another seed.
TEST(Meeting, RandomPairsAreDrawnFromTheSeed) {
  for (int n = 2; n <= 9; ++n) {
    constexpr int kRounds = 2000;
    std::map<std::pair<int, int>, int> met;
    int as_before = 0;
    for (int round = 0; round < kRounds; ++round) {
      int resting = 0;
      for (int me = 0; me < n; ++me) {
        const auto peer = meeting({Peers::kRandom, round, 7}, n, me).take_from;
        resting += peer.empty();
        if (peer.empty()) continue;
        ASSERT_EQ(peer.size(), 1u);
        EXPECT_EQ(meeting({Peers::kRandom, round, 7}, n, peer[0]).take_from[0], me);
        ++met[{me, peer[0]}];
        as_before += meeting({Peers::kRandom, round, 8}, n, me).take_from == peer;
      }
      EXPECT_EQ(resting, n % 2);
    }
    EXPECT_EQ(met.size(), static_cast<size_t>(n * (n - 1)));
    const int usual = kRounds / (n % 2 ? n : n - 1);
    for (const auto& [pair, times] : met) EXPECT_NEAR(times, usual, usual / 4) << n;
    EXPECT_EQ(as_before == kRounds * n, n == 2);  // two always meet
  }
}

TEST(Meeting, ExponentialReachesEveryoneInLog2Rounds) {
  for (int n = 2; n <= 17; ++n) {
    std::set<int> knows{0};
    for (int round = 0; (1 << round) < n; ++round) {
      const std::set<int> before = knows;
      for (const int rank : before)
        for (const int to : meeting({Peers::kExponential, round}, n, rank).give_to)
          knows.insert(to);
    }
    EXPECT_EQ(knows.size(), static_cast<size_t>(n));
  }
}

TEST(Meeting, UnknownPeersAreRefused) {
  EXPECT_TRUE(parse_peers("").all());
  EXPECT_EQ(parse_peers("ring:7").round, 7);
  EXPECT_THROW(parse_peers("rings"), UsageError);
  EXPECT_THROW(parse_peers("ring:-1"), UsageError);
}

// Every rank averages small numbers over several rounds, on the nodes given by rank.
void check_means(Peers::Kind kind, const std::vector<int>& node_of, DType dtype, int64_t count,
                 bool exact_in_nodes) {
  const int n = static_cast<int>(node_of.size());
  std::vector<int> nodes(node_of);
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  const auto place = [&](int rank) {
    return static_cast<int>(std::find(nodes.begin(), nodes.end(), node_of[rank]) - nodes.begin());
  };
  const auto averaged = [&](const Peers& peers, int me) {
    if (!exact_in_nodes) return with_me(peers, n, me);
    std::vector<int> ranks;
    for (const int node : with_me(peers, static_cast<int>(nodes.size()), place(me)))
      for (int rank = 0; rank < n; ++rank)
        if (place(rank) == node) ranks.push_back(rank);
    return ranks;
  };
  with_jobs(
      n, dtype,
      [&](int rank, Job& job) {
        std::vector<char> data(static_cast<size_t>(count) * job.item() + 1, 'g');
        job.op = ReduceOp::kAverage;
        job.finish.divisor = n;
        job.count = count;
        job.exact_in_nodes = exact_in_nodes;
        for (int round = 0; round < 3; ++round) {
          for (int64_t i = 0; i < count; ++i) put(dtype, data.data(), i, small_number(rank, i));
          job.data = data.data();
          job.peers = {kind, round};
          choose_collective(OpKind::kAllreduce, job, "auto").run(job);
          const std::vector<int> ranks = averaged(job.peers, rank);
          for (int64_t i = 0; i < count; ++i) {
            double sum = 0;
            for (const int other : ranks) sum += small_number(other, i);
            ASSERT_NEAR(get(dtype, data.data(), i), sum / static_cast<double>(ranks.size()),
                        dtype == DType::kF16 ? 4e-3 : 1e-6)
                << "round " << round << " rank " << rank << " at " << i << " of " << count;
          }
          ASSERT_EQ(data.back(), 'g') << "behind the end";
        }
      },
      node_of);
}

TEST(Neighbors, AverageWithTheirPeers) {
  for (const Peers::Kind kind : kKinds)
    for (int n = 1; n <= 6; ++n)
      for (const DType dtype : {DType::kF32, DType::kF16})
        for (const int64_t count : std::vector<int64_t>{1, 1000, scaled(512 << 10) / 4 * 2 + 3})
          if (count <= 1000 || n == 2 || n == 5)  // an even number of ranks, and an odd one
            check_means(kind, std::vector<int>(static_cast<size_t>(n)), dtype, count, false);
}

TEST(Neighbors, ANodeIsOnePeer) {
  for (const Peers::Kind kind : kKinds)
    for (const auto& node_of :
         std::vector<std::vector<int>>{{0, 0}, {0, 0, 1, 1}, {0, 0, 1, 1, 2, 2}})
      for (const DType dtype : {DType::kF32, DType::kF16})
        check_means(kind, node_of, dtype, 3000, true);
}

// What flows from a node to another: half of what they have together if two meet, a third of what
// the smaller has in a ring, and half of what the smallest of all has where a circle is closed.
double flow(const Peers& peers, const std::vector<double>& sizes, int from, int to) {
  const int n = static_cast<int>(sizes.size());
  const Meeting meet = meeting(peers, n, to);
  if (std::find(meet.take_from.begin(), meet.take_from.end(), from) == meet.take_from.end())
    return 0;
  const double a = sizes[static_cast<size_t>(from)], b = sizes[static_cast<size_t>(to)];
  if (meet.give_to == std::vector<int>{from}) return a * b / (a + b);
  if (peers.kind == Peers::kRing) return std::min(a, b) / 3;
  return *std::min_element(sizes.begin(), sizes.end()) / 2;
}

// Nodes of other numbers of ranks, over several rounds: nobody counts for more than the others.
TEST(Neighbors, TheMeanOverAllRanksStaysWhatItIs) {
  constexpr int64_t kCount = 3000;
  for (const Peers::Kind kind : kKinds)
    for (const auto& node_of : std::vector<std::vector<int>>{{0, 1, 1, 0, 1},
                                                             {0, 1, 1, 1},
                                                             {0, 0, 1, 2, 2, 2},
                                                             {0, 0, 1, 2, 2, 2, 3},
                                                             {0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3}})
      for (const DType dtype : {DType::kF32, DType::kF16})
        with_jobs(
            static_cast<int>(node_of.size()), dtype,
            [&](int rank, Job& job) {
              const int n = static_cast<int>(node_of.size());
              const int nodes = *std::max_element(node_of.begin(), node_of.end()) + 1;
              std::vector<double> sizes(static_cast<size_t>(nodes));
              std::vector<double> means(sizes);
              for (const int node : node_of) ++sizes[static_cast<size_t>(node)];
              double mean = 0;
              for (int other = 0; other < n; ++other) {
                const auto node = static_cast<size_t>(node_of[static_cast<size_t>(other)]);
                means[node] += small_number(other, 0) / sizes[node];
                mean += small_number(other, 0) / static_cast<double>(n);
              }
              std::vector<char> data(static_cast<size_t>(kCount) * job.item());
              for (int64_t i = 0; i < kCount; ++i)
                put(dtype, data.data(), i, small_number(rank, 0));
              job.op = ReduceOp::kAverage;
              job.finish.divisor = n;
              job.count = kCount;
              job.exact_in_nodes = true;
              job.data = data.data();
              for (int round = 0; round < 8; ++round) {
                job.peers = {kind, round};
                choose_collective(OpKind::kAllreduce, job, "auto").run(job);
                const std::vector<double> before(means);
                double over_all = 0;
                for (int to = 0; to < nodes; ++to) {
                  const auto t = static_cast<size_t>(to);
                  for (int from = 0; from < nodes; ++from)
                    means[t] += flow(job.peers, sizes, from, to) / sizes[t] *
                                (before[static_cast<size_t>(from)] - before[t]);
                  over_all += means[t] * sizes[t] / n;
                }
                ASSERT_NEAR(over_all, mean, 1e-9) << "the definition itself";
                const double mine = means[static_cast<size_t>(node_of[static_cast<size_t>(rank)])];
                for (int64_t i = 0; i < kCount; ++i)
                  ASSERT_NEAR(get(dtype, data.data(), i), mine, dtype == DType::kF16 ? 2e-2 : 1e-5)
                      << "kind " << kind << " round " << round << " rank " << rank;
              }
            },
            node_of);
}

// What every rank has, and keeps of itself and its neighbors, after each round.
struct RingState {
  std::vector<Numbers> x, w, l, r;
};

Numbers said_by(const Coding& coding, const Numbers& z) {
  std::vector<char> wire(static_cast<size_t>(coding.wire_nbytes(static_cast<int64_t>(z.size()))));
  Numbers said(z.size());
  coding.encode(z.data(), static_cast<int64_t>(z.size()), wire.data());
  coding.decode(wire.data(), static_cast<int64_t>(z.size()), said.data());
  return said;
}

void simulate(const Coding& coding, RingState& ring) {
  const size_t n = ring.x.size();
  std::vector<Numbers> said;
  for (size_t rank = 0; rank < n; ++rank) {
    Numbers z(ring.x[rank]);
    for (size_t i = 0; i < z.size(); ++i)
      z[i] = z[i] + (1.0f / 3.0f) * ring.l[rank][i] + (1.0f / 3.0f) * ring.r[rank][i] -
             (5.0f / 3.0f) * ring.w[rank][i];
    said.push_back(said_by(coding, z));
  }
  for (size_t rank = 0; rank < n; ++rank) {
    for (size_t i = 0; i < said[rank].size(); ++i) {
      ring.w[rank][i] += said[rank][i];
      ring.l[rank][i] += said[(rank + n - 1) % n][i];
      ring.r[rank][i] += said[(rank + 1) % n][i];
    }
    ring.x[rank] = ring.w[rank];
  }
}

float moved(size_t rank, int round, size_t i) {
  return 0.1f * std::sin(static_cast<float>(rank * 31 + i) + static_cast<float>(round));
}

TEST(Mirrored, IsWhatOneLoopOverAllRanksGives) {
  for (const Codec& codec : codecs())
    for (const int n : {2, 3, 4})
      for (const size_t count : {size_t{1}, size_t{5000}, size_t{scaled(128 << 10) + 77}}) {
        if (count > 5000 && n > 3) continue;
        const Coding coding = parse_coding(codec.name);
        Numbers start(count);
        for (size_t i = 0; i < count; ++i) start[i] = std::cos(static_cast<float>(i));
        const std::vector<Numbers> alike(static_cast<size_t>(n), start);
        RingState ring{alike, alike, alike, alike};
        std::vector<RingState> after;
        for (int round = 0; round < 3; ++round) {
          for (size_t rank = 0; rank < alike.size(); ++rank)
            for (size_t i = 0; i < count; ++i) ring.x[rank][i] += moved(rank, round, i);
          simulate(coding, ring);
          after.push_back(ring);
        }
        with_jobs(n, DType::kF32, [&](int rank, Job& job) {
          const auto me = static_cast<size_t>(rank);
          Numbers x(start), w(start), l(start), r(start);
          job.op = ReduceOp::kAverage;
          job.count = static_cast<int64_t>(count);
          job.coding = &coding;
          job.kept = {w.data(), l.data(), r.data()};
          for (int round = 0; round < 3; ++round) {
            for (size_t i = 0; i < count; ++i) x[i] += moved(me, round, i);
            job.data = reinterpret_cast<char*>(x.data());
            job.peers = {Peers::kRing, round};
            const Collective& row = choose_collective(OpKind::kAllreduce, job, "auto");
            ASSERT_STREQ(row.name, "mirrored");
            row.run(job);
            const RingState& expected = after[static_cast<size_t>(round)];
            ASSERT_EQ(x, expected.x[me]) << codec.name << " round " << round;
            ASSERT_EQ(l, expected.w[(me + alike.size() - 1) % alike.size()]) << codec.name;
            ASSERT_EQ(r, expected.w[(me + 1) % alike.size()]) << codec.name;
          }
        });
      }
}

// Nodes that do not move any more come to agree on the mean of all ranks, however many each has.
TEST(Mirrored, NodesAgreeOnTheMeanOfAllRanks) {
  const Coding coding = parse_coding("fp16");
  constexpr size_t kCount = 3000;
  for (const auto& node_of : std::vector<std::vector<int>>{
           {0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 1, 0, 1}, {0, 0, 1, 2, 2, 2, 3}}) {
    const auto n = static_cast<int>(node_of.size());
    with_jobs(
        n, DType::kF32,
        [&](int rank, Job& job) {
          Numbers x(kCount), w(kCount), l(kCount), r(kCount), mean(kCount);
          for (size_t i = 0; i < kCount; ++i) {
            x[i] = moved(static_cast<size_t>(rank), 0, i);
            for (int other = 0; other < n; ++other)
              mean[i] += moved(static_cast<size_t>(other), 0, i) / static_cast<float>(n);
          }
          job.op = ReduceOp::kAverage;
          job.count = kCount;
          job.coding = &coding;
          job.exact_in_nodes = true;
          job.kept = {w.data(), l.data(), r.data()};
          job.data = reinterpret_cast<char*>(x.data());
          for (int round = 0; round < 60; ++round) {
            job.peers = {Peers::kRing, round};
            const Collective& row = choose_collective(OpKind::kAllreduce, job, "auto");
            ASSERT_STREQ(row.name, "hierarchical");
            row.run(job);
          }
          for (size_t i = 0; i < kCount; ++i) ASSERT_NEAR(x[i], mean[i], 1e-3) << i;
        },
        node_of);
  }
}

TEST(Mirrored, OwnValuesAreFinalBeforeAnythingHasArrived) {
  const Coding coding = parse_coding("minmax_u8");
  std::promise<void> there;
  auto rank_0_has_its_values = there.get_future().share();
  with_jobs(3, DType::kF32, [&](int rank, Job& job) {
    Numbers x(9000), w(9000), l(9000), r(9000), final;
    for (size_t i = 0; i < x.size(); ++i) x[i] = moved(static_cast<size_t>(rank), 0, i);
    job.op = ReduceOp::kAverage;
    job.count = 9000;
    job.coding = &coding;
    job.kept = {w.data(), l.data(), r.data()};
    job.peers = {Peers::kRing, 0};
    job.data = reinterpret_cast<char*>(x.data());
    job.values_final = [&] {
      final = x;
      if (rank == 0) there.set_value();
    };
    if (rank != 0) rank_0_has_its_values.wait();
    choose_collective(OpKind::kAllreduce, job, "auto").run(job);
    EXPECT_EQ(final, x);
    EXPECT_EQ(final, w);
  });
}

TEST(Mirrored, WhoKeepsNoCopiesDoesNotMove) {
  const Coding coding = parse_coding("minmax_u8");
  with_jobs(3, DType::kF32, [&](int rank, Job& job) {
    Numbers x(700, 1.0f), w(700, 1.0f), l(w), r(w);
    if (rank != 1) job.kept = {w.data(), l.data(), r.data()};
    if (rank == 1) x.assign(700, 0.0f);
    job.op = ReduceOp::kAverage;
    job.count = 700;
    job.coding = &coding;
    job.peers = {Peers::kRing, 0};
    job.data = reinterpret_cast<char*>(x.data());
    choose_collective(OpKind::kAllreduce, job, "auto").run(job);
    const Numbers& of_1 = rank == 0 ? r : l;
    if (rank != 1) {
      EXPECT_EQ(of_1, Numbers(700, 1.0f));
    }
  });
}

}  // namespace
}  // namespace bagua
