#include "transport/loopback.h"

#include <cstring>
#include <string>

#include "common/errors.h"

namespace bagua {

// A send copies into the wire and is done at once; a receive is done when it could copy out.
class LoopbackTransport : public Transport {
 public:
  LoopbackTransport(LoopbackHub& hub, int rank) : hub_(hub), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return hub_.size_; }

  Ticket send(int peer, const void* data, size_t nbytes) override {
    const char* bytes = static_cast<const char*>(data);
    std::lock_guard<std::mutex> lock(hub_.mutex_);
    hub_.wires_[{rank_, peer}].emplace_back(bytes, bytes + nbytes);
    return kDone;
  }

  Ticket recv(int peer, void* data, size_t nbytes) override {
    const Ticket ticket = next_++;
    receives_[ticket] = {peer, data, nbytes};
    return ticket;
  }

  bool done(Ticket ticket) override {
    if (ticket == kDone) return true;
    match();
    const auto it = receives_.find(ticket);
    if (it == receives_.end()) return true;
    return false;
  }

  void progress() override {}

  bool abort() override {
    receives_.clear();
    return true;
  }

 private:
  static constexpr Ticket kDone = 0;
  struct Receive {
    int peer;
    void* data;
    size_t nbytes;
  };

  // Tickets ascend, so the map's order is the posting order that pairs match in.
  void match() {
    std::lock_guard<std::mutex> lock(hub_.mutex_);
    for (auto it = receives_.begin(); it != receives_.end();) {
      auto& wire = hub_.wires_[{it->second.peer, rank_}];
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
  Ticket next_ = 1;
  std::map<Ticket, Receive> receives_;
};

std::unique_ptr<Transport> LoopbackHub::connect(int rank) {
  return std::make_unique<LoopbackTransport>(*this, rank);
}

}  // namespace bagua
