// The ranks that take part in one exchange, seen from one of them. Collectives speak only to this.
#pragma once

#include <vector>

#include "transport/transport.h"

namespace bagua {

class Group {
 public:
  // `ranks` are transport ranks in ascending order; `me` is an index into them.
  Group(Transport& transport, Waiter& waiter, const std::vector<int>& ranks, int me)
      : transport_(transport), waiter_(waiter), ranks_(ranks), me_(me) {}
  Group(const Group&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  int me() const { return me_; }
  // The peer `distance` places to the right, round the ring.
  int neighbor(int distance) const { return (me_ + distance % size() + size()) % size(); }

  Ticket send(int index, const void* data, size_t nbytes) {
    sent_nbytes_ += static_cast<int64_t>(nbytes);
    return transport_.send(ranks_[index], data, nbytes);
  }
  Ticket recv(int index, void* data, size_t nbytes) {
    return transport_.recv(ranks_[index], data, nbytes);
  }

  // Waits for one message.
  void wait(Ticket ticket) {
    if (transport_.done(ticket)) return;
    waiter_.begin();
    do waiter_.pause();
    while (!transport_.done(ticket));
  }
  int64_t sent_nbytes() const { return sent_nbytes_; }

 private:
  Transport& transport_;
  Waiter& waiter_;
  const std::vector<int>& ranks_;
  const int me_;
  int64_t sent_nbytes_ = 0;
};

// Messages that are waited for together.
class Flight {
 public:
  explicit Flight(Group& group) : group_(group) {}
  void add(Ticket ticket) { tickets_.push_back(ticket); }
  void wait() {
    for (Ticket ticket : tickets_) group_.wait(ticket);
    tickets_.clear();
  }

 private:
  Group& group_;
  std::vector<Ticket> tickets_;
};

}  // namespace bagua
