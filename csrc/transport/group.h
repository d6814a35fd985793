// The ranks that take part in one exchange, seen from one of them. Collectives speak only to this.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "common/scaled.h"
#include "transport/node.h"
#include "transport/transport.h"

namespace bagua {

// What a rank has done, for the counters.
struct Work {
  int64_t sent_nbytes = 0;
  int64_t touched_nbytes = 0;
  double codec_s = 0;
};

// Whose values held a NaN or an Inf that came through to what was reduced here.
struct OddRanks {
  static constexpr int kSome = -1;  // nobody knows whose

  void add(int rank) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
  }
  std::vector<int> ranks;
};

class Group {
 public:
  // `ranks` are transport ranks in ascending order; `me` is an index into them. Messages travel on
  // this track.
  Group(Transport& transport, Waiter& waiter, std::vector<int> ranks, int me, int track = 0)
      : transport_(transport),
        waiter_(waiter),
        ranks_(std::move(ranks)),
        me_(me),
        track_(track),
        node_(transport.node()) {
    for (size_t i = 0; node_ && i < ranks_.size(); ++i) {
      node_indices_.push_back(node_->index_of(ranks_[i]));
      if (node_indices_.back() < 0) node_ = nullptr;
    }
  }
  // Some of them, by index, ascending; this rank is one.
  Group part(const std::vector<int>& indices) const {
    std::vector<int> ranks;
    int me = -1;
    for (const int i : indices) {
      if (i == me_) me = static_cast<int>(ranks.size());
      ranks.push_back(ranks_[i]);
    }
    Group part(transport_, waiter_, std::move(ranks), me, track_);
    part.odd_ = odd_;
    return part;
  }
  // What a part of this group has done is done by it.
  void count(const Group& part) {
    work_.sent_nbytes += part.work_.sent_nbytes;
    work_.touched_nbytes += part.work_.touched_nbytes;
    work_.codec_s += part.work_.codec_s;
  }
  bool on_shared_nodes() const { return bagua::on_shared_nodes(transport_, ranks_); }
  // Equal for those that share memory.
  int node_of(int index) const { return transport_.node_of(ranks_[index]); }
  Group(Group&&) = default;
  Group(const Group&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  int me() const { return me_; }
  int rank_of(int index) const { return ranks_[index]; }
  // The peer `distance` places to the right, round the ring.
  int neighbor(int distance) const { return (me_ + distance % size() + size()) % size(); }

  Ticket send(int index, const void* data, size_t nbytes) {
    work_.sent_nbytes += static_cast<int64_t>(nbytes);
    touch(nbytes);
    return transport_.send(ranks_[index], track_, data, nbytes);
  }
  Ticket recv(int index, void* data, size_t nbytes) {
    touch(nbytes);
    return transport_.recv(ranks_[index], track_, data, nbytes);
  }

  // As Transport::done.
  bool done(Ticket ticket) { return transport_.done(ticket); }
  // Waits for one message.
  void wait(Ticket ticket) {
    wait_until([&] { return transport_.done(ticket); }, transport_.peer_of(ticket));
  }
  // Whether a message is there, which may be asked again: its ticket is kNoTicket then. Waits for
  // it, where it may.
  bool here(Ticket& ticket, bool waits) {
    if (ticket == kNoTicket) return true;
    if (waits) {
      wait(ticket);
    } else if (!transport_.done(ticket)) {
      return false;
    }
    ticket = kNoTicket;
    return true;
  }
  // Waits until a condition holds; `peer` is whose doing that is, if it is one rank's.
  template <class Reached>
  void wait_until(Reached&& reached, int peer = -1) {
    if (reached()) return;
    waiter_.begin(peer);
    do waiter_.pause(nullptr);
    while (!reached());
  }

  // ---- where all of them are on one node -------------------------------------------------------

  // Null if they are not, or share no memory.
  Node* node() const { return node_; }
  // Everyone has come this far: what they wrote before can be read, what they read overwritten.
  // Returns what each of them noted; my own note is not among it.
  std::vector<Note> step(const Note& note = {}) {
    return step_with([&](int) -> const Note& { return note; });
  }
  // The same; rank i gets note_for(i).
  template <class NoteFor>
  std::vector<Note> step_with(NoteFor&& note_for) {
    std::vector<Note> notes(ranks_.size());
    for (int d = 1; d < size(); ++d) node_->tell(node_indices_[neighbor(d)], note_for(neighbor(d)));
    for (int d = 1; d < size(); ++d) notes[neighbor(d)] = hear_peer(node_indices_[neighbor(d)]);
    return notes;
  }
  // A step that nobody waits for now; settle() does, before memory that was looked at is used
  // again.
  void leave() {
    for (int d = 1; d < size(); ++d) {
      const int peer = node_indices_[neighbor(d)];
      node_->tell(peer);
      node_->owes(peer) = true;
    }
  }
  void settle() {
    for (int peer = 0; peer < node_->size(); ++peer)
      if (std::exchange(node_->owes(peer), false)) hear_peer(peer);
  }
  char* at(int index, const Place& place) { return node_->at(node_indices_[index], place); }

  // ---- what this rank does, for the counters ---------------------------------------------------

  // So many bytes of memory are read or written. A message counts once at either end, however
  // often the transport copies it. Who never has to wait for long looks around here: see
  // Waiter::look.
  void touch(size_t nbytes) {
    work_.touched_nbytes += static_cast<int64_t>(nbytes);
    if (work_.touched_nbytes < look_at_) return;
    look_at_ = work_.touched_nbytes + kLookNbytes;
    waiter_.look();
  }

  // Noted by who reduces. Parts of a group note it where the whole does.
  const std::shared_ptr<OddRanks>& odd() const { return odd_; }

  // So long it took to encode or decode.
  void spend_in_codec(double s) { work_.codec_s += s; }
  const Work& work() const { return work_; }

 private:
  Note hear_peer(int peer) {
    if (!node_->heard(peer)) {
      waiter_.begin(node_->rank_of(peer));
      do waiter_.pause(node_);
      while (!node_->heard(peer));
    }
    return node_->note_of(peer);
  }

  Transport& transport_;
  Waiter& waiter_;
  const std::vector<int> ranks_;
  const int me_;
  const int track_;
  Node* node_;
  std::vector<int> node_indices_;
  static constexpr int64_t kLookNbytes = scaled(128 << 20);
  Work work_;
  std::shared_ptr<OddRanks> odd_ = std::make_shared<OddRanks>();
  int64_t look_at_ = kLookNbytes;
};

// Messages that are waited for together.
class Flight {
 public:
  explicit Flight(Group& group) : group_(group) {}
  void add(Ticket ticket) { tickets_.push_back(ticket); }
  // Whether all have landed. Waits for them, where it may.
  bool landed(bool waits) {
    for (; next_ < tickets_.size(); ++next_)
      if (!group_.here(tickets_[next_], waits)) return false;
    return true;
  }
  void wait() { landed(true); }

 private:
  Group& group_;
  std::vector<Ticket> tickets_;
  size_t next_ = 0;  // of those that have perhaps not landed
};

}  // namespace bagua
