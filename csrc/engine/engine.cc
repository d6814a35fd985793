#include "engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/clock.h"
#include "common/denormals.h"
#include "common/memory.h"

namespace bagua {
namespace {

// How often a waiting engine looks at the clock: stalls and silent ranks.
constexpr int kTickUs = 1000000;
constexpr int kEndUs = 1000;       // between looks at what devices still have to do
constexpr double kEndS = 2;        // for the last posts to reach everyone
constexpr double kVerdictS = 1;    // after a transport's error: time for rank 0 to say who died
constexpr int kVerdictUs = 50000;  // between looks for it

}  // namespace

Engine::Engine(const Config& config, std::unique_ptr<Transport> transport,
               std::unique_ptr<Channel> channel, std::vector<std::string> names)
    : at_(config, std::move(transport), std::move(channel), std::move(names)),
      door_(at_),
      agreement_(at_, door_),
      waiter_(*this, at_.config.spin_us),
      runner_(at_, door_, agreement_, waiter_),
      watch_(at_, door_, agreement_, runner_),
      patience_(at_.config.spin_us),
      thread_([this] { coordinate(); }) {}

Engine::~Engine() {
  door_.end_now();
  thread_.join();
}

std::shared_ptr<char> Engine::allocate(size_t nbytes) {
  if (const auto arenas = at_.arenas()) return arenas->allocate(nbytes);
  const auto memory = allocate_lines(nbytes);
  std::memset(memory.get(), 0, nbytes);
  return memory;
}

std::vector<int> Engine::nodes_of(int32_t set) {
  std::vector<int> nodes;
  for (const int rank : ranks_of(set)) nodes.push_back(at_.transport->node_of(rank));
  return nodes;
}

// Nodes of several ranks each work in memory that all of the node see, while they send.
bool Engine::exchanges_anywhere(int32_t set) {
  return !on_shared_nodes(*at_.transport, ranks_of(set));
}

// ---- driving ---------------------------------------------------------------------------------

bool Engine::wait(const Handle& handle, double timeout_s, const Interrupted& interrupted) {
  if (handle.done()) return true;
  const double deadline_s = now_s() + timeout_s;
  for (;;) {
    const Door::Wait how = door_.wait(handle, deadline_s, interrupted);
    if (how != Door::Wait::kDrive) return how == Door::Wait::kDone;
    drive(&handle, deadline_s);
    // For what a device is at, it is enough that the coordination thread looks from time to time.
    door_.hand_on(/*more=*/agreement_.has_decisions() || agreement_.anything_open() ||
                  agreement_.has_background() || (!watchful_ && runner_.on_device()));
  }
}

void Engine::coordinate() {
  ::pthread_setname_np(::pthread_self(), "bagua");  // as top and profilers show it
  const auto look = [this] {
    receive(kTickUs);
    watch_.tick();
  };
  for (int doze_us = -1;;) {
    at_.channel->doze(doze_us);
    const Door::Turn turn = door_.take_over(look);
    if (turn == Door::Turn::kLent) continue;
    const bool stopping = turn == Door::Turn::kStop;
    drive(nullptr, 0);
    NcclExchange* const nccl = runner_.nccl();
    const bool ends = stopping && nccl && (!agreement_.has_left(at_.rank) || nccl->sets().ends());
    const bool through = stopping && stopped();
    watchful_ = agreement_.anything_open() || runner_.on_device() || runner_.captures() ||
                stopping || (nccl && nccl->sets().has_left()) ||
                (agreement_.ledger() && (agreement_.ledger()->any_open() || watch_.is_asked()));
    doze_us = watchful_ ? (ends ? kEndUs : kTickUs) : -1;
    // The wake-up of what came after the last look was perhaps read by that look.
    const bool background = agreement_.has_background() && !failure();
    if (through) at_.channel->close();
    if (door_.hand_back(turn, through) || background) doze_us = 0;
    if (through) return;
  }
}

void Engine::drive(const Handle* until, double deadline_s) {
  double idle_since_s = now_s();
  for (;;) {
    if (until && until->done()) return;
    int timeout_us = 0;
    const double now = now_s();
    if (until && now > deadline_s) return;
    if (until && now - idle_since_s > patience_.spin_us() * 1e-6)
      timeout_us = static_cast<int>(std::min((deadline_s - now) * 1e6, double{kTickUs}));
    if (turn(timeout_us)) {
      if (until && heard_s_ > idle_since_s) patience_.waited((heard_s_ - idle_since_s) * 1e6);
      idle_since_s = now_s();
    } else if (!until || door_.stopping()) {
      return;  // stopping is the coordination thread's work
    }
  }
}

// One round of what there is to do. Whether that was anything. Where even telling of a failure
// fails, as for want of memory, the engine has failed all the same: somebody waits for this thread.
bool Engine::turn(int timeout_us) {
  const Denormals denormals;
  try {
    return try_turn(timeout_us);
  } catch (const std::exception&) {
    door_.fail(speechless_);
    return false;
  }
}

bool Engine::try_turn(int timeout_us) {
  if (const FailurePtr failed = failure()) {
    fail_everything(failed);
    inbox_.clear();
    at_.channel->receive(timeout_us, inbox_);
    return false;
  }
  try {
    const bool busy = !runner_.idle();
    if (!busy) agreement_.forget_removed();
    bool progressed = !busy && agreement_.take_submissions();
    receive(progressed || busy || agreement_.has_decisions() ? 0 : timeout_us);
    if (!busy && agreement_.has_decisions()) {
      runner_.accept_next();
      progressed = true;
    }
    // All of what was agreed on at once: who has got the first of it will soon wait for the rest,
    // and handing that over to another thread costs more. No further: others' may never end.
    if (!runner_.idle()) {
      while (!runner_.take_task()) continue;
      progressed = true;
    }
    watch_.tick();
    return progressed;
  } catch (const Verdict& verdict) {
    poison(make_failure(verdict.kind(), verdict.what()));
  } catch (const Error& error) {
    const bool mine = error.kind() == ErrorKind::kUsage;  // and too late to go on after it
    poison(verdict_on(make_failure(
        error.kind(), error.what() + std::string(mine ? "; that ended the exchanges" : ""))));
  } catch (const std::exception& error) {
    poison(make_failure(ErrorKind::kInternal, error.what()));
  }
  return true;
}

// Also called from inside an exchange that waits: it must only take note, never exchange.
void Engine::receive(int timeout_us) {
  agreement_.decide(runner_.idle());
  inbox_.clear();
  at_.channel->receive(timeout_us, inbox_);
  if (!inbox_.empty()) heard_s_ = now_s();
  for (const Message& message : inbox_) handle(message);
  agreement_.decide(runner_.idle());
}

void Engine::handle(const Message& message) {
  if (message.lost)
    return watch_.lose(message.from, "is gone: its process ended without shutting bagua down");
  Reader r(message.bytes);
  const auto type = r.get<MessageType>();
  if (watch_.hear(message, type)) return;
  switch (type) {
    case MessageType::kReport:
    case MessageType::kDecision:
      return agreement_.hear(message.from, type, r);
    case MessageType::kBye:
      return watch_.see_off(message.from);
    case MessageType::kLeaving:
      return watch_.expect_to_leave(message.from);
    case MessageType::kFault:
      throw Verdict(std::string(r.get_string()));
    default:
      throw InternalError("unknown control message from rank " + std::to_string(message.from));
  }
}

// ---- the end ---------------------------------------------------------------------------------

// A transport often only knows that something broke; rank 0 knows who. Wait a moment for its word.
FailurePtr Engine::verdict_on(FailurePtr failure) {
  if (failure->kind != ErrorKind::kPeer) return failure;
  try {
    for (const double until_s = now_s() + kVerdictS; now_s() < until_s;) receive(kVerdictUs);
  } catch (const Verdict& verdict) {
    return make_failure(ErrorKind::kPeer, verdict.what());
  } catch (const std::exception&) {
    return failure;  // the first error tells more
  }
  return failure;
}

void Engine::poison(FailurePtr failure) {
  if (!door_.fail(failure)) return;
  if (runner_.captures()) {  // whose owner may replay them for long without asking
    at_.log.write(LogLevel::kWarning,
                  failure->what + "; CUDA graphs with exchanges in them exchange nothing any more");
  } else {
    at_.log.write(LogLevel::kInfo, "engine failed: " + failure->what);
  }
  // Who has heard of it from another rank tells the same; else it is this one's own.
  const bool mine = failure->kind != ErrorKind::kPeer;
  const std::string what =
      mine ? at_.name_of(at_.rank) + " failed: " + failure->what : failure->what;
  const std::string fault = text_message(MessageType::kFault, what);
  for (int rank = 0; rank < at_.size; ++rank) {
    const bool connected = rank != at_.rank && (rank == 0 || at_.rank == 0);
    if (connected && !agreement_.has_left(rank)) at_.channel->send(rank, fault);
  }
  runner_.let_go();
  fail_everything(failure);
}

void Engine::fail_everything(const FailurePtr& failure) {
  agreement_.fail_everything(runner_.give_up(), failure);
}

bool Engine::stopped() {
  try {
    return try_stop();
  } catch (const std::exception&) {
    return !door_.fail(speechless_);
  }
}

// One step of stopping; true when nothing is left to do. Called by the coordination thread. What
// was decided before the others heard of it is still carried out: they count on it.
bool Engine::try_stop() {
  if (failure() || door_.ends_now()) return true;
  if (!agreement_.has_left(at_.rank)) {
    if (!runner_.finish_on_device()) return false;
    watch_.leave();
    while (turn(0)) {
    }
  }
  // Rank 0 coordinates until everyone has left; the others stay until it has answered, and all
  // whose posts they carry are gone.
  const bool heard = agreement_.has_left(0) || failure();
  if (heard && agreement_.anything_open()) {
    fail_everything(make_failure(ErrorKind::kUsage,
                                 "bagua was shut down on this rank while the request was in "
                                 "flight"));
    runner_.finish_on_device();
  }
  if (runner_.nccl() && runner_.nccl()->sets().ends()) return false;
  if (!agreement_.ledger()) return heard && !at_.channel->carries();
  if (!agreement_.all_have_left()) return false;
  // Its own end would overtake what it has posted last.
  if (all_left_s_ == 0) all_left_s_ = now_s();
  return at_.channel->all_ended() || now_s() - all_left_s_ > kEndS;
}

}  // namespace bagua
