// Tensors on devices, by functions that stand for NCCL's.
#include "engine/nccl_exchange.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "common/clock.h"
#include "engine/bucket.h"
#include "engine/program.h"
#include "engine/split_factor.h"
#include "kernel/half.h"

namespace bagua {
namespace {

std::shared_ptr<char> cleared(PretendDevice& device, size_t nbytes) {
  auto memory = device.allocate(nbytes);
  device.clear(memory.get(), nbytes, nullptr);
  return memory;
}

TEST(NcclExchange, ReducesWhatADeviceHasYetToCompute) {
  for (const int n : {1, 2, 3}) {
    const int before = FakeNccl::calls();
    GpuWorld world(n);
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      std::vector<float> values(100'000);
      for (int step = 0; step < 4; ++step) {
        gpu.compute(values, static_cast<float>(rank + step));
        RequestPtr request = allreduce_of("x", values);
        request->description.prescale = step == 2 ? 0.5 : 1;
        request->name += std::to_string(step == 2);
        const float sum = static_cast<float>(n * (n - 1)) / 2 + static_cast<float>(n * step);
        EXPECT_EQ(gpu.exchange(engine, request, values),
                  all(values.size(), step == 2 ? sum / 2 : sum));
      }
      for (const double postscale : {4, 1}) {
        gpu.compute(values, static_cast<float>(rank + 1));
        RequestPtr mean = allreduce_of("mean", values, ReduceOp::kAverage);
        mean->name += std::to_string(postscale);
        mean->description.postscale = postscale;
        EXPECT_EQ(gpu.exchange(engine, mean, values),
                  all(values.size(), static_cast<float>(postscale * (n + 1) / 2)));
      }
      gpu.compute(values, static_cast<float>(rank));
      RequestPtr most = allreduce_of("max", values, ReduceOp::kMax);
      EXPECT_EQ(gpu.exchange(engine, most, values), all(values.size(), static_cast<float>(n - 1)));
      RequestPtr broadcast = request_of(OpKind::kBroadcast, "b");
      broadcast->description.root = n - 1;
      add_vector(*broadcast, values);
      gpu.compute(values, static_cast<float>(rank));
      EXPECT_EQ(gpu.exchange(engine, broadcast, values),
                all(values.size(), static_cast<float>(n - 1)));
    });
    const int calls = n == 1 ? 2 : 8;  // alone, those that scale
    EXPECT_EQ(FakeNccl::calls() - before, calls * n) << "all of them went that way";
  }
}

// Whoever waits for them finds them, by whichever stream, and they stay until they are there.
TEST(NcclExchange, OfARankAloneAreLeftWhereTheyAre) {
  GpuWorld world(1);
  const int before = FakeNccl::calls();
  world.run([&](int, Gpu& gpu, Engine& engine) {
    std::vector<float> values(1000);
    const Program other(gpu.own);
    for (const OpKind kind : {OpKind::kAllreduce, OpKind::kBroadcast}) {
      std::atomic<bool> go{false};
      gpu.hold(go);
      gpu.compute(values, 3);
      RequestPtr request = request_of(kind, "x");
      request->description.root = kind == OpKind::kBroadcast ? 0 : -1;
      request->description.op = ReduceOp::kAverage;
      add_vector(*request, values);
      const auto owner = std::make_shared<int>();
      request->keepalive = owner;
      HandlePtr handle = gpu.submit(engine, std::move(request));
      finish(engine, handle);
      EXPECT_FALSE(handle->reached());
      EXPECT_FALSE(handle->may_fail());
      handle->make_follow(other.stream);
      std::vector<float> seen;
      gpu.device.run(other.stream, [&] { seen = values; });
      handle.reset();
      EXPECT_EQ(owner.use_count(), 2);
      go = true;
      gpu.device.drain(other.stream);
      EXPECT_EQ(seen, all(values.size(), 3));
      gpu.exchange(engine, allreduce_of("next", values), values);  // lets go of it
      EXPECT_EQ(owner.use_count(), 1);
    }
  });
  EXPECT_EQ(FakeNccl::calls(), before);
}

// Of a set of one, too; but not where its result belongs elsewhere.
TEST(NcclExchange, OfARankAloneMayBelongElsewhere) {
  GpuWorld world(2);
  const int before = FakeNccl::calls();
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    const int32_t sets[] = {add_set(engine, {0}), add_set(engine, {1})};
    std::vector<float> values(1000), result(1000);
    for (const bool elsewhere : {false, true}) {
      gpu.compute(values, static_cast<float>(rank));
      RequestPtr request = allreduce_of("x" + std::to_string(elsewhere), values);
      request->set = sets[rank];
      std::vector<float>& place = elsewhere ? result : values;
      request->parts[0].out = reinterpret_cast<char*>(place.data());
      EXPECT_EQ(gpu.exchange(engine, request, place), all(place.size(), static_cast<float>(rank)));
    }
  });
  EXPECT_EQ(FakeNccl::calls() - before, 2) << "one by each rank";
}

TEST(NcclExchange, TheEngineDoesNotWaitForTheDevice) {
  GpuWorld world(2);
  world.run([&](int, Gpu& gpu, Engine& engine) {
    std::vector<float> values(1000);
    gpu.compute(values, 1);
    gpu.exchange(engine, allreduce_of("x", values), values);
    std::atomic<bool> go{false};
    gpu.hold(go);
    const auto handle = gpu.submit(engine, allreduce_of("x", values), Urgency::kWaited);
    finish(engine, handle);  // though the stream has not come so far
    EXPECT_FALSE(handle->reached());
    go = true;
    EXPECT_EQ(gpu.read(engine, handle, values), all(values.size(), 4));
    EXPECT_TRUE(handle->reached());
  });
}

TEST(NcclExchange, TensorsThatShareMemory) {
  GpuWorld world(2);
  world.run([&](int, Gpu& gpu, Engine& engine) {
    std::vector<float> values(5000);
    gpu.compute(values, 1);
    RequestPtr request = allreduce_of("x", values);
    add_vector(*request, values);
    EXPECT_EQ(gpu.exchange(engine, request, values), all(values.size(), 2));
  });
}

// What takes a kernel of ours goes by the host then, on all ranks.
TEST(NcclExchange, ARankWhoseGpuIsTooOldForKernels) {
  GpuWorld world(3);
  world.gpus[1]->own.be_old();
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float> values(5000);
    const auto sum = [&](const std::string& codec) {
      RequestPtr request = allreduce_of("sum" + codec, values);
      request->description.codec = codec;
      gpu.compute(values, static_cast<float>(rank));
      return gpu.exchange(engine, request, values);
    };
    EXPECT_EQ(sum(""), all(values.size(), 3));
    sum_of_ones(engine, "all are here");
    const int before = FakeNccl::calls();
    EXPECT_EQ(sum("minmax_u8"), all(values.size(), 3));
    sum_of_ones(engine, "and here");
    EXPECT_EQ(FakeNccl::calls(), before);
    sum_of_ones(engine, "before any goes on");
    EXPECT_EQ(sum(""), all(values.size(), 3));
    EXPECT_GT(FakeNccl::calls(), before);
  });
}

// What ranks give differs in size, or does not.
TEST(NcclExchange, RanksThatHaveOneGpu) {
  for (const bool shares : {false, true}) {
    Config config = quiet_config();
    config.nccl_shares_gpu = shares;
    GpuWorld world(3, /*has_nccl=*/true, config);
    const int before = FakeNccl::calls();
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      if (rank != 1) gpu.device.be("that of 0 and 2 ");
      std::vector<float>& values = gpu.lasting(1000);
      gpu.compute(values, 1);
      EXPECT_EQ(gpu.exchange(engine, allreduce_of("x", values), values), all(values.size(), 3));
    });
    EXPECT_EQ(FakeNccl::calls() > before, shares);
  }
}

// The first two may, but not with the third.
TEST(NcclExchange, OneOfThoseWhoHaveOneGpuWasNotTold) {
  std::vector<Config> configs(3, quiet_config());
  configs[0].nccl_shares_gpu = configs[1].nccl_shares_gpu = true;
  const int before = FakeNccl::calls();
  std::vector<std::unique_ptr<Gpu>> gpus;
  LoopbackWorld world(configs);
  for (size_t i = 0; i < configs.size(); ++i) gpus.push_back(std::make_unique<Gpu>());
  world.run([&](int rank) {
    Gpu& gpu = *gpus[static_cast<size_t>(rank)];
    gpu.device.be("that of all ranks");
    std::vector<float>& values = gpu.lasting(1000);
    gpu.compute(values, 1);
    EXPECT_EQ(gpu.exchange(world[rank], allreduce_of("x", values), values), all(values.size(), 3));
  });
  EXPECT_EQ(FakeNccl::calls(), before);
}

// Also where none of them has NCCL. What is in the host's memory goes on.
TEST(NcclExchange, RanksThatHaveOneGpuByMistakeAreTold) {
  for (const bool has_nccl : {true, false}) {
    Config config = quiet_config();
    config.allow_shared_gpu = false;
    GpuWorld world(3, has_nccl, config);
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      if (rank != 1) gpu.device.be("that of 0 and 2 ");
      std::vector<float>& values = gpu.lasting(1000);
      for (int i = 0; i < 2; ++i) {
        const HandlePtr handle = gpu.submit(engine, allreduce_of("x", values));
        EXPECT_CONTAINS(error_of<UsageError>([&] { finish(engine, handle); }),
                        "ranks 0 and 2 compute on one GPU");
      }
      sum_of_ones(engine, "in the host's memory");
    });
  }
}

TEST(NcclExchange, GathersAndScatters) {
  const int n = 3;
  for (const bool alike : {true, false}) {
    const int before = FakeNccl::calls();
    GpuWorld world(n);
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      const auto mine = static_cast<float>(rank);
      // Of the result, what the device will have put there.
      const auto seen = [&](const HandlePtr& handle) {
        finish(engine, handle);
        const Output& output = handle->outputs.at(0);
        EXPECT_TRUE(output.on_device);
        int64_t rows = 0;
        for (const int64_t k : output.rows) rows += k;
        gpu.take(handle);
        std::vector<float> values(static_cast<size_t>(rows) * 10);
        gpu.device.run(gpu.stream, [&] {
          std::memcpy(values.data(), output.data.get(), values.size() * sizeof(float));
        });
        gpu.device.drain(gpu.stream);
        return values;
      };

      const int64_t my_rows = alike ? 2 : rank;
      std::vector<float> given(static_cast<size_t>(my_rows) * 10), all_given;
      gpu.compute(given, mine);
      for (int r = 0; r < n; ++r)
        all_given.insert(all_given.end(), alike ? 20 : static_cast<size_t>(r) * 10,
                         static_cast<float>(r));
      RequestPtr allgather = request_of(OpKind::kAllgather, "gather");
      allgather->description.add_tensor(DType::kF32, {kAnyExtent, 10});
      allgather->parts.push_back({reinterpret_cast<const char*>(given.data()), nullptr});
      allgather->rows.push_back(my_rows);
      EXPECT_EQ(seen(gpu.submit(engine, allgather)), all_given);

      // Rank r sends r + 1 rows to everyone, or one.
      std::vector<float> sent(static_cast<size_t>(n * (alike ? 1 : rank + 1)) * 10), all_sent;
      gpu.compute(sent, mine);
      for (int r = 0; r < n; ++r)
        all_sent.insert(all_sent.end(), alike ? 10 : static_cast<size_t>(r + 1) * 10,
                        static_cast<float>(r));
      RequestPtr alltoall = request_of(OpKind::kAlltoall, "alltoall");
      alltoall->description.add_tensor(DType::kF32, {kAnyExtent, 10});
      alltoall->parts.push_back({reinterpret_cast<const char*>(sent.data()), nullptr});
      alltoall->rows.push_back(n * (alike ? 1 : rank + 1));
      alltoall->splits.assign(n, alike ? 1 : rank + 1);
      EXPECT_EQ(seen(gpu.submit(engine, alltoall)), all_sent);

      const size_t rows = alike ? 6 : 7;
      const size_t share = alike || rank > 0 ? 2 : 3;
      std::vector<float> reduced(rows * 10), slice(share * 10, -1);
      gpu.compute(reduced, mine);
      RequestPtr reducescatter = request_of(OpKind::kReducescatter, "scatter");
      reducescatter->description.prescale = 2;
      reducescatter->description.add_tensor(DType::kF32, {static_cast<int64_t>(rows), 10});
      reducescatter->parts.push_back(
          {reinterpret_cast<const char*>(reduced.data()), reinterpret_cast<char*>(slice.data())});
      EXPECT_EQ(gpu.exchange(engine, reducescatter, slice), all(slice.size(), 2 * (0 + 1 + 2)));
    });
    EXPECT_GE(FakeNccl::calls() - before, 3 * n);
  }
}

// By either road the values, and what is kept, are those of a bucket in the host's memory.
TEST(NcclExchange, CodesLikeACpu) {
  const int n = 3;
  for (const bool has_nccl : {true, false})
    for (const std::string codec : {"fp16", "minmax_u8", "minmax_u4", "fp8_e4m3", "sign1", "topk",
                                    "topk:7:minmax_u8", "topk:4000" /* which goes densely */})
      for (const int64_t count : {3, 20'011}) {
        const int before = FakeNccl::calls();
        GpuWorld world(n, has_nccl);
        world.run([&](int rank, Gpu& gpu, Engine& engine) {
          Description how;
          how.op = ReduceOp::kAverage;
          how.codec = codec;
          const auto allocate = [&](size_t nbytes) { return cleared(gpu.device, nbytes); };
          Bucket there(world.ranks.engines[static_cast<size_t>(rank)], "there", DType::kF32,
                       {count - 1, 1}, how, 0, 0, 2, &gpu.device, allocate);
          Bucket here(world.ranks.engines[static_cast<size_t>(rank)], "here", DType::kF32,
                      {count - 1, 1}, how, 0, 0, 2);
          const auto values_of = [&](float* data) {
            return std::vector<float>(data, data + count);
          };
          auto* on_device = reinterpret_cast<float*>(there.data());
          auto* on_host = reinterpret_cast<float*>(here.data());
          for (int step = 0; step < 3; ++step) {
            const auto value = [&](int64_t i) {
              return std::sin(static_cast<float>(i * (rank + 2) + step)) * static_cast<float>(i);
            };
            for (int64_t i = 0; i < count; ++i) {
              on_host[i] = value(i);
              on_device[i] = -1e30f;
            }
            gpu.device.run(gpu.stream, [&] {
              for (int64_t i = 0; i < count; ++i) on_device[i] = value(i);
            });
            finish(engine, here.launch(Urgency::kNow));
            const auto handle =
                there.launch(Urgency::kNow, {}, nullptr, {gpu.device.mark(gpu.stream)});
            finish(engine, handle);
            gpu.take(handle);
            gpu.device.drain(gpu.stream);
            EXPECT_EQ(values_of(on_device), values_of(on_host)) << codec << " step " << step;
            // Of single values each rank adds up others there; nothing is lost of a sparse sum.
            const bool one = codec == "fp16" || codec.rfind("topk", 0) == 0;
            for (size_t i = 0; i < (one ? 1 : 2); ++i)
              EXPECT_EQ(values_of(there.kept()[i].get()), values_of(here.kept()[i].get()))
                  << codec << " step " << step << " kept " << i;
          }
        });
        EXPECT_EQ(FakeNccl::calls() > before, has_nccl);
      }
}

// Where one of them cannot, none does.
TEST(NcclExchange, GoesByTheHostWhereItMust) {
  for (const bool one_device : {true, false}) {
    const int before = FakeNccl::calls();
    std::vector<std::unique_ptr<Gpu>> gpus;
    LoopbackWorld world(2);
    gpus.push_back(std::make_unique<Gpu>());
    if (!one_device) gpus.push_back(std::make_unique<Gpu>(/*has_nccl=*/false));
    world.run([&](int rank) {
      Gpu& gpu = *gpus[one_device ? 0 : static_cast<size_t>(rank)];
      std::vector<float> values(5000, 1);
      EXPECT_EQ(gpu.exchange(world[rank], allreduce_of("x", values), values),
                all(values.size(), 2));
    });
    EXPECT_EQ(FakeNccl::calls(), before);
  }
}

// GPUs without NCCL are slow, and nobody would see why.
TEST(NcclExchange, OneRankWarnsWhereItIsMissing) {
  for (const bool wanted : {true, false}) {
    testing::internal::CaptureStderr();
    {
      Config config = quiet_config();
      config.log_level = "warning";
      config.nccl = wanted;
      GpuWorld world(2, /*has_nccl=*/false, config);
      world.run([&](int, Gpu& gpu, Engine& engine) {
        for (int i = 0; i < 2; ++i) {
          std::vector<float>& values = gpu.lasting(10);
          gpu.compute(values, 1);
          EXPECT_EQ(gpu.exchange(engine, allreduce_of("x", values), values)[0], 2);
        }
      });
    }
    const std::string text = testing::internal::GetCapturedStderr();
    const std::string why = "NCCL is not used: not all ranks have it";
    const size_t first = text.find(why);
    EXPECT_EQ(first != std::string::npos, wanted) << text;
    const size_t second = wanted ? text.find(why, first + 1) : first;
    EXPECT_EQ(second, std::string::npos) << text;
  }
}

TEST(NcclExchange, RanksThatAreInDifferentPlacesAreTold) {
  Gpu gpu;
  LoopbackWorld world(2);
  world.run([&](int rank) {
    std::vector<float> values(10);
    RequestPtr request = allreduce_of("x", values);
    const std::string text = error_of<UsageError>(
        [&] { call(world[rank], rank == 0 ? gpu.on_device(request) : request); });
    EXPECT_CONTAINS(text, "place");
    EXPECT_CONTAINS(text, "a GPU");
  });
}

TEST(NcclExchange, ARankThatHasJoinedGivesZeros) {
  for (const bool has_nccl : {true, false}) {
    GpuWorld world(3, has_nccl);
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      std::vector<float> values(1000);
      for (int step = 0; step <= rank; ++step) {
        gpu.compute(values, 1);
        EXPECT_EQ(gpu.exchange(engine, allreduce_of("x", values), values),
                  all(values.size(), static_cast<float>(3 - step)));
      }
      EXPECT_EQ(join(engine), 2);
    });
  }
}

// What is agreed together does not travel together unless it is in one place.
TEST(NcclExchange, BesideTensorsOfTheHost) {
  GpuWorld world(2);
  world.run([&](int, Gpu& gpu, Engine& engine) {
    std::vector<float> there(100), more(100), here(100, 1);
    std::vector<int32_t> numbers(100, 1);
    gpu.compute(there, 1);
    gpu.compute(more, 2);
    const std::vector<HandlePtr> handles = {
        gpu.submit(engine, allreduce_of("there", there), Urgency::kSoon),
        engine.submit(allreduce_of("here", here), Urgency::kSoon),
        gpu.submit(engine, allreduce_of("more", more), Urgency::kSoon),
        engine.submit(allreduce_of("numbers", numbers), Urgency::kSoon)};
    EXPECT_EQ(gpu.read(engine, handles[0], there), all(100, 2));
    EXPECT_EQ(gpu.read(engine, handles[2], more), all(100, 4));
    finish(engine, handles[1]);
    finish(engine, handles[3]);
    EXPECT_EQ(here, all(100, 2));
    EXPECT_EQ(numbers, std::vector<int32_t>(100, 2));
  });
}

TEST(NcclExchange, OfSomeRanksAndOfOne) {
  const int before = FakeNccl::finalized();
  {
    GpuWorld world(3);
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      std::vector<float> values(1000);
      const int32_t some = add_set(engine, {0, 2});
      const int32_t one = add_set(engine, {1});
      for (const int32_t set : {some, one}) {
        if ((set == some) == (rank == 1)) continue;
        gpu.compute(values, 1);
        RequestPtr request = allreduce_of("x", values, ReduceOp::kSum, set);
        request->description.prescale = 3;
        EXPECT_EQ(gpu.exchange(engine, request, values), all(1000, set == some ? 6 : 3));
      }
      remove_set(engine, some);
    });
  }
  EXPECT_EQ(FakeNccl::finalized() - before, 3) << "all communicators have come to their end";
}

// What a factor is made of is what it is, and the first part is a number of the type.
TEST(SplitFactor, HasTwoParts) {
  for (const double factor : {1.0, 0.25, -0.5, 1.0 / 3, -1.0 / 12, 7.0, 1e-9, 1e9, 0x1p-20, 0.0})
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      const SplitFactor two = split_factor(dtype, factor, 2);
      EXPECT_EQ(two.before * two.after, factor);
      const auto before = static_cast<float>(two.before);
      EXPECT_EQ(dtype == DType::kF16 ? to_float(to_f16(before)) : to_float(to_bf16(before)),
                before);
      EXPECT_GE(two.after, 0);
    }
  for (const int n : {1, 2, 4, 64})
    EXPECT_EQ(split_factor(DType::kF16, 1.0 / n, n).after, 1) << "one operation, no kernel";
  for (const int n : {3, 6, 12, 1000}) {
    EXPECT_LE(n * split_factor(DType::kF16, 1.0 / n, n).before, 1) << "sums do not overflow";
    EXPECT_GT(2 * n * split_factor(DType::kF16, 1.0 / n, n).before, 1);
    EXPECT_EQ(split_factor(DType::kF32, 1.0 / n, n).after, 1) << "a number of the type";
  }
  for (const DType dtype : {DType::kF16, DType::kF32, DType::kF64})
    EXPECT_EQ(split_factor(dtype, 0.7, 1).before, 1) << "a single rank's NCCL would lose values";
}

// Two tensors of so many values, of rank r in step s: value(r, s, i), averaged; what all ranks got.
template <class T, class To, class Value>
std::vector<std::vector<float>> averages(int n, DType dtype, int64_t count, double postscale, To to,
                                         Value value) {
  std::vector<std::vector<float>> results(static_cast<size_t>(n));
  GpuWorld world(n);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<T> values(static_cast<size_t>(count) + 1), apart(values.size());
    for (int step = 0; step < 3; ++step) {
      gpu.device.run(gpu.stream, [&, step] {
        for (size_t i = 0; i < values.size(); ++i) values[i] = apart[i] = to(value(rank, step, i));
      });
      RequestPtr request = request_of(OpKind::kAllreduce, "short");
      request->description.op = ReduceOp::kAverage;
      request->description.postscale = postscale;
      for (auto* memory : {values.data() + 1, apart.data()}) {  // one is out of line
        request->description.add_tensor(dtype, {count});
        request->parts.push_back(
            {reinterpret_cast<char*>(memory), reinterpret_cast<char*>(memory)});
      }
      const auto handle = gpu.submit(engine, request);
      finish(engine, handle);
      gpu.take(handle);
      gpu.device.drain(gpu.stream);
      auto& mine = results[static_cast<size_t>(rank)];
      for (int64_t i = 0; i < count; ++i)
        mine.push_back(to_float(values[static_cast<size_t>(i) + 1]));
      for (int64_t i = 0; i < count; ++i) mine.push_back(to_float(apart[static_cast<size_t>(i)]));
    }
  });
  return results;
}

// Though such a type has no number for a third.
TEST(NcclExchange, AveragesShortFloats) {
  for (const int n : {1, 2, 3, 6})
    for (const bool half : {true, false})
      for (const double postscale : {1.0, 0.7}) {
        const int64_t count = 1001;
        const int before = FakeNccl::calls();
        const auto value = [half](int rank, int step, size_t i) {
          if (i == 0) return half ? 60000.0f : 3e38f;  // the sum has no number, the average has
          if (i % 4 == 1 && rank > 0) return 0.0f;     // sums that nothing is lost by
          const size_t x = i * 7 + static_cast<size_t>(rank * 31 + step * 3);
          return std::sin(static_cast<float>(x)) * 10;
        };
        const auto rounded = [half](double x) {
          const auto y = static_cast<float>(x);
          return half ? to_float(to_f16(y)) : to_float(to_bf16(y));
        };
        const auto results =
            half ? averages<F16>(n, DType::kF16, count, postscale, to_f16, value)
                 : averages<BF16>(n, DType::kBF16, count, postscale, to_bf16, value);
        const int calls = n == 1 && postscale == 1 ? 0 : 2 * 3 * n;
        EXPECT_EQ(FakeNccl::calls() - before, calls) << "all of them went that way";
        const double ulp = half ? 0x1p-10 : 0x1p-7;
        size_t at = 0;
        for (int step = 0; step < 3; ++step)
          for (const size_t shift : {1, 0})
            for (size_t i = shift; i < count + shift; ++i, ++at) {
              double mean = 0, size = 0;
              for (int r = 0; r < n; ++r) {
                mean += rounded(value(r, step, i)) * postscale / n;
                size += std::abs(value(r, step, i) * postscale / n);
              }
              if (i % 4 == 1) {
                ASSERT_EQ(results[0][at], rounded(mean)) << n << " ranks, value " << i;
              }
              ASSERT_NEAR(results[0][at], mean, 2 * ulp * size) << n << " ranks, value " << i;
            }
        for (const auto& one : results) EXPECT_EQ(one, results[0]);
      }
}

TEST(NcclExchange, AveragesSlicesOfShortFloats) {
  const int n = 3;
  for (const int64_t rows : {6, 7}) {
    GpuWorld world(n);
    world.run([&](int rank, Gpu& gpu, Engine& engine) {
      const int64_t share = rows / n + (rank < rows % n);
      std::vector<BF16> values(static_cast<size_t>(rows)), slice(static_cast<size_t>(share));
      gpu.device.run(gpu.stream, [&] {
        for (BF16& x : values) x = to_bf16(static_cast<float>(3 * rank));
      });
      RequestPtr request = request_of(OpKind::kReducescatter, "scatter");
      request->description.op = ReduceOp::kAverage;
      request->description.add_tensor(DType::kBF16, {rows});
      request->parts.push_back(
          {reinterpret_cast<const char*>(values.data()), reinterpret_cast<char*>(slice.data())});
      const auto handle = gpu.submit(engine, request);
      finish(engine, handle);
      gpu.take(handle);
      gpu.device.drain(gpu.stream);
      for (const BF16 x : slice) EXPECT_EQ(to_float(x), 3);
    });
  }
}

// Of rows that vary a little.
RequestPtr gather_of(std::vector<float>& values, int64_t rows) {
  RequestPtr gather = request_of(OpKind::kAllgather, "gather");
  gather->description.add_tensor(DType::kF32, {kAnyExtent, 10});
  gather->parts.push_back({reinterpret_cast<const char*>(values.data()), nullptr});
  gather->rows.push_back(rows);
  return gather;
}

// A device's own way of giving and taking memory waits for all that it does.
// Memory of one step may still be in use when the next takes its own, which depends on who is
// slow: one or two allocations may come late.
TEST(NcclExchange, NoStepAllocatesOnTheDevice) {
  constexpr int kFirst = 10, kSteps = 50;
  GpuWorld world(2);
  world.run([&](int, Gpu& gpu, Engine& engine) {
    std::vector<float> values(2000);
    int before = 0;
    for (int step = 0; step < kSteps; ++step) {
      if (step == kFirst) before = gpu.device.allocations();
      gpu.compute(values, 1);
      const auto handle = gpu.submit(engine, gather_of(values, 150 + step % 30));
      finish(engine, handle);
      gpu.take(handle);
      RequestPtr coded = allreduce_of("coded", values);
      coded->description.codec = "minmax_u8";
      gpu.exchange(engine, coded, values);
    }
    EXPECT_LT(gpu.device.allocations() - before, 4);
  });
}

// Until the stream that has waited for it is through with it, wherever the values came from.
TEST(NcclExchange, AResultIsNotOverwrittenWhileItIsRead) {
  GpuWorld world(2);
  for (const bool elsewhere : {false, true})
    world.run([&](int, Gpu& gpu, Engine& engine) {
      std::vector<float> values(2000);
      std::atomic<bool> go{false};
      std::vector<float> seen(4000);
      {
        Program side(gpu.device);
        Program& begins = elsewhere ? side : gpu;
        begins.compute(values, 7);
        RequestPtr gather = begins.on_device(gather_of(values, 200));
        gather->description.on_device = true;
        gather->keepalive = std::make_shared<int>();
        const auto handle = engine.submit(gather, Urgency::kNow);
        finish(engine, handle);
        gpu.take(handle);
        gpu.hold(go);
        const char* result = handle->outputs.at(0).data.get();
        gpu.device.run(gpu.stream,
                       [&, result] { std::memcpy(seen.data(), result, seen.size() * 4); });
      }
      Program other(gpu.device);
      std::vector<float> others(2000);
      for (int step = 0; step < 5; ++step) {
        other.compute(others, 1);
        RequestPtr gather = other.on_device(gather_of(others, 200));
        gather->description.on_device = true;
        const auto handle = engine.submit(gather, Urgency::kNow);
        finish(engine, handle);
        other.take(handle);
        gpu.device.drain(other.stream);
      }
      go = true;
      gpu.device.drain(gpu.stream);
      EXPECT_EQ(seen, all(seen.size(), 7));
    });
}

// A program that makes and removes them for ever must not run out of memory, nor wait.
TEST(NcclExchange, WhatRemovedSetsLeaveGoesInIdleTime) {
  const int before = FakeNccl::destroyed(), finalized = FakeNccl::finalized();
  GpuWorld world(3);
  FakeNccl::hold_destroyed(true);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float> values(1000);
    const auto exchange = [&](int32_t set, float size) {
      gpu.compute(values, 1);
      EXPECT_EQ(gpu.exchange(engine, allreduce_of("x", values, ReduceOp::kSum, set), values),
                all(values.size(), size));
    };
    for (int i = 0; i < 3; ++i) {
      const int32_t set = add_set(engine, {0, 1});
      if (rank < 2) exchange(set, 2);
      remove_set(engine, set);
    }
    const double late_s = now_s() + kHangS;
    while (FakeNccl::destroyed() < before + 2 && now_s() < late_s) std::this_thread::yield();
    exchange(0, 3);  // though they are not yet gone
  });
  FakeNccl::hold_destroyed(false);
  const double late_s = now_s() + kHangS;
  while (FakeNccl::destroyed() < before + 6 && now_s() < late_s) std::this_thread::yield();
  EXPECT_EQ(FakeNccl::destroyed(), before + 6);
  EXPECT_EQ(FakeNccl::finalized(), finalized + 6);
  EXPECT_EQ(FakeNccl::misused(), 0);
}

// It may have had its first tensor on a device in the decision in which it has joined.
TEST(NcclExchange, ARankThatJoinsAtOnce) {
  GpuWorld world(2);
  world.run([&](int rank, Gpu& gpu, Engine& engine) {
    std::vector<float> x(1000), a(1000);
    gpu.compute(x, 1);
    gpu.compute(a, 1);
    const auto first = gpu.submit(engine, allreduce_of("x", x), Urgency::kSoon);
    if (rank == 0) {
      const auto second = gpu.submit(engine, allreduce_of("a", a), Urgency::kSoon);
      EXPECT_EQ(gpu.read(engine, second, a), all(1000, 1));
    }
    EXPECT_EQ(join(engine), 0);
    EXPECT_EQ(gpu.read(engine, first, x), all(1000, 2));
  });
}

}  // namespace
}  // namespace bagua
