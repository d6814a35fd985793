// The control channel between ranks that are threads of one process.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "control/channel.h"

namespace bagua {

class LoopbackSwitchboard {
 public:
  explicit LoopbackSwitchboard(int size) : ends_(size) {}
  std::unique_ptr<Channel> connect(int rank);
  // What the others see when a rank's process dies.
  void lose(int rank);
  // A rank in this state receives nothing, as if it had been stopped by a signal.
  void freeze(int rank, bool frozen);
  // From now on this rank has no memory for messages, its own or others'.
  void starve(int rank);

 private:
  friend class LoopbackChannel;
  struct End {
    std::vector<Message> inbox;
    bool woken = false;
    bool hushed = false;
    bool frozen = false;
    bool starved = false;
    double alarm_s = 0;  // a now_s() time at which to wake, 0 for none
  };
  std::mutex mutex_;  // guards all ends
  std::condition_variable changed_;
  std::vector<End> ends_;
};

}  // namespace bagua
