// The engine of one rank: takes requests from any thread, agrees with the other ranks what is
// ready, and exchanges it.
//
// One thread at a time *drives*: the coordination thread, which sleeps in the kernel while there
// is nothing to do, or a thread that waits for a handle, which saves two hand-overs. Members
// below are owned by the driver unless they say mutex_.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "common/config.h"
#include "common/log.h"
#include "control/channel.h"
#include "engine/allreduce.h"
#include "engine/exchange.h"
#include "engine/ledger.h"
#include "engine/liveness.h"
#include "engine/nccl_exchange.h"
#include "engine/patience.h"
#include "engine/request.h"
#include "engine/schedule.h"

namespace bagua {

// Somebody's word on who failed, as opposed to a mere symptom.
struct Verdict : PeerError {
  using PeerError::PeerError;
};

class Engine {
 public:
  // `names` says where each rank runs, for errors: "rank 2 (host b, pid 17)".
  Engine(const Config& config, std::unique_ptr<Transport> transport,
         std::unique_ptr<Channel> channel, std::vector<std::string> names);
  ~Engine();
  Engine(const Engine&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // How soon others should hear of a request.
  enum class Urgency {
    kNow,     // a full bucket: exchange it while the caller computes
    kSoon,    // more may follow at once: wait a moment for company
    kWaited,  // the caller waits for it next, and drives
  };
  // Any thread. Checks what can be checked here; throws UsageError, or the failure that ended the
  // engine. What is refused for what it asks, or comes with a refusal, is also refused on the ranks
  // that make the same call.
  HandlePtr submit(RequestPtr request, Urgency urgency);

  // Blocks until the handle is done or the time is up; true when done. Any thread. The time is up
  // between exchanges only: in one that gets nowhere this thread asks now and then whether it was
  // interrupted, which ends the engine.
  using Interrupted = std::function<bool()>;
  bool wait(const Handle& handle, double timeout_s, const Interrupted& interrupted = {});
  // The same until it has its values. It leaves the work to the coordination thread, which goes on
  // with it afterwards.
  bool wait_values(const Handle& handle, double timeout_s);

  // Memory that exchanges with the ranks of this machine need not copy: zeros, on a cache line,
  // shared if anything is. Any thread.
  std::shared_ptr<char> allocate(size_t nbytes);

  // Whether an allreduce of this process set takes as long for memory that only this process sees.
  bool exchanges_anywhere(int32_t set);
  // A number for each member, which those that share memory have in common.
  std::vector<int> nodes_of(int32_t set);

  // Ranks of a process set; throws UsageError when there is none or this rank is not in it.
  std::vector<int> ranks_of(int32_t set);

  // Stops taking requests, tells the others, fails what is open. Rank 0 goes on coordinating
  // until the last rank has stopped; stopped() becomes true when this rank is through.
  void stop();
  bool wait_stopped(double timeout_s);
  FailurePtr failure();  // what ended the engine, or null
  // This process is a forked child, which has neither the sockets nor the thread: who submits or
  // waits here is refused.
  void abandon() { in_child_ = true; }

  // Bytes this rank has sent in exchanges, and exchanges run. Any thread.
  int64_t sent_nbytes() const { return sent_nbytes_.load(std::memory_order_relaxed); }
  // How often a helper has joined in a reduction.
  int64_t helped_count() const { return crew_ ? crew_->joined() : 0; }
  // Bytes of memory read and written for exchanges.
  int64_t touched_nbytes() const { return touched_nbytes_.load(std::memory_order_relaxed); }
  // So many more, by whoever brings values to where they are exchanged.
  void touch(int64_t nbytes) { touched_nbytes_.fetch_add(nbytes, std::memory_order_relaxed); }
  // Microseconds that codecs took, on CPUs.
  int64_t codec_us() const { return codec_us_.load(std::memory_order_relaxed); }
  int64_t exchange_count() const { return exchange_count_.load(std::memory_order_relaxed); }
  int64_t message_count() const { return message_count_.load(std::memory_order_relaxed); }

 private:
  friend class EngineWaiter;
  struct Entry {
    std::string name;
    Description description;
    int64_t nbytes = 0;
    int64_t rounds = 0;  // exchanges since it was agreed first
    RequestPtr open;     // named entries: the request that was reported
  };
  // What this rank knows of one process set.
  struct Set {
    std::vector<int> ranks;
    int me = -1;
    std::vector<Entry> entries;                         // by id
    std::unordered_map<std::string, int32_t> by_name;   // named
    std::unordered_map<std::string, int32_t> by_bytes;  // unnamed, by encoded description
    std::map<Key, RequestPtr> open;                     // reported in full, or unnamed
    Report report;                                      // being gathered
    RequestPtr joining;
    int track = 0;         // of its next exchange
    bool removed = false;  // kept until nothing of it is open
  };

  // What was agreed on to be exchanged together.
  struct Task {
    int32_t set = 0;
    int track = 0;
    std::vector<RequestPtr> requests = {};
    int64_t nbytes = 0;
    int last_joined = -1;  // without requests: a rank, after which nobody is left to join
    bool last = false;     // of what was agreed on at once
  };
  // The carrying out of one.
  struct Exchange {
    Exchange(Engine& engine, const Task& task);
    Exchange(const Exchange&) = delete;
    void end();
    bool count();
    void tell_odd() const;

    Engine& engine;
    const Task task;
    const std::vector<RequestPtr>& requests;
    const size_t place;  // of its memory for intermediate results
    Group group;
    Workbench bench;
    Work counted;                        // what the counters have already
    std::optional<Allreduce> allreduce;  // if it has begun ahead
  };

  // Guarded by mutex_: the part of a process set that submitters use.
  struct Door {
    std::vector<int> ranks;
    uint64_t next_seq = 1;
    std::unordered_set<std::string> names;  // in flight
  };

  // engine.cc
  void refuse_in_child() const;
  void coordinate();  // the coordination thread
  bool due();
  void stand_in_for_caller(std::unique_lock<std::mutex>& lock);
  void drive(const Handle* until, double deadline_s);
  bool turn(int timeout_us);
  void receive(int timeout_us);
  void handle(const Message& message);
  std::shared_ptr<Arenas> arenas() const;
  bool anything_open() const { return open_count_ > 0; }
  // What is done for the engine, but not for the devices.
  bool on_device() const { return nccl_ && nccl_->under_way(); }
  std::string name_of(int rank) const;

  // engine_agreement.cc
  bool take_submissions(int64_t least_nbytes = 0);
  void take_ahead();
  void report(const RequestPtr& request);
  void turn_away(const RequestPtr& request);
  void send_reports();
  void decide(bool everything = false);
  void accept_next();
  void line_up(int32_t id, const std::vector<Decision::Agreed>& agreed,
               std::vector<Entry>& forgotten);
  RequestPtr take_open(Set& set, int32_t id, const Key& key);
  void forget_removed();

  // engine_exchange.cc
  bool take_task();
  bool work_ahead();
  bool may_begin(const Task& next) const;
  size_t free_place();
  Exchange& open_exchange();
  void carry_out(Exchange& exchange);
  Staging* staging_for(const std::vector<RequestPtr>& requests);
  NcclExchange* nccl_for(int32_t id, const std::vector<RequestPtr>& requests, Group& group,
                         const Workbench& bench);
  void tell_choice(const Collective& row, const Job& job);
  RequestPtr stand_in(const Set& set, const Entry& entry);
  void count_past(int32_t id, uint64_t seq);
  void run_special(Request& request);
  void finish_join(int32_t id, int last_joined);
  void announce(const Exchange& exchange);
  void complete(const std::vector<RequestPtr>& requests, const FailurePtr& failure);

  // engine_failure.cc
  static std::string refuse(const Request& request);
  std::string refuse_in(const Request& request, const std::vector<int>& ranks);
  void tick();
  void lose(int rank, const std::string& how);
  void look_for_stalls(double now);
  void look_for_stragglers(double now);
  void look_at_device(double now);
  void check_progress(double waited_s, int peer, double& warned_s);
  bool ask_caller();
  FailurePtr verdict_on(FailurePtr failure);
  void poison(FailurePtr failure);
  void let_go_of_exchange();
  void fail_everything(const FailurePtr& failure);
  bool finish_on_devices();
  bool try_stop();

  const Config config_;
  const Choice allreduce_;
  const std::unique_ptr<Transport> transport_;
  const std::unique_ptr<Channel> channel_;
  const std::vector<std::string> names_;
  const int rank_;
  const int size_;
  const Log log_;

  std::unique_ptr<Ledger> ledger_;  // rank 0 only
  Liveness liveness_;
  Patience patience_;  // of a caller that drives, until something is agreed
  double stopping_since_s_ = 0;
  double heard_s_ = 0;
  std::unique_ptr<Waiter> waiter_;
  std::array<std::unique_ptr<Scratch>, kTracks> scratch_;  // by place of an exchange
  std::unique_ptr<Staging> staging_;                       // of the process's device
  Device* device_ = nullptr;                               // on which this rank has had tensors
  std::unique_ptr<NcclExchange> nccl_;
  std::unique_ptr<Crew> crew_;  // while a caller waits, this rank's other cores are idle
  std::map<int32_t, Set> sets_;
  int32_t next_set_ = 1;
  std::vector<int32_t> removed_;  // of sets_
  std::vector<Message> inbox_;
  std::vector<RequestPtr> taken_;
  std::deque<Decision> decisions_;
  std::vector<RequestPtr> agreed_;  // on, and no tasks yet
  std::deque<Task> tasks_;          // that have not begun
  bool held_back_ = false;          // the first of them, until an exchange ends
  bool took_ahead_ = false;         // small requests, during the last exchange of those agreed on
  int64_t open_count_ = 0;          // requests reported and not done
  double open_since_s_ = 0;
  double ticked_s_ = 0;
  double warned_s_ = 0, device_warned_s_ = 0;
  // The first one is carried out; the others have begun ahead.
  std::deque<std::unique_ptr<Exchange>> under_way_;
  std::unordered_set<const Collective*> chosen_;
  std::vector<bool> left_;  // by rank: shut down or gone, as far as this rank hears
  bool stopping_now_ = false;
  bool caller_drives_ = false;                // a waiting thread does, not the coordination thread
  const Interrupted* interrupted_ = nullptr;  // that thread's
  double asked_s_ = 0;                        // when it was last asked

  std::mutex mutex_;
  std::condition_variable changed_;      // a handle is done, or nobody drives
  std::vector<RequestPtr> submissions_;  // mutex_
  bool urgent_ = false;                  // mutex_: among submissions_ is one that should go now
  double submitted_s_ = 0;               // mutex_: time of the last that may wait for company
  int64_t submitted_nbytes_ = 0;         // mutex_
  std::map<int32_t, Door> doors_;        // mutex_
  bool driven_ = false;                  // mutex_
  // mutex_: who drives asks its caller, and lends the engine to the coordination thread, which
  // leaves what went wrong.
  bool asks_ = false, lent_ = false;
  std::exception_ptr trouble_;
  std::atomic<bool> in_child_{false};
  bool stopping_ = false;        // mutex_
  bool abandoned_ = false;       // mutex_: stop without waiting for others
  bool stopped_ = false;         // mutex_
  FailurePtr failure_;           // mutex_
  std::atomic<int> waiting_{0};  // threads in wait() that do not drive
  std::atomic<int64_t> sent_nbytes_{0}, touched_nbytes_{0}, codec_us_{0};
  std::atomic<int64_t> exchange_count_{0}, message_count_{0};

  std::thread thread_;  // last: starts when everything else is there
};

}  // namespace bagua
