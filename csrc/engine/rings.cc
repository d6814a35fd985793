#include "engine/rings.h"

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/errors.h"
#include "control/listener.h"
#include "control/ring.h"
#include "transport/node.h"

namespace bagua {
namespace {

constexpr int kSleepUs = 1000;

// What introduces the first rank of a node to the others, for whom it is the only one. A ring lies
// in its reader's memory, which is there until it has read what a writer that is no more has left.
class Introduction {
 public:
  Introduction(SocketChannel& channel, Node& node, double timeout_s)
      : channel_(channel),
        node_(node),
        deadline_s_(now_s() + timeout_s),
        rings_(static_cast<size_t>(node.size())) {}

  // Gives a peer the place of the ring it writes to, and a text.
  void offer(int peer, const std::string& text = {}) {
    const size_t nbytes = Ring::kNbytes + text.size();
    auto& ring = rings_[static_cast<size_t>(peer)];
    ring = node_.arenas()->allocate_for_good(nbytes);
    std::memcpy(ring.get() + Ring::kNbytes, text.data(), text.size());
    node_.tell(peer, {node_.arenas()->find(ring.get(), nbytes), static_cast<int64_t>(text.size())});
  }

  struct Offer {
    char* ring;
    std::string text;
  };
  // Waits for what the peer offers.
  Offer take(int peer) {
    const int rank = node_.rank_of(peer);
    for (;;) {
      const int gone = who_is_gone();
      if (node_.heard(peer)) break;
      if (gone >= 0) throw PeerError(text_of(gone));
      if (now_s() > deadline_s_)
        throw PeerError("rank " + std::to_string(rank) +
                        " of this machine did not offer shared memory (start_timeout_s)");
      node_.sleep(kSleepUs);
    }
    const Note note = node_.note_of(peer);
    try {
      char* memory = node_.at(peer, note.place);
      return {memory, {memory + Ring::kNbytes, static_cast<size_t>(note.number)}};
    } catch (const PeerError&) {  // it has offered what is no more
      throw PeerError(text_of(rank));
    }
  }

  void share(int peer, char* out) {
    const auto& in = rings_[static_cast<size_t>(peer)];
    channel_.share(node_.rank_of(peer), out, in.get(), in);
  }

  double left_s() const { return deadline_s_ - now_s(); }
  void look() const {
    if (const int gone = who_is_gone(); gone >= 0) throw PeerError(text_of(gone));
  }

 private:
  // Of those for whom it is no use to wait; -1 for nobody.
  int who_is_gone() const {
    for (int peer = 0; peer < node_.size(); ++peer)
      if (!node_.alive(peer) || channel_.ended(node_.rank_of(peer))) return node_.rank_of(peer);
    return channel_.ended(0) ? 0 : -1;
  }
  static std::string text_of(int gone) {
    return "rank " + std::to_string(gone) +
           " has failed or is gone before the ranks of this machine had met";
  }

  SocketChannel& channel_;
  Node& node_;
  const double deadline_s_;
  std::vector<std::shared_ptr<char>> rings_;  // by peer
};

void meet_first(Introduction& introduction, SocketChannel& channel, int first, int rank) {
  introduction.offer(0);
  const Introduction::Offer offer = introduction.take(0);
  if (first != 0)
    channel.go_by(first, connect_to_listener(offer.text, first, rank, introduction.left_s(),
                                             [&] { introduction.look(); }));
  introduction.share(0, offer.ring);
}

void meet_others(Introduction& introduction, SocketChannel& channel, const std::vector<int>& ranks,
                 const std::string& interfaces) {
  const int others = static_cast<int>(ranks.size());
  std::vector<Introduction::Offer> offers(1);
  std::vector<Socket> sockets;
  const auto exchange = [&](const std::string& text) {
    for (int peer = 1; peer < others; ++peer) introduction.offer(peer, text);
    for (int peer = 1; peer < others; ++peer) offers.push_back(introduction.take(peer));
  };
  if (ranks[0] == 0) {
    exchange("");
  } else {
    SocketListener listener(ranks, interfaces);
    exchange(listener.address());
    sockets = listener.accept(introduction.left_s(), [&] { introduction.look(); });
  }
  for (int peer = 1; peer < others; ++peer) {
    const auto i = static_cast<size_t>(peer);
    if (ranks[0] != 0) channel.carry(ranks[i], std::move(sockets[i]));
    introduction.share(peer, offers[i].ring);
  }
}

// By whom rank 0's posts to each rank go: the first of its node, unless that is rank 0's own.
std::vector<int> carriers_of(const Transport& transport) {
  std::vector<int> carriers;
  std::map<int, int> firsts;  // by node
  for (int rank = 0; rank < transport.size(); ++rank) {
    const int first = firsts.try_emplace(transport.node_of(rank), rank).first->second;
    carriers.push_back(first == 0 ? rank : first);
  }
  return carriers;
}

// A rank that is carried saves rank 0 some 8 us of every agreement, and costs its carrier a change
// of threads: see docs/design.md.
bool has_carriers(const Config& config, const std::vector<int>& carriers) {
  constexpr int kMany = 32;
  int carried = 0;
  for (size_t rank = 0; rank < carriers.size(); ++rank)
    carried += carriers[rank] != static_cast<int>(rank);
  return config.carriers == "always" || (config.carriers == "auto" && carried > kMany);
}

}  // namespace

void share_rings(SocketChannel& channel, Transport& transport, const Config& config) {
  const std::vector<int> carriers = carriers_of(transport);
  const bool carried = has_carriers(config, carriers);
  if (transport.rank() == 0 && carried) channel.set_carriers(carriers);
  Node* node = transport.node();
  if (!node || (!carried && node->first_rank() != 0)) return;
  Introduction introduction(channel, *node, config.start_timeout_s);
  std::vector<int> ranks;
  for (int peer = 0; peer < node->size(); ++peer) ranks.push_back(node->rank_of(peer));
  if (transport.rank() == ranks[0]) {
    meet_others(introduction, channel, ranks, config.network_interfaces);
  } else {
    meet_first(introduction, channel, ranks[0], transport.rank());
  }
}

}  // namespace bagua
