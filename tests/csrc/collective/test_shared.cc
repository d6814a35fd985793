// What the memory of a node adds to the table's tests: data in arenas, elsewhere, in fragments, on
// all ranks or only some.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "collective/jobs.h"
#include "common/scaled.h"

namespace bagua {
namespace {

using Crews = std::vector<std::unique_ptr<Crew>>;  // by rank

// Ranks 0 to n-1 allreduce `count` numbers that begin `shift` elements into their memory.
void check(int n, DType dtype, int64_t count, int64_t shift, Where where, int repeats = 1,
           const Crews* crews = nullptr) {
  with_jobs(n, dtype, [&](int rank, Job& job) {
    if (crews) job.crew = (*crews)[static_cast<size_t>(rank)].get();
    const size_t nbytes = static_cast<size_t>(count + shift + 16) * job.item();
    const auto owned = allocate(job, where, nbytes);
    char* memory = owned.get();
    for (int again = 0; again < repeats; ++again) {
      std::memset(memory, 'g', nbytes);
      job.data = memory + static_cast<size_t>(shift) * job.item();
      job.count = count;
      for (int64_t i = 0; i < count; ++i) put(dtype, job.data, i, small_number(rank, i));
      shared(job);
      for (int64_t i = 0; i < count; ++i)
        ASSERT_EACH_EQ(get(dtype, job.data, i), oracle(ReduceOp::kSum, n, i))
            << "at " << i << " of " << count << " on rank " << rank;
      for (const char* c = job.data + static_cast<size_t>(count) * job.item(); c < memory + nbytes;
           ++c)
        ASSERT_EQ(*c, 'g') << "behind the end";
      for (const char* c = memory; c < job.data; ++c) ASSERT_EQ(*c, 'g') << "before the beginning";
    }
  });
}

class Shared : public EveryCase {};
INSTANTIATE_TEST_SUITE_P(Collectives, Shared,
                         testing::ValuesIn(cases({DType::kF32, DType::kF64, DType::kF16,
                                                  DType::kBF16, DType::kI32, DType::kI64})),
                         case_name);

TEST_P(Shared, ReducesInArenasAndBesideThem) {
  for (const Where where : kEverywhere)
    for (const int64_t count : {0, 1, 7, 20000})
      for (const int64_t shift : {0, 3}) {
        check(n(), dtype(), count, shift, where);
        if (HasFatalFailure()) return;
      }
}

// Fragments of many lengths, from one memory into another.
void check_fragments(int n, DType dtype, int64_t count, bool all, const Crews* crews = nullptr) {
  with_jobs(n, dtype, [&](int rank, Job& job) {
    if (crews) job.crew = (*crews)[static_cast<size_t>(rank)].get();
    const auto item = static_cast<int64_t>(job.item());
    std::vector<char> in(static_cast<size_t>(count * item)), out(in.size());
    for (int64_t i = 0; i < count; ++i) put(dtype, in.data(), i, small_number(rank, i));
    job.count = count;
    if (count == 0 || (!all && rank % 2)) job.data = in.data();
    for (int64_t at = 0, length = 1; !job.data && at < count;
         at += length, length = length * 3 % 10007)
      job.fragments.push_back(
          {at, std::min(length, count - at), in.data() + at * item, out.data() + at * item});
    shared(job);
    const char* results = job.data ? in.data() : out.data();
    for (int64_t i = 0; i < count; ++i)
      ASSERT_EQ(get(dtype, results, i), oracle(ReduceOp::kSum, n, i)) << "at " << i;
  });
}

TEST_P(Shared, ReducesFragments) {
  for (const bool all : {true, false})
    for (const int64_t count : {1, 7, 500, 20000}) {
      check_fragments(n(), dtype(), count, all);
      if (HasFatalFailure()) return;
    }
}

TEST(Shared, FragmentsInSeveralRounds) {
  for (const int n : {2, 3}) check_fragments(n, DType::kF32, 600001, true);
}

// Values in arenas, whose results belong elsewhere: on all ranks, on all but one, and beside one
// whose values are nowhere that others see. Two after the other, of unlike values.
enum class Last { kAlike, kInPlace, kUnseen };
constexpr Last kEveryLast[] = {Last::kAlike, Last::kInPlace, Last::kUnseen};

void check_out_of_arenas(int n, DType dtype, int64_t count, Last kind) {
  with_jobs(n, dtype, [&](int rank, Job& job) {
    const bool last = rank == n - 1;
    const auto nbytes = static_cast<size_t>(count) * job.item();
    const bool unseen = last && kind == Last::kUnseen;
    const auto in = allocate(job, unseen ? Where::kElsewhere : Where::kArenas, nbytes);
    std::vector<char> out(nbytes);
    job.count = count;
    if (last && kind == Last::kInPlace) job.data = in.get();
    for (int shift = 0; shift < 2; ++shift) {
      job.fragments.clear();
      if (!job.data) job.fragments.push_back({0, count, in.get(), out.data()});
      const auto value = [&](int64_t i) { return small_number(rank, i + shift); };
      for (int64_t i = 0; i < count; ++i) put(dtype, in.get(), i, value(i));
      shared(job);
      const char* results = job.data ? in.get() : out.data();
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(get(dtype, results, i), oracle(ReduceOp::kSum, n, i + shift)) << i;
        if (job.data) continue;
        ASSERT_EQ(get(dtype, in.get(), i), value(i)) << i;
      }
    }
    if (kind != Last::kAlike || count < scaled(1'000'000)) return;
    const auto touched = static_cast<double>(job.group.work().touched_nbytes);
    EXPECT_NEAR(touched / static_cast<double>(nbytes), 2 * 3, 0.01);
  });
}

TEST_P(Shared, OutOfArenas) {
  for (const Last kind : kEveryLast)
    for (const int64_t count : {7, 20000}) check_out_of_arenas(n(), dtype(), count, kind);
}

TEST(Shared, OutOfArenasInSeveralRounds) {
  for (const int n : {2, 3})
    for (const Last kind : kEveryLast)
      check_out_of_arenas(n, DType::kF32, scaled(1'000'000) + 1, kind);
}

TEST(Shared, InSeveralRounds) {
  for (const int n : {2, 3, 7}) check(n, DType::kF32, 300001, 3, Where::kElsewhere);
}

// What is in one place each is shared among threads if every rank has enough of them that are free.
TEST(Shared, WithHelpers) {
  constexpr int kRanks = 3;
  constexpr int64_t kCount = scaled(4 << 20) + 5;
  std::atomic<int> busy{-1};
  Crews crews;
  for (int rank = 0; rank < kRanks; ++rank)
    crews.push_back(std::make_unique<Crew>(rank + kRanks - 1, [&, rank] { return rank != busy; }));
  const auto joined = [&] {
    std::vector<int64_t> counts;
    for (const auto& crew : crews) counts.push_back(crew->joined());
    return counts;
  };
  busy = 1;
  check(kRanks, DType::kF32, kCount, 1, Where::kElsewhere, 2, &crews);
  busy = -1;
  check_fragments(kRanks, DType::kF32, 600001, true, &crews);
  EXPECT_EQ(joined(), std::vector<int64_t>(kRanks));
  for (const Where where : kEverywhere) {
    const std::vector<int64_t> before = joined();
    const auto all_joined = [&] {
      const std::vector<int64_t> now = joined();
      for (size_t i = 0; i < now.size(); ++i)
        if (now[i] == before[i]) return false;
      return true;
    };
    // A helper that wakes up late finds nothing to do.
    do check(kRanks, DType::kF32, kCount, 1, where, 2, &crews);
    while (!HasFatalFailure() && !all_joined());
  }
}

// The first rank tries both ways, and everybody follows.
TEST(Shared, ThroughTheCachesAndPastThem) {
  for (const DType dtype : {DType::kF32, DType::kF16})
    with_jobs(3, dtype, [&](int rank, Job& job) {
      job.count = scaled(1 << 20) + 5;
      const auto memory = job.group.node()->arenas()->allocate(job.nbytes());
      job.data = memory.get();
      for (const int way : {0, 1}) {
        for (int64_t i = 0; i < job.count; ++i) put(dtype, job.data, i, small_number(rank, i));
        shared(job);
        for (int64_t i = 0; i < job.count; ++i)
          ASSERT_EACH_EQ(get(dtype, job.data, i), oracle(ReduceOp::kSum, 3, i)) << "at " << i;
        const auto into = Scratch::Into::kArenas;
        EXPECT_EQ(job.scratch.pace(into, OpKind::kAllreduce, job.nbytes(), 1).last(), way);
      }
    });
  check(2, DType::kF32, scaled(5 << 20) + 3, 1, Where::kArenas, 4);
  check(3, DType::kF32, scaled(5 << 20) + 3, 0, Where::kMixed, 2);
}

TEST(Shared, OneAfterTheOther) {
  for (const int64_t count : {5, 20000})
    for (const Where where : kEverywhere) check(4, DType::kF32, count, 0, where, 50);
}

// Numbers of very different size, whose sum depends on the order and on every rounding.
float awkward(int rank, int64_t i) {
  const auto fraction = 1.0f + static_cast<float>((i * 7 + rank * 3) % 61) / 61;
  const auto exponent = static_cast<int>((i * 5 + rank * 11) % 21) - 10;
  return std::ldexp((i + rank) % 3 ? fraction : -fraction, exponent);
}

float combined(ReduceOp op, float a, float b) {
  return op == ReduceOp::kMin       ? std::min(a, b)
         : op == ReduceOp::kMax     ? std::max(a, b)
         : op == ReduceOp::kProduct ? a * b
                                    : a + b;
}

// In rank order, in float32, rounded once; wherever the data is and however it is cut.
TEST(Shared, ReducesInTheOrderOfTheRanks) {
  const auto in_float16 = [](float x) { return to_float(to_f16(x)); };
  for (const int64_t count : std::vector<int64_t>{5'000, scaled(700'000) + 1})
    for (const DType dtype : {DType::kF32, DType::kF16})
      for (const ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct})
        for (const Where where : kEverywhere)
          with_jobs(3, dtype, [&](int rank, Job& job) {
            const auto rounded = [&](float x) { return dtype == DType::kF16 ? in_float16(x) : x; };
            job.op = op;
            if (op == ReduceOp::kAverage) job.finish.divisor = 3;
            job.count = count;
            const auto data = allocate(job, where, job.nbytes());
            job.data = data.get();
            for (int64_t i = 0; i < count; ++i) put(dtype, job.data, i, awkward(rank, i));
            shared(job);
            for (int64_t i = 0; i < count; ++i) {
              float x = rounded(awkward(0, i));
              for (int r = 1; r < 3; ++r) x = combined(op, x, rounded(awkward(r, i)));
              if (op == ReduceOp::kAverage) x /= 3;
              ASSERT_EQ(get(dtype, job.data, i), rounded(x))
                  << "at " << i << ", operation " << static_cast<int>(op);
            }
          });
}

// Every byte of everyone is read by one rank and written by it.
TEST(Shared, TouchesMemoryInArenasAsOftenAsACopy) {
  for (const int n : {2, 4})
    with_jobs(n, DType::kF32, [&](int, Job& job) {
      job.count = 1 << 16;
      const auto memory = job.group.node()->arenas()->allocate(job.nbytes());
      job.data = memory.get();
      shared(job);
      EXPECT_EQ(job.group.work().touched_nbytes, 2 * static_cast<int64_t>(job.nbytes()));
      EXPECT_EQ(job.group.work().sent_nbytes, 0);
    });
}

}  // namespace
}  // namespace bagua
