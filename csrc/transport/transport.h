// How bytes get from one rank to another. A transport moves messages between pairs of ranks, in
// order per pair and track, and never blocks: collectives start sends and receives, then wait
// through a Waiter that knows deadlines and failures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

namespace bagua {

class Node;

// So many exchanges can be under way between the same ranks, each with a track of its own.
constexpr int kTracks = 4;

// Names one message in flight. Owned by the transport; valid until done() returned true.
using Ticket = int32_t;
constexpr Ticket kNoTicket = std::numeric_limits<Ticket>::min();

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // The memory must stay valid until the ticket is done. One thread at a time. Messages of
  // different tracks need not be received in the order in which they were sent.
  virtual Ticket send(int peer, int track, const void* data, size_t nbytes) = 0;
  virtual Ticket recv(int peer, int track, void* data, size_t nbytes) = 0;
  // Makes progress; true once, when the message has left or arrived.
  virtual bool done(Ticket ticket) = 0;

  // Who sends or receives it; perhaps -1 where that is done already.
  virtual int peer_of(Ticket ticket) const = 0;

  // Lets messages that are done for us, but not yet for the peer, go on. Cheap.
  virtual void progress() = 0;

  // The ranks on this machine and their shared memory; null if there is none.
  virtual Node* node() { return nullptr; }
  // A number that ranks which share memory have in common.
  virtual int node_of(int rank) const { return rank; }

  // After a failure: forget everything in flight; nothing else may be called afterwards. True when
  // the memory of messages in flight will not be touched any more.
  virtual bool abort() = 0;
};

// How many there are of those that share memory.
inline size_t node_count(const Transport& transport, const std::vector<int>& ranks) {
  std::set<int> nodes;
  for (const int rank : ranks) nodes.insert(transport.node_of(rank));
  return nodes.size();
}

// Whether these ranks are on several nodes, one of which has several of them.
inline bool on_shared_nodes(const Transport& transport, const std::vector<int>& ranks) {
  const size_t nodes = node_count(transport, ranks);
  return nodes > 1 && nodes < ranks.size();
}

// How a thread passes the time until a message is there: spin, yield, sleep. pause() throws when
// waiting on has become pointless (a peer died, a deadline passed), so that no wait is for ever.
class Waiter {
 public:
  virtual ~Waiter() = default;
  // A new wait starts, for this rank or, if -1, nobody in particular: spin again.
  virtual void begin(int peer) = 0;
  // `node`, if not null, can put the thread to sleep until what is waited for may be there.
  virtual void pause(Node* node) = 0;
  // In the middle of long work: answers whoever asks for this rank, and throws as pause() does.
  virtual void look() {}
};

}  // namespace bagua
