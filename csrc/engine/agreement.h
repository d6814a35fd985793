// What a rank tells rank 0, what rank 0 tells everyone, and what this rank knows of each process
// set by that. Only who drives is here; counters are for any thread.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/door.h"
#include "engine/ledger.h"
#include "engine/messages.h"
#include "engine/request.h"
#include "engine/station.h"

namespace bagua {

// What was agreed on to be exchanged together.
struct Task {
  int32_t set = 0;
  int track = 0;
  std::vector<RequestPtr> requests = {};
  int64_t nbytes = 0;
  int last_joined = -1;  // without requests: a rank, after which nobody is left to join
  bool last = false;     // of what was agreed on at once
};

class Agreement {
 public:
  Agreement(const Station& station, Door& door);

  // ---- what others hear ----
  // Reports what was submitted, if it is so many bytes. Whether that was anything.
  bool take_submissions(int64_t least_nbytes = 0);
  // Where rank 0 coordinates: tells everyone what is decided. What runs in the background does so
  // one by one, when there is nothing else: when this rank, too, is idle.
  void decide(bool idle);
  void decide_everything();
  // Gives up on what some wait for; see Ledger.
  void give_up(const Ledger::Stall& stall, const std::string& text, double now_s) {
    ledger_->give_up(stall, text, now_s);
  }

  // ---- what this rank hears ----
  void hear(int from, MessageType type, Reader& r);  // a report or a decision
  bool has_decisions() const { return !decisions_.empty(); }
  // The next decision: appends what is to be exchanged, in that order.
  void accept_next(std::deque<Task>& tasks);

  // What rank 0 and this rank have said to each other; on rank 0 what it has with that one.
  const Traffic& traffic_with(int rank) const { return traffic_[static_cast<size_t>(rank)]; }

  // ---- process sets ----
  struct Members {
    const std::vector<int>& ranks;
    int me;  // this rank's place among them, or -1
  };
  Members members_of(int32_t set) const;
  int32_t add_set(const std::vector<int64_t>& ranks);
  void remove_set(int32_t id);
  // Those removed, once rank 0 has answered to what was open in them.
  void forget_removed();

  // ---- requests ----
  bool anything_open() const { return open_count_ > 0; }  // reported and not done
  double open_since_s() const { return open_since_s_; }   // without a break
  double ended_s() const { return ended_s_; }             // when one of them did last
  void complete(const std::vector<RequestPtr>& requests, const FailurePtr& failure);
  void finish_join(int32_t set, int last_joined);
  // Every open request gets the failure, also those nobody has looked at yet, and these.
  void fail_everything(std::vector<RequestPtr> lined_up, const FailurePtr& failure);

  // ---- who is left ----
  const Ledger* ledger() const { return ledger_.get(); }  // rank 0 only
  bool has_background() const { return ledger_ && ledger_->has_background(); }
  // It has shut down or is gone, as far as this rank hears.
  void leave(int rank);
  bool has_left(int rank) const { return left_[static_cast<size_t>(rank)]; }
  bool all_have_left() const;

  int64_t message_count() const { return message_count_.load(std::memory_order_relaxed); }

 private:
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

  void report(const RequestPtr& request);
  void turn_away(const RequestPtr& request);
  void send_reports();
  void send(std::vector<Decision> decisions);
  void define(Set& set, const Decision& decision, std::vector<Entry>& forgotten);
  void reject(int32_t id, Set& set, const Decision::Rejection& rejection);
  void line_up(int32_t id, const std::vector<Decision::Agreed>& agreed,
               std::vector<Entry>& forgotten, std::deque<Task>& tasks);
  RequestPtr take_open(Set& set, int32_t id, const Key& key);
  RequestPtr stand_in(const Set& set, const Entry& entry);

  const Station& at_;
  Door& door_;
  const std::unique_ptr<Ledger> ledger_;
  std::vector<RequestPtr> taken_;  // and not all of them reported
  std::deque<Decision> decisions_;
  std::vector<RequestPtr> agreed_;  // on, and no tasks yet
  std::map<int32_t, Set> sets_;
  int32_t next_set_ = 1;
  std::vector<int32_t> removed_;  // of sets_
  Device* device_ = nullptr;      // on which this rank has had tensors
  int64_t open_count_ = 0;
  double open_since_s_ = 0, ended_s_ = 0;
  std::vector<bool> left_;        // by rank
  std::vector<Traffic> traffic_;  // likewise
  std::atomic<int64_t> message_count_{0};
};

}  // namespace bagua
