#include "engine/liveness.h"

#include <utility>

namespace bagua {
namespace {
constexpr double kIntervalS = 1;  // between pings to one peer
constexpr const char* kWaits = "waits";
}  // namespace

Liveness::Liveness(Channel& channel, int rank, int size, double timeout_s,
                   std::function<bool()> waits)
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
      channel_.send(message.from, text_message(MessageType::kPong));
      return true;
    case MessageType::kPing:
      channel_.send(message.from, text_message(MessageType::kPong, waits_() ? kWaits : ""));
      return true;
    case MessageType::kPong:
      peer.pinged_s = 0;
      peer.waits = message.bytes == text_message(MessageType::kPong, kWaits);
      return true;
    default:
      peer.pinged_s = 0;  // any word is a sign of life
      return false;
  }
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
      peer.waits = false;
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
