// Who waits for a word in memory lets its messages go on meanwhile.
#include "engine/engine_waiter.h"

#include <gtest/gtest.h>

#include "engine/loopback_world.h"

namespace bagua {
namespace {

// Ranks 0 and 2 exchange one half between the nodes, 1 and 3 the other. What 0 and 3 send is held
// back, and they find at once what they wait for; then 0 waits for a word of 1, which waits for 3,
// which waits for a word of 2, which waits for 0.
TEST(EngineWaiter, LetsMessagesGoOnWhileItWaitsForAWord) {
  for (const bool inline_drive : {true, false}) {
    Config config = quiet_config({0, 0, 1, 1});
    config.inline_drive = inline_drive;
    LoopbackWorld world(NodeOf{0, 0, 1, 1}, config);
    for (Gate& gate : world.gates) gate.holds_back = true;
    for (const int rank : {0, 3}) world.gates[static_cast<size_t>(rank)].open = 0;
    run_ranks(5, [&](int rank) {
      if (rank == 4) {
        for (const Gate& gate : world.gates)
          while (!gate.shut_out) std::this_thread::yield();
        for (const int late : {0, 3}) world.gates[static_cast<size_t>(late)].open = 1 << 30;
        return;
      }
      std::vector<float> data(100, 1);
      call(world[rank], allreduce_of("x", data));
      EXPECT_EQ(data, std::vector<float>(100, 4));
    });
  }
}

}  // namespace
}  // namespace bagua
