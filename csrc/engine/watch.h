// Looks after the other ranks: who is gone or silent, what waits for whom for long, and exchanges
// that get nowhere. What cannot go on is thrown. Only who drives is here.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/errors.h"
#include "engine/agreement.h"
#include "engine/door.h"
#include "engine/liveness.h"
#include "engine/runner.h"
#include "engine/stalls.h"
#include "engine/station.h"

namespace bagua {

// Somebody's word on who failed, as opposed to a mere symptom.
struct Verdict : PeerError {
  using PeerError::PeerError;
};

class Watch {
 public:
  Watch(const Station& station, Door& door, Agreement& agreement, Runner& runner);

  // Whether the message was about who is alive, and is dealt with.
  bool hear(const Message& message, MessageType type);
  // Often, while anything waits; looks at the clock first.
  void tick();
  // A rank's connection has ended, or it is silent. That ends the engine, unless it had said
  // goodbye or this rank is leaving anyway, and nobody is left whose posts went by it.
  void lose(int rank, const std::string& how);
  // A rank is about to say goodbye, or to be lost before that has come.
  void expect_to_leave(int rank);
  // A rank has said goodbye.
  void see_off(int rank);
  // This rank says it.
  void leave();
  // An agreed exchange should only take as long as its bytes; when nothing arrives for long, says
  // so. `warned_s` is when it did so last.
  void check_progress(double waited_s, int peer, double& warned_s);
  // Whether rank 0 must keep ticking on behalf of others.
  bool is_asked() const;

 private:
  std::optional<Traffic> only_waits() const;
  double hopeless_s() const;
  bool leaving() const { return agreement_.has_left(at_.rank); }
  void look_for_stalls(double now);
  Stalls take_untold_stalls(double now);
  void look_for_stragglers(double now);
  void look_for_carried(double now);
  bool carries(int rank) const;
  void forget_if_through(int rank);
  void look_at_device(double now);

  const Station& at_;
  Door& door_;
  Agreement& agreement_;
  Runner& runner_;
  Liveness liveness_;
  std::vector<bool> expected_to_leave_;  // by rank
  double ticked_s_ = 0;
  double warned_s_ = 0, warned_early_s_ = 0, device_warned_s_ = 0;
  double looked_s_ = 0;  // for ranks that wait for each other
  bool advised_ = false;
  double asked_s_ = 0;  // when the caller that drives was last asked whether it was interrupted
  double left_s_ = 0;   // when this rank shut down
};

}  // namespace bagua
