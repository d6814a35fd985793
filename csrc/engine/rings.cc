#include "engine/rings.h"

#include <memory>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/errors.h"
#include "control/ring.h"
#include "transport/node.h"

namespace bagua {
namespace {

constexpr int kSleepUs = 1000;

// Waits for the place of the peer's ring.
Place place_from(Node& node, int peer, const SocketChannel& channel, double deadline_s) {
  const int rank = node.rank_of(peer);
  while (!node.heard(peer)) {
    node.sleep(kSleepUs);
    if (channel.ended(rank))
      throw PeerError("rank " + std::to_string(rank) + " has failed or is gone before it had " +
                      "offered shared memory");
    if (now_s() > deadline_s)
      throw PeerError("rank " + std::to_string(rank) +
                      " of this machine did not offer shared memory (start_timeout_s)");
  }
  return node.note_of(peer).place;
}

}  // namespace

// A ring lies in its reader's memory, which is there until it has read what a writer that is no
// more has left.
void share_rings(SocketChannel& channel, Transport& transport, double timeout_s) {
  Node* node = transport.node();
  if (!node || node->first_rank() != 0) return;
  const bool first = transport.rank() == 0;
  const int begin = first ? 1 : 0, end = first ? node->size() : 1;
  std::vector<std::shared_ptr<char>> rings;
  for (int peer = begin; peer < end; ++peer) {
    rings.push_back(node->arenas()->allocate(Ring::kNbytes));
    node->tell(peer, {node->arenas()->find(rings.back().get(), Ring::kNbytes), 0});
  }
  const double deadline_s = now_s() + timeout_s;
  for (int peer = begin; peer < end; ++peer) {
    const std::shared_ptr<char>& in = rings[static_cast<size_t>(peer - begin)];
    char* out = node->at(peer, place_from(*node, peer, channel, deadline_s));
    channel.share(node->rank_of(peer), out, in.get(), in);
  }
}

}  // namespace bagua
