// Exchanges that are under way when a rank dies, falls silent, breaks or shuts down, while others
// wait for its messages, or for its words in the memory of a node.
#include <gtest/gtest.h>

#include "engine/mute_world.h"

namespace bagua {
namespace {

constexpr size_t kSmallCount = 5000;

std::string host(int rank) {
  return "rank " + std::to_string(rank) + " (host h" + std::to_string(rank) + ")";
}

// Who waits for what does not come fails soon.
Config strict(Config config) {
  config.stall_fail_s = 0.5;
  return config;
}

// ---- between engines ---------------------------------------------------------------------------

struct Setting {
  NodeOf node_of;
  std::vector<int> leaders;  // who gets messages; the others wait for words of theirs
  bool inline_drive;
};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const bool inline_drive : {true, false}) {
    all.push_back({{0, 0, 1}, {0, 2}, inline_drive});
    if (!inline_drive) continue;
    all.push_back({{0, 1}, {0, 1}, inline_drive});
    all.push_back({{0, 0, 1, 1}, {0, 1, 2, 3}, inline_drive});
    all.push_back({{0, 1, 0, 0, 2}, {0, 1, 4}, inline_drive});
  }
  return all;
}

// An exchange that all ranks are in, and that no message gets through to.
class OpenExchange : public testing::TestWithParam<Setting> {
 protected:
  void begin(const Config& config) {
    const auto n = GetParam().node_of.size();
    handles.clear();
    world = std::make_unique<LoopbackWorld>(GetParam().node_of, config);
    open_gates(*world, 0);
    data.assign(n, std::vector<float>(kSmallCount, 1));
    handles.resize(n);
  }
  Config config() const {
    Config config = quiet_config(GetParam().node_of);
    config.inline_drive = GetParam().inline_drive;
    return config;
  }
  void submit(int rank, Urgency urgency) {
    const auto at = static_cast<size_t>(rank);
    handles[at] = (*world)[rank].submit(allreduce_of("x", data[at]), urgency);
  }
  // A leader is at its messages when all of its node have shown it what they give.
  void wait_until_all_are_in_it() {
    for (const int leader : GetParam().leaders)
      while (!world->gates[static_cast<size_t>(leader)].shut_out) std::this_thread::yield();
  }
  void wait_for(int rank) { finish((*world)[rank], handles[static_cast<size_t>(rank)]); }
  // Calls interfere() in the middle of the exchange, and returns what each rank gets instead.
  template <class Interfere>
  std::vector<std::string> errors(Interfere&& interfere) {
    const int n = world->size();
    std::vector<std::string> texts(static_cast<size_t>(n));
    run_ranks(n + 1, [&](int rank) {
      if (rank == n) {
        wait_until_all_are_in_it();
        return interfere();
      }
      submit(rank, Urgency::kWaited);
      texts[static_cast<size_t>(rank)] = error_of<PeerError>([&] { wait_for(rank); });
    });
    return texts;
  }

  std::vector<std::vector<float>> data;  // by rank
  std::vector<HandlePtr> handles;
  std::unique_ptr<LoopbackWorld> world;
};
INSTANTIATE_TEST_SUITE_P(Engine, OpenExchange, testing::ValuesIn(settings()), [](const auto& info) {
  return name_of(info.param.node_of) + (info.param.inline_drive ? "_Inline" : "_Thread");
});

TEST_P(OpenExchange, EndsByADeath) {
  const int n = static_cast<int>(GetParam().node_of.size());
  for (int dead = 0; dead < n; ++dead) {
    begin(config());
    world->run([&](int rank) {
      submit(rank, rank == dead ? Urgency::kNow : Urgency::kWaited);
      if (rank == dead) {
        wait_until_all_are_in_it();
        return world->die(rank);
      }
      EXPECT_CONTAINS(error_of<PeerError>([&] { wait_for(rank); }), host(dead) + " is gone");
    });
  }
}

TEST_P(OpenExchange, EndsByABrokenNetwork) {
  for (const int broken : GetParam().leaders) {
    begin(config());
    for (const std::string& text :
         errors([&] { world->gates[static_cast<size_t>(broken)].broken = true; }))
      EXPECT_CONTAINS(text, "the network of this rank is broken");
  }
}

TEST_P(OpenExchange, EndsWhereNothingComesForLong) {
  begin(strict(config()));
  for (const std::string& text : errors([] {})) EXPECT_CONTAINS(text, "made no progress");
}

// Rank 1, whose caller is the first to look at what it submitted: nothing comes before it has told
// rank 0. There, the other rank's report may wake the coordination thread, which asks nobody.
TEST(Interrupted, EndsAnExchangeThatGetsNowhere) {
  LoopbackWorld world(NodeOf{0, 1}, quiet_config());
  open_gates(world, 0);
  world.run([&](int rank) {
    std::vector<float> data(kSmallCount, 1);
    const HandlePtr handle = world[rank].submit(allreduce_of("x", data), Urgency::kWaited);
    int asked = 0;
    Interrupted interrupted;
    if (rank == 1) interrupted = [&] { return ++asked == 2; };
    EXPECT_TRUE(world[rank].wait(*handle, kHangS, interrupted));
    const std::string text = error_of<PeerError>([&] { handle->rethrow(); });
    EXPECT_CONTAINS(text, host(1) + " was interrupted: x, on which all ranks had agreed");
    EXPECT_CONTAINS(text, "waiting for " + host(0));
  });
}

// The caller may need a lock that others hold: whoever pings this rank hears of it all the same,
// and what it hears itself ends the exchange.
TEST(Interrupted, AnswersPingsWhileItsCallerIsAsked) {
  for (const bool fails : {false, true}) {
    Config impatient = quiet_config();
    impatient.peer_timeout_s = 0.5;
    LoopbackWorld world(NodeOf{0, 1, 2}, impatient);
    std::atomic<bool> asked{false}, through{false};
    open_gates(world, 0);
    world.run([&](int rank) {
      std::vector<float> data(kSmallCount, 1);
      const HandlePtr handle = world[rank].submit(allreduce_of("x", data), Urgency::kWaited);
      const Interrupted interrupted = [&] {
        if (rank == 0) return false;
        if (!asked.exchange(true)) {
          std::this_thread::sleep_for(std::chrono::seconds(3));
          through = true;
          open_gates(world, 1 << 30);
        }
        return false;
      };
      if (rank == 2 && fails) {
        wait_until([&] { return asked.load(); });
        return world.die(rank);
      }
      EXPECT_TRUE(world[rank].wait(*handle, kHangS, interrupted));
      EXPECT_TRUE(through || fails);
      if (fails) {
        EXPECT_CONTAINS(error_of<PeerError>([&] { handle->rethrow(); }), host(2) + " is gone");
      } else {
        handle->rethrow();
        EXPECT_EQ(data, std::vector<float>(kSmallCount, 3));
      }
    });
  }
}

// The others count on it.
TEST_P(OpenExchange, IsCarriedOutThoughItsRanksShutDown) {
  const int n = static_cast<int>(GetParam().node_of.size());
  for (const bool waited : {true, false}) {
    begin(config());
    run_ranks(n + 1, [&](int rank) {
      if (rank < n) {
        submit(rank, waited ? Urgency::kWaited : Urgency::kNow);
        if (waited) wait_for(rank);
        return;
      }
      wait_until_all_are_in_it();
      for (auto& engine : world->engines) engine->stop();
      open_gates(*world, 1 << 30);
    });
    for (auto& engine : world->engines) EXPECT_TRUE(engine->wait_stopped(kHangS));
    for (int rank = 0; rank < n; ++rank) {
      wait_for(rank);
      EXPECT_EQ(data[static_cast<size_t>(rank)],
                std::vector<float>(kSmallCount, static_cast<float>(n)));
    }
  }
}

// ---- with a rank that has no engine ------------------------------------------------------------

struct MuteSetting {
  NodeOf node_of;
  int mute;
  bool inline_drive;
};

std::vector<MuteSetting> mute_settings() {
  std::vector<MuteSetting> all;
  for (const bool inline_drive : {true, false}) {
    all.push_back({{0, 0, 1}, 1, inline_drive});
    if (!inline_drive) continue;
    all.push_back({{0, 1}, 1, inline_drive});
    all.push_back({{0, 0}, 1, inline_drive});
    all.push_back({{0, 0, 0}, 2, inline_drive});
    all.push_back({{0, 0, 1}, 2, inline_drive});
    all.push_back({{0, 0, 1, 1}, 3, inline_drive});
  }
  return all;
}

class MuteRank : public testing::TestWithParam<MuteSetting> {
 protected:
  Config config() const {
    Config config = quiet_config(GetParam().node_of);
    config.inline_drive = GetParam().inline_drive;
    return config;
  }
  // What all others get says so.
  void check(const Config& config, bool answers, const std::string& part, bool dies = false) {
    const int mute = GetParam().mute;
    MuteWorld world(GetParam().node_of, mute, config);
    std::vector<std::vector<float>> data(GetParam().node_of.size(),
                                         std::vector<float>(kSmallCount, 1));
    std::vector<RequestPtr> requests;
    for (auto& values : data) requests.push_back(allreduce_of("x", values));
    const auto texts = world.exchange(requests, answers, [&] {
      if (dies) world.die();
    });
    for (int rank = 0; rank < static_cast<int>(texts.size()); ++rank)
      if (rank != mute) {
        EXPECT_CONTAINS(texts[static_cast<size_t>(rank)], part);
      }
  }
};
INSTANTIATE_TEST_SUITE_P(Engine, MuteRank, testing::ValuesIn(mute_settings()),
                         [](const auto& info) {
                           return name_of(info.param.node_of) + "_Mute" +
                                  std::to_string(info.param.mute) +
                                  (info.param.inline_drive ? "_Inline" : "_Thread");
                         });

TEST_P(MuteRank, DeathInTheMiddleOfAnExchange) {
  check(config(), true, host(GetParam().mute) + " is gone", /*dies=*/true);
}

TEST_P(MuteRank, SilenceInTheMiddleOfAnExchange) {
  Config impatient = config();
  impatient.peer_timeout_s = 0.5;
  check(impatient, false, host(GetParam().mute) + " has not answered");
}

TEST_P(MuteRank, ExchangeWithoutProgressFails) {
  check(strict(config()), true, "made no progress for ");
}

}  // namespace
}  // namespace bagua
