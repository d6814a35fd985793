#include "engine/liveness.h"

#include <utility>

namespace bagua {
namespace {
constexpr double kIntervalS = 1;  // between pings to one peer

std::string pong_of(const std::optional<Traffic>& waits) {
  Writer w;
  w.put(MessageType::kPong);
  if (waits) {
    w.put(waits->reports);
    w.put(waits->decisions);
  }
  return w.take();
}
}  // namespace

Liveness::Liveness(Channel& channel, int rank, int size, double timeout_s, Waits waits)
    : channel_(channel),
      rank_(rank),
      timeout_s_(timeout_s),
      waits_(std::move(waits)),
      peers_(static_cast<size_t>(size)) {
  for (int peer = 0; peer < size; ++peer)
    peers_[peer].gone = peer == rank || (peer != 0 && rank != 0);
}

bool Liveness::handle(const Message& message, MessageType type, double now_s) {
  Peer& peer = peers_[static_cast<size_t>(message.from)];
  switch (type) {
    case MessageType::kAwait:
      asked_s_ = now_s;
      channel_.send(message.from, pong_of({}));
      return true;
    case MessageType::kPing:
      channel_.send(message.from, pong_of(waits_()));
      return true;
    case MessageType::kPong:
      peer.pinged_s = 0;
      peer.pong = message.bytes;
      return true;
    default:
      peer.pinged_s = 0;  // any word is a sign of life
      return false;
  }
}

bool Liveness::waits(int rank, const Traffic& traffic) const {
  if (rank == rank_) return waits_().has_value();
  return peers_[static_cast<size_t>(rank)].pong == pong_of(traffic);
}

void Liveness::forget(int rank) { peers_[static_cast<size_t>(rank)].gone = true; }

int Liveness::tick(double now_s, bool waiting) {
  if (!waiting && !asked(now_s)) return -1;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    if (peer.gone) continue;
    // After a gap in our own ticking (this process was stopped, or nobody waited) what we knew
    // before proves nothing.
    if (now_s - peer.sent_s > 3 * kIntervalS) {
      peer.pinged_s = 0;
      peer.pong.clear();
    }
    if (timeout_s_ > 0 && peer.pinged_s > 0 && now_s - peer.pinged_s > timeout_s_)
      return static_cast<int>(rank);
    if (now_s - peer.sent_s < kIntervalS * 0.9) continue;
    channel_.send(static_cast<int>(rank),
                  text_message(rank_ == 0 ? MessageType::kPing : MessageType::kAwait));
    peer.sent_s = now_s;
    if (peer.pinged_s == 0) peer.pinged_s = now_s;
  }
  return -1;
}

}  // namespace bagua
