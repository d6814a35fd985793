// Finds ranks that no longer answer. Nothing is sent while nobody waits: a rank that waits for
// longer than a second asks rank 0, and rank 0 pings everyone while somebody waits. A rank whose
// process runs answers from its coordination thread, however long its model computes.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "control/channel.h"
#include "engine/messages.h"

namespace bagua {

class Liveness {
 public:
  // If this rank does nothing but wait for others: what it and rank 0 have exchanged by then.
  using Waits = std::function<std::optional<Traffic>()>;

  // timeout_s: how long a ping may stay unanswered; 0 is for ever.
  Liveness(Channel& channel, int rank, int size, double timeout_s, Waits waits);

  // True when the message was about liveness and is dealt with.
  bool handle(const Message& message, MessageType type, double now_s);
  void forget(int rank);  // it left or is known to be dead

  // Called about once a second while anything is open here. Returns a rank that has been silent
  // for too long, or -1.
  int tick(double now_s, bool waiting);
  // Whether rank 0 must keep ticking on behalf of others.
  bool asked(double now_s) const { return rank_ == 0 && now_s - asked_s_ < 3; }
  // Whether that rank did nothing but wait when it answered last, and does so still: nothing has
  // been said since to it or by it. Rank 0 knows.
  bool waits(int rank, const Traffic& traffic) const;

 private:
  struct Peer {
    bool gone = false;
    double pinged_s = 0;  // the oldest ping not answered yet, 0 for none
    double sent_s = 0;    // the latest ping
    std::string pong;     // the last one, empty if that is long ago
  };
  Channel& channel_;
  const int rank_;
  const double timeout_s_;
  const Waits waits_;
  double asked_s_ = -1e9;
  std::vector<Peer> peers_;  // by rank; those without a connection are gone from the start
};

}  // namespace bagua
