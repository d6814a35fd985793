// Carries out what was agreed on, one exchange after the other. Between hosts the next ones begin
// while this rank waits in the first. Only who drives is here; counters are for any thread.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "collective/collective.h"
#include "common/crew.h"
#include "engine/agreement.h"
#include "engine/allreduce.h"
#include "engine/exchange.h"
#include "engine/nccl_exchange.h"
#include "engine/staging.h"
#include "engine/station.h"

namespace bagua {

class Runner {
 public:
  // `waiter` is how it waits inside an exchange.
  Runner(const Station& station, Door& door, Agreement& agreement, Waiter& waiter);

  // Nothing is under way or lined up.
  bool idle() const { return under_way_.empty() && tasks_.empty(); }
  bool in_exchange() const { return !under_way_.empty(); }
  // Lines up what was decided next.
  void accept_next();
  // Carries out the first of what is lined up. Whether that was the last one of what was agreed on
  // at once.
  bool take_task();

  // ---- while it waits in an exchange ----
  // Reports small requests once only: what comes later may share an exchange with what comes then.
  // Large ones may begin before this exchange ends.
  void take_ahead();
  // Does what it can for one of those that have begun ahead, or begins one more, so that links are
  // busy. Whether that was anything. Not more at a time, for others wait for this rank, too.
  bool work_ahead();
  // What it waits in, for errors.
  std::string label() const;

  // ---- at the end ----
  // A broken exchange: what may still be read or written by anybody is never freed.
  void let_go();
  // All that was lined up or under way is given up.
  std::vector<RequestPtr> give_up();

  // What is done for the engine, but not for the devices.
  bool on_device() const { return nccl_ && nccl_->under_way(); }
  bool captures() const { return nccl_ && nccl_->captures(); }
  NcclExchange* nccl() const { return nccl_.get(); }  // null until there is something for it
  // Frees what nothing needs any more; between exchanges.
  void tidy();
  // Throws a PeerError if a device has noticed a failure. While on one.
  void check_device() { nccl_->sets().check(); }
  // Lets devices send what others wait for, the last time. Whether that is all.
  bool finish_on_device();

  // ---- any thread ----
  struct Counters {
    int64_t sent_nbytes;  // by this rank, in exchanges
    int64_t exchanges;
    int64_t helped;          // how often a helper has joined in a reduction
    int64_t touched_nbytes;  // of memory read and written for exchanges
    int64_t codec_us;        // that codecs took, on CPUs
  };
  Counters counters() const;
  // So many bytes more, by whoever brings values to where they are exchanged.
  void touch(int64_t nbytes) { touched_nbytes_.fetch_add(nbytes, std::memory_order_relaxed); }

 private:
  // The carrying out of one task.
  struct Exchange {
    Exchange(Runner& runner, const Task& task);
    Exchange(const Exchange&) = delete;
    void end();
    bool count();
    void tell_odd() const;
    void announce() const;

    Runner& runner;
    const Task task;
    const std::vector<RequestPtr>& requests;
    const size_t place;  // of its memory for intermediate results
    Group group;
    Workbench bench;
    Work counted;                        // what the counters have already
    std::optional<Allreduce> allreduce;  // if it has begun ahead
  };

  bool may_begin(const Task& next) const;
  size_t free_place();
  Exchange& open_exchange();
  void carry_out(Exchange& exchange);
  static bool leave_alone(const Exchange& exchange);
  void furnish(Request& request);
  Staging* staging_for(const std::vector<RequestPtr>& requests);
  NcclExchange* nccl_for(int32_t set, const std::vector<RequestPtr>& requests, Group& group,
                         const Workbench& bench);
  void tell_choice(const Collective& row, const Job& job);
  void run_special(Request& request);
  void take_back(const Request& request);

  const Station& at_;
  Door& door_;
  Agreement& agreement_;
  Waiter& waiter_;
  const Choice allreduce_;
  std::array<std::unique_ptr<Scratch>, kTracks> scratch_;  // by place of an exchange
  std::unique_ptr<Staging> staging_;                       // of the process's device
  std::unique_ptr<NcclExchange> nccl_;
  std::unique_ptr<Crew> crew_;  // while a caller waits, this rank's other cores are idle
  std::deque<Task> tasks_;      // that have not begun
  bool held_back_ = false;      // the first of them, until an exchange ends
  bool took_ahead_ = false;     // small requests, during the last exchange of those agreed on
  // The first one is carried out; the others have begun ahead.
  std::deque<std::unique_ptr<Exchange>> under_way_;
  std::unordered_set<const Collective*> chosen_;
  std::atomic<int64_t> sent_nbytes_{0}, touched_nbytes_{0}, codec_us_{0}, exchange_count_{0};
};

}  // namespace bagua
