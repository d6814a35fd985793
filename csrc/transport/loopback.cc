#include "transport/loopback.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "common/errors.h"

namespace bagua {

// A send copies into the wire and is done at once; a receive is done when it could copy out.
class LoopbackTransport : public Transport {
 public:
  LoopbackTransport(LoopbackHub& hub, int rank, std::unique_ptr<Node> node)
      : hub_(hub), rank_(rank), node_(std::move(node)) {}
  int rank() const override { return rank_; }
  int size() const override { return hub_.size_; }

  Ticket send(int peer, int track, const void* data, size_t nbytes) override {
    const char* bytes = static_cast<const char*>(data);
    std::lock_guard<std::mutex> lock(hub_.mutex_);
    hub_.wires_[{rank_, peer, track}].emplace_back(bytes, bytes + nbytes);
    return kDone;
  }

  Ticket recv(int peer, int track, void* data, size_t nbytes) override {
    const Ticket ticket = next_++;
    receives_[ticket] = {peer, track, data, nbytes};
    return ticket;
  }

  bool done(Ticket ticket) override {
    if (ticket == kDone) return true;
    match();
    const auto it = receives_.find(ticket);
    if (it == receives_.end()) return true;
    return false;
  }

  int peer_of(Ticket ticket) const override {
    const auto it = receives_.find(ticket);
    return it == receives_.end() ? -1 : it->second.peer;
  }

  void progress() override {}
  Node* node() override { return node_.get(); }
  int node_of(int rank) const override {
    return hub_.node_of_.empty() ? rank : hub_.node_of_[static_cast<size_t>(rank)];
  }

  bool abort() override {
    receives_.clear();
    if (node_) node_->abandon();
    return !node_;  // others may still be writing into our arenas
  }

 private:
  static constexpr Ticket kDone = 0;
  struct Receive {
    int peer, track;
    void* data;
    size_t nbytes;
  };

  // Tickets ascend, so the map's order is the posting order that pairs and tracks match in.
  void match() {
    std::lock_guard<std::mutex> lock(hub_.mutex_);
    for (auto it = receives_.begin(); it != receives_.end();) {
      auto& wire = hub_.wires_[{it->second.peer, rank_, it->second.track}];
      if (wire.empty()) {
        ++it;
        continue;
      }
      const std::vector<char>& message = wire.front();
      if (message.size() != it->second.nbytes)
        throw InternalError("loopback: message of " + std::to_string(message.size()) +
                            " bytes where " + std::to_string(it->second.nbytes) + " were expected");
      if (!message.empty()) std::memcpy(it->second.data, message.data(), message.size());
      wire.pop_front();
      it = receives_.erase(it);
    }
  }

  LoopbackHub& hub_;
  const int rank_;
  const std::unique_ptr<Node> node_;
  Ticket next_ = 1;
  std::map<Ticket, Receive> receives_;
};

LoopbackHub::LoopbackHub(int size, const std::vector<int>& node_of)
    : size_(size), node_of_(node_of), nodes_(static_cast<size_t>(size)) {
  std::map<int, std::vector<int>> ranks_of;
  for (size_t rank = 0; rank < node_of.size(); ++rank)
    ranks_of[node_of[rank]].push_back(static_cast<int>(rank));
  // The ranks of a node meet as processes would: all at once.
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int, std::vector<std::vector<std::string>>> rounds;  // by node: what was given
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < node_of.size(); ++rank) {
    if (ranks_of[node_of[rank]].size() == 1) continue;  // as with MPI
    threads.emplace_back([&, rank] {
      const std::vector<int>& ranks = ranks_of[node_of[rank]];
      const auto me = std::find(ranks.begin(), ranks.end(), static_cast<int>(rank)) - ranks.begin();
      size_t round = 0;
      std::string why_not;
      const auto exchange = [&](const std::string& mine) {
        std::unique_lock<std::mutex> lock(mutex);
        auto& all = rounds[node_of[rank]];
        if (all.size() == round) all.emplace_back();
        const size_t now = round++;
        all[now].resize(ranks.size() + 1);  // the last one counts
        all[now][static_cast<size_t>(me)] = mine;
        all[now].back() += '.';
        changed.notify_all();
        changed.wait(lock, [&] { return all[now].back().size() == ranks.size(); });
        return std::vector<std::string>(all[now].begin(), all[now].end() - 1);
      };
      nodes_[rank] = Node::meet(ranks, static_cast<int>(rank), exchange, why_not);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::unique_ptr<Transport> LoopbackHub::connect(int rank) {
  return std::make_unique<LoopbackTransport>(*this, rank,
                                             std::move(nodes_[static_cast<size_t>(rank)]));
}

}  // namespace bagua
