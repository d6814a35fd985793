// Random programs: all ranks draw the same operations from one seed and submit the named ones in an
// order and from threads of their own. Always the right results, never a hang.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <tuple>

#include "engine/loopback_world.h"

namespace bagua {
namespace {

int value(int rank, int64_t i) { return static_cast<int>((rank * 7 + i * 3) % 13) - 6; }

// One operation of a program, the same on every rank.
struct Operation {
  OpKind kind;
  std::string name;
  int32_t set;
  std::vector<int> ranks;
  std::vector<int64_t> counts;  // elements, or rows, of each tensor
  ReduceOp op;
  int root;
  bool floats;
};

// Row numbers that follow from the operation alone, so that every rank knows all of them.
int64_t rows_to(const Operation& o, int from, int to) { return (o.counts[0] + from * 3 + to) % 4; }
int64_t rows_of(const Operation& o, size_t tensor, int rank) {
  return (o.counts[tensor] + rank) % 5;
}

// An operation under way on one rank.
class Running {
 public:
  virtual ~Running() = default;
  virtual const RequestPtr& request() const = 0;
  virtual void check() const = 0;
};

template <class T>
class RunningOn : public Running {
 public:
  // In the engine's arenas or not: that of each rank may decide by itself.
  RunningOn(const Operation& o, Engine& engine, bool arenas)
      : o_(o), rank_(engine.rank()), request_(request_of(o.kind, o.name, o.set)) {
    request_->description.op = o.op;
    request_->description.root = o.kind == OpKind::kBroadcast ? o.root : -1;
    tensors_.resize(o.kind == OpKind::kBarrier    ? 0
                    : o.kind == OpKind::kAlltoall ? 1
                                                  : o.counts.size());
    outs_.resize(tensors_.size());
    for (size_t t = 0; t < tensors_.size(); ++t) add(t, arenas ? &engine : nullptr);
  }
  const RequestPtr& request() const override { return request_; }

  void check() const override {
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const std::vector<T> expected = oracle(t);
      const std::vector<T> found = result(t);
      ASSERT_EQ(found, expected) << kind_name(o_.kind) << " '" << o_.name << "', tensor " << t;
    }
  }

 private:
  int me() const { return member(rank_); }
  int member(int rank) const {
    return static_cast<int>(std::find(o_.ranks.begin(), o_.ranks.end(), rank) - o_.ranks.begin());
  }

  void add(size_t t, Engine* engine) {
    auto& values = tensors_[t];
    int64_t rows = -1, count = o_.counts[t];
    if (o_.kind == OpKind::kAllgather) rows = rows_of(o_, t, rank_);
    if (o_.kind == OpKind::kReducescatter) rows = count;
    if (o_.kind == OpKind::kAlltoall) {
      rows = 0;
      for (const int peer : o_.ranks) {
        request_->splits.push_back(rows_to(o_, rank_, peer));
        rows += request_->splits.back();
      }
    }
    if (rows >= 0) count = rows * 2;
    values.resize(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<T>(value(rank_, static_cast<int64_t>(i)));
    if (rows < 0) add_vector(*request_, values);
    if (rows >= 0) add_matrix(t, rows);
    if (engine) move(t, *engine);
  }

  // Two wide, also where this rank has no row of it.
  void add_matrix(size_t t, int64_t rows) {
    const bool any = o_.kind != OpKind::kReducescatter;
    outs_[t].resize(
        static_cast<size_t>(slice_of(rows, static_cast<int>(o_.ranks.size()), me()).count * 2));
    request_->parts.push_back(
        {reinterpret_cast<char*>(tensors_[t].data()), reinterpret_cast<char*>(outs_[t].data())});
    request_->rows.push_back(rows);
    request_->description.add_tensor(dtype_of<T>(), {any ? kAnyExtent : rows, 2});
  }

  // What is exchanged is in an arena instead, and the request keeps it alive.
  void move(size_t t, Engine& engine) {
    Part& part = request_->parts[t];
    const size_t nbytes = tensors_[t].size() * sizeof(T);
    const auto arena = engine.allocate(nbytes);
    if (nbytes > 0) std::memcpy(arena.get(), part.in, nbytes);
    if (part.out == part.in) part.out = arena.get();
    part.in = arena.get();
    arenas_.push_back(arena);
    request_->keepalive = std::make_shared<decltype(arenas_)>(arenas_);
  }

  std::vector<T> result(size_t t) const {
    if (o_.kind == OpKind::kReducescatter) return outs_[t];
    if (o_.kind != OpKind::kAllgather && o_.kind != OpKind::kAlltoall) {
      const T* data = reinterpret_cast<const T*>(request_->parts[t].out);
      return {data, data + tensors_[t].size()};
    }
    const Output& output = request_->handle->outputs.at(t);
    int64_t rows = 0;
    for (const int64_t n : output.rows) rows += n;
    const T* data = reinterpret_cast<const T*>(output.data.get());
    return {data, data + rows * 2};
  }

  T reduced(int64_t i) const {
    T result = static_cast<T>(value(o_.ranks[0], i));
    for (size_t r = 1; r < o_.ranks.size(); ++r) {
      const T x = static_cast<T>(value(o_.ranks[r], i));
      result = o_.op == ReduceOp::kMax ? std::max(result, x) : result + x;
    }
    return o_.op == ReduceOp::kAverage ? result / static_cast<T>(o_.ranks.size()) : result;
  }

  std::vector<T> oracle(size_t t) const {
    std::vector<T> expected;
    const auto append = [&](int rank, int64_t begin, int64_t count) {
      for (int64_t i = begin; i < begin + count; ++i)
        expected.push_back(static_cast<T>(value(rank, i)));
    };
    switch (o_.kind) {
      case OpKind::kAllgather:
        for (const int rank : o_.ranks) append(rank, 0, rows_of(o_, t, rank) * 2);
        break;
      case OpKind::kAlltoall:
        for (const int from : o_.ranks) {
          int64_t begin = 0;
          for (const int to : o_.ranks) {
            if (to == rank_) append(from, begin * 2, rows_to(o_, from, to) * 2);
            begin += rows_to(o_, from, to);
          }
        }
        break;
      case OpKind::kBroadcast:
        append(o_.root, 0, o_.counts[t]);
        break;
      case OpKind::kReducescatter: {
        const Slice mine = slice_of(o_.counts[t], static_cast<int>(o_.ranks.size()), me());
        for (int64_t i = mine.begin * 2; i < (mine.begin + mine.count) * 2; ++i)
          expected.push_back(reduced(i));
        break;
      }
      default:
        for (int64_t i = 0; i < o_.counts[t]; ++i) expected.push_back(reduced(i));
    }
    return expected;
  }

  const Operation o_;
  const int rank_;
  RequestPtr request_;
  std::vector<std::vector<T>> tensors_, outs_;
  std::vector<std::shared_ptr<char>> arenas_;
};

class Script {
 public:
  Script(unsigned seed, int nranks) : random_(seed) {
    sets_.emplace_back(nranks);
    for (int rank = 0; rank < nranks; ++rank) sets_[0][static_cast<size_t>(rank)] = rank;
    for (int i = 0; i < 3 && nranks > 2; ++i) {
      std::vector<int> ranks;
      for (int rank = 0; rank < nranks; ++rank)
        if (below(2)) ranks.push_back(rank);
      if (!ranks.empty() && std::find(sets_.begin(), sets_.end(), ranks) == sets_.end())
        sets_.push_back(ranks);
    }
  }
  const std::vector<std::vector<int>>& sets() const { return sets_; }

  // Operations that are in flight together; names return in later rounds, mostly unchanged.
  std::vector<Operation> round() {
    std::vector<Operation> operations;
    const int n = below(12) + 1;
    for (int i = 0; i < n; ++i) {
      const std::string name = below(3) ? "op " + std::to_string(i) : "";
      const int style = below(5) ? i : below(1000);  // decides everything else about it
      operations.push_back(operation(name, style));
    }
    return operations;
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  static Operation operation_of(std::mt19937& dice, const std::vector<std::vector<int>>& sets) {
    static constexpr OpKind kKinds[] = {
        OpKind::kAllreduce, OpKind::kAllreduce, OpKind::kAllreduce,     OpKind::kAllgather,
        OpKind::kBroadcast, OpKind::kAlltoall,  OpKind::kReducescatter, OpKind::kBarrier};
    static constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kAverage};
    static constexpr int64_t kCounts[] = {0, 1, 2, 5, 100, 3000, 20000};
    Operation o;
    o.kind = kKinds[dice() % std::size(kKinds)];
    o.set = static_cast<int32_t>(dice() % sets.size());
    o.ranks = sets[static_cast<size_t>(o.set)];
    for (unsigned n = dice() % 3 + 1; n > 0; --n)
      o.counts.push_back(kCounts[dice() % std::size(kCounts)]);
    o.op = kOps[dice() % std::size(kOps)];
    o.root = o.ranks[dice() % o.ranks.size()];
    o.floats = dice() % 2;
    return o;
  }
  Operation operation(const std::string& name, int style) const {
    std::mt19937 dice(static_cast<unsigned>(style));
    Operation o = operation_of(dice, sets_);
    o.name = name;
    return o;
  }

  std::mt19937 random_;
  std::vector<std::vector<int>> sets_;
};

std::unique_ptr<Running> running_of(const Operation& o, Engine& engine, bool arenas) {
  if (o.floats) return std::make_unique<RunningOn<float>>(o, engine, arenas);
  return std::make_unique<RunningOn<int32_t>>(o, engine, arenas);
}

// Submits one thread's share of a round and waits in an order of its own.
void submit_and_check(Engine& engine, const std::vector<Operation>& share, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::unique_ptr<Running>> running;
  std::vector<HandlePtr> handles;
  for (const Operation& o : share) {
    running.push_back(running_of(o, engine, random() % 2));
    handles.push_back(engine.submit(running.back()->request(), static_cast<Urgency>(random() % 3)));
  }
  std::vector<size_t> order(handles.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  for (const size_t i : order) {
    finish(engine, handles[i]);
    running[i]->check();
  }
}

void run_round(Engine& engine, int rank, const std::vector<Operation>& operations, unsigned seed) {
  constexpr size_t kThreads = 3;
  std::vector<Operation> named, shares[kThreads];
  for (const Operation& o : operations) {
    if (std::find(o.ranks.begin(), o.ranks.end(), rank) == o.ranks.end()) continue;
    // Unnamed operations match by their order, so one thread submits all of them in it.
    (o.name.empty() ? shares[0] : named).push_back(o);
  }
  std::mt19937 random(seed);
  std::shuffle(named.begin(), named.end(), random);
  for (const Operation& o : named) shares[random() % kThreads].push_back(o);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      try {
        submit_and_check(engine, shares[t], seed + static_cast<unsigned>(t));
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

using RandomSetting = std::tuple<NodeOf, bool>;
class RandomPrograms : public testing::TestWithParam<RandomSetting> {
 protected:
  const NodeOf& node_of() const { return std::get<0>(GetParam()); }
  int n() const { return static_cast<int>(node_of().size()); }
  // With seeds some programs fuse nothing, or little.
  Config config(unsigned seed) const {
    Config config = quiet_config(seed % 2 ? node_of() : NodeOf());
    config.inline_drive = std::get<1>(GetParam());
    config.fusion_nbytes = seed % 3 == 0 ? 0 : seed % 3 == 1 ? 1000 : 16 << 20;
    return config;
  }
};
INSTANTIATE_TEST_SUITE_P(Engine, RandomPrograms,
                         testing::Combine(testing::ValuesIn(layouts()), testing::Bool()),
                         [](const auto& info) {
                           return name_of(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "_Inline" : "_Thread");
                         });

TEST_P(RandomPrograms, AlwaysGiveTheRightResults) {
  constexpr unsigned kPrograms = 12;
  constexpr int kRounds = 10;
  for (unsigned seed = 0; seed < kPrograms; ++seed) {
    LoopbackWorld world(node_of(), config(seed));
    Ranks ranks(n());
    ranks.run([&](int rank) {
      Script program(seed, n());
      for (size_t set = 1; set < program.sets().size(); ++set) {
        const auto& members = program.sets()[set];
        ASSERT_EQ(add_set(world[rank], {members.begin(), members.end()}),
                  static_cast<int32_t>(set));
      }
      for (int round = 0; round < kRounds; ++round) {
        ranks.note(rank, "seed " + std::to_string(seed) + ", round " + std::to_string(round));
        run_round(world[rank], rank, program.round(),
                  seed * 1000 + static_cast<unsigned>(rank * 100 + round));
      }
    });
    if (HasFatalFailure()) return;
  }
}

// One rank dies in the middle of a round. What the others get is right, or an error that names it.
TEST_P(RandomPrograms, EndWhenARankDies) {
  constexpr unsigned kPrograms = 10;
  for (unsigned seed = 0; seed < kPrograms && n() > 1; ++seed) {
    const int dead = static_cast<int>(seed) % n();
    LoopbackWorld world(node_of(), config(seed));
    std::atomic<int> submitted{0};
    std::vector<int> all;
    for (int rank = 0; rank < n(); ++rank) all.push_back(rank);
    world.run([&](int rank) {
      Script program(seed, 2);  // whose only process set is that of all
      std::mt19937 random(seed);
      std::vector<std::unique_ptr<Running>> running;
      std::vector<HandlePtr> handles;
      for (Operation o : program.round()) {
        o.ranks = all;
        running.push_back(running_of(o, world[rank], random() % 2));
        handles.push_back(world[rank].submit(running.back()->request(), Urgency::kNow));
      }
      ++submitted;
      while (submitted < n()) std::this_thread::yield();
      if (rank == dead) {
        for (unsigned n = random() % 300; n > 0; --n) std::this_thread::yield();
        return world.die(rank);
      }
      for (size_t i = 0; i < handles.size(); ++i) {
        const std::string text = error_of<PeerError>([&] { finish(world[rank], handles[i]); });
        if (text.empty()) {
          running[i]->check();
        } else {
          EXPECT_CONTAINS(text, "rank " + std::to_string(dead));
        }
      }
    });
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace bagua
