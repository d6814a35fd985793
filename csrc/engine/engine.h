// The engine of one rank: takes requests from any thread, agrees with the other ranks what is
// ready, and exchanges it.
//
// One thread at a time *drives*: the coordination thread, which sleeps in the kernel while there
// is nothing to do, or a thread that waits for a handle, which saves two hand-overs. What threads
// share is at the door; agreement, runner and watch belong to who drives.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/agreement.h"
#include "engine/door.h"
#include "engine/engine_waiter.h"
#include "engine/patience.h"
#include "engine/runner.h"
#include "engine/station.h"
#include "engine/watch.h"

namespace bagua {

class Engine {
 public:
  // `names` says where each rank runs, for errors: "rank 2 (host b, pid 17)".
  Engine(const Config& config, std::unique_ptr<Transport> transport,
         std::unique_ptr<Channel> channel, std::vector<std::string> names);
  ~Engine();
  Engine(const Engine&) = delete;

  int rank() const { return at_.rank; }
  int size() const { return at_.size; }

  // Any thread. Checks what can be checked here; throws UsageError, or the failure that ended the
  // engine. What is refused for what it asks, or comes with a refusal, is also refused on the ranks
  // that make the same call.
  HandlePtr submit(RequestPtr request, Urgency urgency) {
    return door_.submit(std::move(request), urgency);
  }
  // Blocks until the handle is done or the time is up; true when done. Any thread. The time is up
  // between exchanges only: in one that gets nowhere this thread asks now and then whether it was
  // interrupted, which ends the engine.
  bool wait(const Handle& handle, double timeout_s, const Interrupted& interrupted = {});
  // The same until it has its values. It leaves the work to the coordination thread, which goes on
  // with it afterwards.
  bool wait_values(const Handle& handle, double timeout_s) {
    return door_.wait_values(handle, timeout_s);
  }

  // Memory that exchanges with the ranks of this machine need not copy: zeros, on a cache line,
  // shared if anything is. Any thread.
  std::shared_ptr<char> allocate(size_t nbytes);

  // Ranks of a process set; throws UsageError when there is none.
  std::vector<int> ranks_of(int32_t set) { return door_.ranks_of(set); }
  // Whether an allreduce of this process set takes as long for memory that only this process sees.
  bool exchanges_anywhere(int32_t set);
  // A number for each member, which those that share memory have in common.
  std::vector<int> nodes_of(int32_t set);

  // Stops taking requests, tells the others, fails what is open. Rank 0 goes on coordinating
  // until the last rank has stopped; wait_stopped() is true when this rank is through.
  void stop() { door_.stop(); }
  bool wait_stopped(double timeout_s) { return door_.wait_stopped(timeout_s); }
  FailurePtr failure() const { return door_.failure(); }  // what ended the engine, or null
  // This process is a forked child, which has neither the sockets nor the thread: who submits or
  // waits here is refused.
  void abandon() { door_.become_child(); }

  // Any thread. Says what is worth knowing of what uses this engine.
  void tell(const std::string& text) const { at_.log.write(LogLevel::kInfo, text); }
  // Any thread.
  Runner::Counters counters() const { return runner_.counters(); }
  void touch(int64_t nbytes) { runner_.touch(nbytes); }
  int64_t message_count() const { return agreement_.message_count(); }

 private:
  friend class EngineWaiter;

  void coordinate();  // the coordination thread
  void drive(const Handle* until, double deadline_s);
  bool turn(int timeout_us);
  bool try_turn(int timeout_us);
  void receive(int timeout_us);
  void handle(const Message& message);
  FailurePtr verdict_on(FailurePtr failure);
  void poison(FailurePtr failure);
  void fail_everything(const FailurePtr& failure);
  bool stopped();
  bool try_stop();

  Station at_;
  Door door_;
  Agreement agreement_;
  EngineWaiter waiter_;
  Runner runner_;
  Watch watch_;

  // Of who drives.
  Patience patience_;  // of a caller, until something is agreed
  double heard_s_ = 0;
  bool watchful_ = false;  // the coordination thread looks from time to time
  double all_left_s_ = 0;  // rank 0
  std::vector<Message> inbox_;

  // Made ahead: there may be no memory for it when it is needed.
  const FailurePtr speechless_ =
      make_failure(ErrorKind::kInternal, "this rank has failed, and could not even say why");

  std::thread thread_;  // last: starts when everything else is there
};

}  // namespace bagua
