#include "engine/engine_waiter.h"

#include <sched.h>

#include <algorithm>

#include "common/clock.h"
#include "engine/engine.h"
#include "transport/node.h"

namespace bagua {
namespace {

constexpr int kPausesPerLook = 16;  // between looks at the clock while spinning
constexpr double kYieldUs = 200;    // after spinning, let others run but stay ready
constexpr int kNapUs = 50;
constexpr int kLongestNapUs = 300;  // of naps that grow
constexpr int kSleepOfCarrierUs = 200;
constexpr int kSleepUs = 2000;  // where a peer wakes us; in between we look for control messages

}  // namespace

void EngineWaiter::begin(int peer) {
  if (began_s_ > 0) patience_.waited((looked_s_ - began_s_) * 1e6);
  pauses_ = 0;
  peer_ = peer;
  began_s_ = 0;
  nap_us_ = kNapUs;
}

void EngineWaiter::pause(Node* node) {
  if (++pauses_ % kPausesPerLook != 0) return cpu_relax();
  const double now = now_s();
  if (began_s_ == 0) began_s_ = warned_s_ = now;
  looked_s_ = now;
  const double waited_us = (now - began_s_) * 1e6;
  // Who shares a core looks less often whether something has come from elsewhere.
  const bool own_core = patience_.spin_us() > 0;
  // A thread that has nothing else to do may spin. The coordination thread must not: the model
  // computes meanwhile, perhaps on this core.
  if (engine_.door_.caller_drives()) {
    if (waited_us < patience_.spin_us()) return cpu_relax();
    if ((node || own_core) && waited_us < patience_.spin_us() + kYieldUs) {
      ::sched_yield();
      return;
    }
  }
  pauses_ = kPausesPerLook - 1;  // from here on every pause is a nap
  if (node) {
    node->sleep(engine_.at_.channel->carries() ? kSleepOfCarrierUs : kSleepUs);
    // The word may be of a rank that waits for a message of ours, by way of other nodes.
    engine_.at_.transport->progress();
  }
  engine_.runner_.take_ahead();
  const double before_s = now_s();
  const bool worked = engine_.runner_.work_ahead();
  if (worked) began_s_ += now_s() - before_s;  // that was no waiting
  engine_.receive(node || worked ? 0 : nap_us_);
  if (!own_core) nap_us_ = std::min(nap_us_ + nap_us_ / 2, kLongestNapUs);
  looked_s_ = now_s();
  engine_.watch_.tick();
  engine_.watch_.check_progress(now - began_s_, peer_, warned_s_);
}

void EngineWaiter::look() {
  engine_.receive(0);
  engine_.watch_.tick();
}

}  // namespace bagua
