#include "engine/watch.h"

#include <algorithm>
#include <vector>

#include "common/clock.h"
#include "common/ranks_text.h"

namespace bagua {
namespace {

constexpr double kAskAfterS = 1;  // in an exchange, whether its caller was interrupted
constexpr double kAskEveryS = 0.25;
// Ranks that wait for each other are told of after so much of the time that others may take; they
// are looked for so often in that.
constexpr double kHopelessShare = 1.0 / 6;
constexpr double kHopelessLooks = 10;

std::string seconds(double s) { return std::to_string(static_cast<int>(s + 0.5)) + " s"; }

}  // namespace

Watch::Watch(const Station& station, Door& door, Agreement& agreement, Runner& runner)
    : at_(station),
      door_(door),
      agreement_(agreement),
      runner_(runner),
      liveness_(*at_.channel, at_.rank, at_.size, at_.config.peer_timeout_s,
                [this] { return only_waits(); }),
      expected_to_leave_(static_cast<size_t>(at_.size)) {}

bool Watch::hear(const Message& message, MessageType type) {
  if (!liveness_.handle(message, type, now_s())) return false;
  // Somebody waits for long. MPI may hold back a message of ours until we call it again.
  if (!runner_.in_exchange()) at_.transport->progress();
  return true;
}

double Watch::hopeless_s() const { return at_.config.stall_warn_s * kHopelessShare; }

// Whether a thread waits for others, nothing is under way or on its way, and nothing has ended so
// lately that whoever waited for it may not yet have gone on. Another thread may compute.
std::optional<Traffic> Watch::only_waits() const {
  const bool waits = door_.anybody_waits() && !door_.has_submissions() && runner_.idle() &&
                     !agreement_.has_decisions() && now_s() - agreement_.ended_s() >= hopeless_s();
  return waits ? std::optional<Traffic>(agreement_.traffic_with(0)) : std::nullopt;
}

bool Watch::is_asked() const { return liveness_.asked(now_s()); }

void Watch::tick() {
  const double now = now_s();
  if (now - ticked_s_ < 0.5) return;
  ticked_s_ = now;
  if (agreement_.anything_open() && !runner_.in_exchange()) at_.transport->progress();
  const bool open = agreement_.anything_open() || runner_.on_device();
  const bool waiting = (open && now - agreement_.open_since_s() > 1) || runner_.captures();
  const int silent = liveness_.tick(now, waiting || leaving());
  if (silent >= 0)
    lose(silent, "has not answered for " + seconds(at_.config.peer_timeout_s) +
                     ": stopped, or its machine is overloaded or unreachable (peer_timeout_s)");
  if (agreement_.ledger()) look_for_stalls(now);
  if (leaving()) agreement_.ledger() ? look_for_stragglers(now) : look_for_carried(now);
  if (runner_.captures()) runner_.check_device();
  if (runner_.on_device()) look_at_device(now);
  const bool idle = !runner_.in_exchange() && !agreement_.anything_open() && !runner_.on_device();
  if (idle && !leaving()) runner_.tidy();
}

void Watch::lose(int rank, const std::string& how) {
  const bool was_leaving = leaving();
  if (!agreement_.has_left(rank) && expected_to_leave_[static_cast<size_t>(rank)]) see_off(rank);
  const bool had_left = agreement_.has_left(rank), carried = carries(rank);
  liveness_.forget(rank);
  agreement_.leave(rank);
  if (!agreement_.ledger()) {
    if (!was_leaving && !had_left) throw Verdict(at_.name_of(rank) + " " + how);
    return;
  }
  forget_if_through(at_.channel->carrier_of(rank));
  // Perhaps it is gone with the answer to those who have left.
  for (int other = 0; other < at_.size; ++other)
    if (other != rank && at_.channel->carrier_of(other) == rank && agreement_.has_left(other))
      at_.channel->send(other, text_message(MessageType::kBye));
  if (had_left && carried)
    throw Verdict(at_.name_of(rank) + " " + how +
                  ", and messages of other ranks of its machine went by it");
  if (!had_left && (carried || !was_leaving)) throw Verdict(at_.name_of(rank) + " " + how);
}

void Watch::expect_to_leave(int rank) { expected_to_leave_[static_cast<size_t>(rank)] = true; }

// What was decided with the leaver must reach it ahead of the answer.
void Watch::see_off(int rank) {
  agreement_.decide_everything();
  if (agreement_.ledger()) at_.channel->post({rank}, text_message(MessageType::kBye));
  agreement_.leave(rank);
  forget_if_through(rank);
  if (agreement_.ledger()) forget_if_through(at_.channel->carrier_of(rank));
}

// A carrier that has left goes on answering until those that it carries have left.
void Watch::forget_if_through(int rank) {
  if (agreement_.has_left(rank) && !carries(rank)) liveness_.forget(rank);
}

void Watch::leave() {
  left_s_ = now_s();
  if (at_.channel->carrier_of(at_.rank) != at_.rank)
    at_.channel->send(0, text_message(MessageType::kLeaving));
  if (at_.rank != 0) at_.channel->post({0}, text_message(MessageType::kBye));
  agreement_.leave(at_.rank);
}

// Whether the posts of anyone who has not left go by this rank. Rank 0 knows.
bool Watch::carries(int rank) const {
  if (!agreement_.ledger()) return false;
  for (int other = 0; other < at_.size; ++other)
    if (other != rank && at_.channel->carrier_of(other) == rank && !agreement_.has_left(other))
      return true;
  return false;
}

// It stays for others, which its user may not expect.
void Watch::look_for_carried(double now) {
  const double quiet_s = now - std::max(warned_s_, left_s_);
  if (!at_.channel->carries() || at_.config.stall_warn_s <= 0 || quiet_s < at_.config.stall_warn_s)
    return;
  warned_s_ = now;
  at_.log.write(LogLevel::kWarning,
                "rank " + std::to_string(at_.rank) + " has shut down, and for " +
                    seconds(now - left_s_) +
                    " has waited for other ranks of its machine to do so, whose messages go by it "
                    "(carriers)");
}

// Those that a warning is due of: of late ranks from time to time, of such as wait for each other
// once that is clear, unless others have been told of lately. They count as told.
Stalls Watch::take_untold_stalls(double now) {
  const Ledger& ledger = *agreement_.ledger();
  const double warn_s = at_.config.stall_warn_s;
  if (now - warned_s_ >= warn_s) {
    Stalls late = stalls_in(ledger, now, warn_s);
    if (!late.empty()) {
      warned_s_ = now;
      return late;
    }
  }
  // Others may wait for what rank 0 holds back meanwhile.
  if (now - std::max(warned_s_, warned_early_s_) < warn_s || ledger.has_background()) return {};
  if (now - looked_s_ < hopeless_s() / kHopelessLooks) return {};
  looked_s_ = now;
  const auto waits = [&](int rank) { return liveness_.waits(rank, agreement_.traffic_with(rank)); };
  Stalls found = hopeless_stalls_in(ledger, now, hopeless_s(), waits);
  if (!found.empty()) warned_early_s_ = now;
  return found;
}

void Watch::look_for_stalls(double now) {
  const Ledger& ledger = *agreement_.ledger();
  if (at_.config.stall_fail_s > 0) {
    const auto stalls = stalls_in(ledger, now, at_.config.stall_fail_s);
    if (!stalls.empty()) {
      const Instead instead(stalls_in(ledger, now, 0));
      for (const auto& stall : stalls) {
        const std::string other = instead.of(stall);
        const char* advice = other.empty() ? "; did it skip this call, take another branch, or run "
                                             "out of batches (join())?"
                                           : "; all ranks must make the same calls";
        agreement_.give_up(stall,
                           stall.label + ": " + ranks_text(stall.missing) + " not ready after " +
                               seconds(at_.config.stall_fail_s) + other + advice +
                               " (stall_fail_s)",
                           now);
      }
    }
    agreement_.decide(runner_.idle());
  }
  if (at_.config.stall_warn_s <= 0) return;
  const Stalls stalls = take_untold_stalls(now);
  if (stalls.empty()) return;
  const Instead instead(stalls_in(ledger, now, 0));
  std::string text = "some ranks wait for others";
  if (at_.config.stall_fail_s == 0)
    text += ", for as long as it takes (with stall_fail_s, bagua-run --stall-fail-s 300, it fails)";
  text += ":";
  for (size_t i = 0; i < stalls.size(); ++i) {
    if (i == 10) {
      text += "\n  and " + std::to_string(stalls.size() - i) + " more";
      break;
    }
    text += "\n  " + stalls[i].label + ": waiting " + seconds(now - stalls[i].since_s) + " for " +
            ranks_text(stalls[i].missing) + instead.of(stalls[i]);
  }
  if (!advised_)
    text += "\n  (all ranks must make the same calls; one that is through calls join())";
  advised_ = true;
  at_.log.write(LogLevel::kWarning, text);
}

// Rank 0 stays until everybody has shut down, as long as they have something to say.
void Watch::look_for_stragglers(double now) {
  std::vector<int> ranks;
  double since_s = left_s_;
  for (int rank = 0; rank < at_.size; ++rank) {
    if (agreement_.has_left(rank)) continue;
    ranks.push_back(rank);
    since_s = std::max(since_s, agreement_.ledger()->heard_s(rank));
  }
  if (ranks.empty()) return;
  const std::string text = "rank 0 has shut down, and for " + seconds(now - since_s) +
                           " has waited for " + ranks_text(ranks) +
                           " to do so: a program ends when all ranks have; does one compute for "
                           "long, or is it stuck?";
  if (at_.config.stall_fail_s > 0 && now - since_s > at_.config.stall_fail_s)
    throw Verdict(text + " (stall_fail_s)");
  const double quiet_s = now - std::max(warned_s_, since_s);
  if (at_.config.stall_warn_s <= 0 || quiet_s < at_.config.stall_warn_s) return;
  warned_s_ = now;
  at_.log.write(LogLevel::kWarning, text);
}

void Watch::check_progress(double waited_s, int peer, double& warned_s) {
  if (door_.ends_now())
    throw Verdict(at_.name_of(at_.rank) + " has ended bagua during an exchange");
  const auto stuck = [&] {
    return runner_.label() + ", on which all ranks had agreed, made no progress for " +
           seconds(waited_s) + (peer < 0 ? "" : ", waiting for " + at_.name_of(peer));
  };
  constexpr const char* kPerhaps =
      " although all ranks answer: is the network between them blocked? (stall_fail_s)";
  if (at_.config.stall_fail_s > 0 && waited_s > at_.config.stall_fail_s)
    throw PeerError(stuck() + kPerhaps);
  const double now = now_s();
  if (door_.can_ask() && waited_s > kAskAfterS && now - asked_s_ > kAskEveryS) {
    asked_s_ = now;
    if (door_.ask()) throw Verdict(at_.name_of(at_.rank) + " was interrupted: " + stuck());
  }
  if (at_.config.stall_warn_s <= 0 || now - warned_s < at_.config.stall_warn_s) return;
  warned_s = now;
  at_.log.write(LogLevel::kWarning, stuck() + kPerhaps);
}

// What a device was given ends when every rank's device has come to it; the host waits for none.
void Watch::look_at_device(double now) {
  runner_.check_device();
  const double waited_s = now - runner_.nccl()->given_s();
  const std::string text = "what NCCL was given " + seconds(waited_s) +
                           " ago is not done although all ranks answer: is another rank's GPU far "
                           "behind, or the network between them blocked? (stall_fail_s)";
  if (at_.config.stall_fail_s > 0 && waited_s > at_.config.stall_fail_s) throw PeerError(text);
  const double quiet_s = now - std::max(device_warned_s_, runner_.nccl()->given_s());
  if (at_.config.stall_warn_s <= 0 || quiet_s < at_.config.stall_warn_s) return;
  device_warned_s_ = now;
  at_.log.write(LogLevel::kWarning, text);
}

}  // namespace bagua
