// Where threads meet the one that drives the engine: what they submit, what they wait for, and
// whose turn it is to drive: all that they change in common, under one mutex.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "engine/request.h"
#include "engine/station.h"

namespace bagua {

// How soon others should hear of a request.
enum class Urgency {
  kNow,     // a full bucket: exchange it while the caller computes
  kSoon,    // more may follow at once: wait a moment for company
  kWaited,  // the caller waits for it next, and drives
};

// Whether a caller that waits should do so no longer.
using Interrupted = std::function<bool()>;

class Door {
 public:
  explicit Door(const Station& station);

  // ---- any thread ----
  HandlePtr submit(RequestPtr request, Urgency urgency);
  std::vector<int> ranks_of(int32_t set);  // throws UsageError when there is none
  FailurePtr failure() const;

  enum class Wait {
    kDone,
    kLate,   // the time is up
    kDrive,  // nobody drives: the caller does, until it leaves the driving to others
  };
  Wait wait(const Handle& handle, double deadline_s, const Interrupted& interrupted);
  // Leaves the driving to the coordination thread. False when the time is up.
  bool wait_values(const Handle& handle, double timeout_s);

  void stop();     // requests are refused from now on
  void end_now();  // and nobody waits for other ranks
  bool wait_stopped(double timeout_s);
  // This process is a forked child, which has neither the sockets nor the thread: who submits or
  // waits is refused.
  void become_child() { in_child_ = true; }

  // ---- the coordination thread ----
  enum class Turn {
    kDrive,
    kStop,  // drive, and see to the end
    kLent,  // a caller that drives had lent it the engine, to look after, and has it back
  };
  // Waits until nobody else drives, or somebody lends.
  Turn take_over(const std::function<void()>& look);
  // The driving is over, and so is all else if `through`. Whether something came meanwhile.
  bool hand_back(Turn turn, bool through);

  // ---- a caller that drives ----
  // The driving is over, though more is to do if `more`.
  void hand_on(bool more);

  // ---- whoever drives ----
  bool caller_drives() const { return caller_drives_; }
  bool anybody_waits() const { return caller_drives_ || waiting_ > 0; }
  bool has_submissions() const;
  bool stopping() const;
  bool ends_now() const;
  // Appends what was submitted, if it is so many bytes, and nothing is gained by waiting for more.
  // Whether that was anything.
  bool take(std::vector<RequestPtr>& into, int64_t least_nbytes);
  // All of it.
  void take_rest(std::vector<RequestPtr>& into);
  void announce(const std::vector<RequestPtr>& requests);  // they have their values
  void complete(const std::vector<RequestPtr>& requests, const FailurePtr& failure);
  // False if it had failed already.
  bool fail(const FailurePtr& failure);
  void add_set(int32_t id, const std::vector<int>& ranks);
  void remove_set(int32_t id);
  // Unnamed requests of the others, so that who has joined goes on where they are.
  void count_past(int32_t set, uint64_t seq);
  // Whether the caller that drives was interrupted. Its answer may take long, for it may need a
  // lock that others hold: the coordination thread looks after the engine meanwhile.
  bool can_ask() const { return interrupted_ != nullptr; }
  bool ask();

 private:
  // What submitters see of a process set.
  struct Set {
    std::vector<int> ranks;
    uint64_t next_seq = 1;
    std::unordered_set<std::string> names;  // in flight
  };

  void refuse_in_child() const;
  Set& set_at(int32_t id);
  bool due() const;
  void append_submissions(std::vector<RequestPtr>& into);
  void look_after(std::unique_lock<std::mutex>& lock, const std::function<void()>& look);

  const Station& at_;
  std::atomic<bool> in_child_{false};
  std::atomic<int> waiting_{0};  // threads that do not drive
  // Of who drives.
  bool caller_drives_ = false;
  const Interrupted* interrupted_ = nullptr;

  // All else is under this.
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a handle is done, or nobody drives
  std::vector<RequestPtr> submissions_;
  bool urgent_ = false;     // among them is one that should go now
  double submitted_s_ = 0;  // time of the last that may wait for company
  int64_t submitted_nbytes_ = 0;
  std::map<int32_t, Set> sets_;
  bool driven_ = false;
  // Who drives asks its caller, and lends the engine to the coordination thread, which leaves what
  // went wrong.
  bool asks_ = false, lent_ = false;
  std::exception_ptr trouble_;
  bool stopping_ = false, ends_now_ = false, stopped_ = false;
  FailurePtr failure_;
};

}  // namespace bagua
