// Rank 0's book of who is ready for what. Pure: reports go in, decisions come out in one order
// that holds for the whole job, so that members of overlapping process sets never wait for each
// other in a circle. Nothing here knows threads, time-outs or messages.
//
// Nomenclature: a *member* is an index into a process set's ranks. A request is *open* from the
// first member's report to the decision. An *entry* is a request that was agreed once and has an
// id; for a named entry a later report is one bit, and agreement is the AND over the members' bits.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/messages.h"

namespace bagua {

class Ledger {
 public:
  // The world is process set 0.
  explicit Ledger(int world_size);

  void report(int rank, const Report& report, double now_s);
  // The rank shut down: whatever needs it is rejected, now and later.
  void leave(int rank);

  // Decisions since the last call, in order. Those about requests in the background are held back,
  // unless `everything` is to go out: the next one comes when asked for.
  std::vector<Decision> take(bool everything = false);
  bool has_background() const { return !background_.empty(); }
  Decision take_background();
  const std::vector<int>& ranks_of(int32_t set) const;
  size_t set_count() const { return sets_.size(); }
  // Of a rank's last report.
  double heard_s(int rank) const { return heard_s_[static_cast<size_t>(rank)]; }

  // Requests that have been open for longer than age_s. A join waits while others work, so it is
  // one as long as all who have not joined have said nothing.
  struct Stall {
    int32_t set;
    Key key;
    std::string label;         // with the process set, if it is not the world
    std::vector<int> missing;  // ranks
    std::vector<int> waiting;  // ranks that are ready, or will be when a refusal is settled
    double since_s;
    bool background = false;  // others go on meanwhile, however long a rank takes
  };
  std::vector<Stall> stalls(double now_s, double age_s) const;
  // Gives a stalled request up, with an error on every rank that waits, and on a missing one when
  // it comes: what it brings must not meet what the others bring next.
  void give_up(const Stall& stall, const std::string& text, double now_s);
  bool any_open() const;

 private:
  struct Entry {
    std::string name;
    Description description;
    size_t ready = 0;         // members whose bit is set
    double open_since_s = 0;  // 0: none
  };
  // A request on its way to an entry, or one that somebody changed.
  struct Arrival {
    int description;  // index into Pending::descriptions, -1 for a refusal
    std::string refusal;
  };
  struct Pending {
    std::vector<std::optional<Arrival>> arrivals;  // by member
    std::vector<std::string> descriptions;         // distinct ones, encoded
    double since_s = 0;                            // 0: nobody waits, who came was refused
    size_t count = 0;
    // A member that already arrived and reports again (its first try was refused) waits here.
    std::deque<std::pair<int, Report::Full>> later;
    // What users know it by.
    std::string label(const Key& key) const;
    bool background() const;
    bool of_several_steps() const;
  };
  // What others have given up, for a member that has not come to it yet.
  struct GivenUp {
    std::string text;
    double at_s;
  };
  struct Set {
    std::vector<int> ranks;
    bool removed = false;        // kept until every member has had its last word
    std::vector<Entry> entries;  // by id
    std::unordered_map<std::string, int32_t> by_name;   // named entries
    std::unordered_map<std::string, int32_t> by_bytes;  // unnamed entries, by description
    std::vector<std::vector<uint64_t>> bits;            // by member, one bit per named entry
    std::map<Key, Pending> pending;
    std::map<std::pair<int, Key>, GivenUp> given_up;  // by member, too
    std::vector<bool> joined, left;                   // by member
    size_t joined_count = 0;
    bool anyone_left = false;
    double joined_since_s = 0;                                   // of the first
    int last_joined = -1;                                        // rank
    std::vector<std::pair<std::string, std::string>> withdrawn;  // beginnings of names, and why

    // Whether nothing can be settled yet, as far as numbers tell. Of a thousand members' reports
    // only the last should look at all of them.
    bool surely_waits(size_t arrived) const;
    int member_of(int rank) const;
    std::string why_withdrawn(const std::string& name) const;  // empty: it is not
    std::vector<int> with_bit(int32_t id) const;               // ranks
    std::vector<int> arrived(const Pending& pending) const;    // ranks, without refusals
    std::vector<int> waiting(const Pending& pending) const;    // those, and who came later
    bool bit(int member, int32_t id) const;
    // While some have joined, all that is objected to is so because of them.
    ErrorKind objects_as() const { return joined_count ? ErrorKind::kJoined : ErrorKind::kUsage; }
    void clear_bit(int member, int32_t id);
    void set_bit(int member, int32_t id);
    // Members that meet in what was begun after they missed each other are not late any more.
    void meet(const Description& description, double since_s);
    void forget_given_up(const std::function<bool(int member, double at_s)>& which);
  };

  Decision& decision(int32_t set);
  void turn_down(int32_t set, const Key& key, ErrorKind kind, const std::string& why,
                 std::vector<int> ranks, std::string label = "");
  void hold_back(Decision& decision);
  void reject(const Stall& stall, const std::string& text);
  bool comes_late(int32_t set, int member, const Key& key, bool waits);
  void turn_away(int rank, const Report& report);
  void forget_removed();
  void arrive(int32_t set, int member, const Report::Full& full, double now_s);
  void withdraw(int32_t set, int member, const Report::Full& full);
  void arrive_bit(int32_t set, int member, int32_t id, double now_s);
  void gather_bits(Set& s, int32_t id, Pending& pending);
  void settle_bits(int32_t set, int32_t id);
  void settle_pending(int32_t set, std::map<Key, Pending>::iterator it);
  void settle_all(int32_t set);
  void resolve(int32_t set, const Key& key, Pending& pending);
  void agree(int32_t set, const Key& key, const std::string& bytes);
  std::string objection(int32_t set, const Description& description) const;
  std::string mismatch(const Set& s, const Pending& pending) const;
  void join(int32_t set, int member, double now_s);
  std::optional<Stall> join_stall(int32_t set) const;
  void reject_joins(const Stall& stall, const std::string& text);
  void settle_join(int32_t set);
  static void forget_joins(Set& s);
  void apply(int32_t set, const Description& description);

  std::map<int32_t, Set> sets_;
  std::vector<double> heard_s_;  // by rank: its last report
  int32_t next_set_ = 1;
  std::vector<int32_t> removed_;  // of which a member may yet report something
  std::vector<Decision> decisions_;
  std::deque<std::pair<int32_t, Decision::Agreed>> background_;  // with the process set
};

// Whether an operation of this kind can go on while some members have joined.
bool allows_joined(OpKind kind);

}  // namespace bagua
