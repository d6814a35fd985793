// Small control messages between rank 0 and everyone else, by event: a thread in receive() sleeps
// in the kernel until a message, a wake-up or the loss of a peer comes, so an idle job exchanges
// nothing and costs nothing. Tensors never travel here.
//
// What is sent goes straight to its rank. What is posted may go by another rank of the same node,
// its carrier, so that rank 0 has to do with nodes; it keeps its order among what is posted, and is
// perhaps overtaken by what is sent, and by the end of a connection.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace bagua {

struct Message {
  int from;
  bool lost;          // the connection ended; without a goodbye before, that process is gone
  std::string bytes;  // empty when lost
};

class Channel {
 public:
  virtual ~Channel() = default;

  // Neither ever blocks: what the kernel will not take now is kept and sent by later receive()
  // calls.
  virtual void send(int peer, std::string_view bytes) = 0;
  virtual void post(const std::vector<int>& peers, std::string_view bytes) {
    for (const int peer : peers) send(peer, bytes);
  }
  // Sends what it can within a moment, and then the others see the end. The same thread as
  // receive(), which is not called again; others may go on waking it.
  virtual void close() {}
  // By whom posts go between rank 0 and this rank: by itself, if by nobody. Rank 0 knows it of all,
  // others of themselves.
  virtual int carrier_of(int rank) const { return rank; }
  // Whether others' posts go by this rank, and are not at an end: then it has to go on receiving.
  virtual bool carries() const { return false; }
  // On rank 0: whether all are gone who carried or were carried.
  virtual bool all_ended() const { return true; }

  // Appends what has come; sleeps up to timeout_us for the first (0 polls, negative waits for
  // ever). Returns early, perhaps with nothing, after wake(). One thread at a time.
  virtual void receive(int timeout_us, std::vector<Message>& inbox) = 0;

  // Ends a receive() or doze() that sleeps, now or at its next call. Any thread.
  virtual void wake() = 0;
  // The same, delay_us from now. Any thread.
  virtual void wake_after(int delay_us) = 0;

  // Sleeps until receive() would have something to do, and leaves it there. The coordination
  // thread dozes while nobody drives; while another thread does, hush(true) keeps messages from
  // waking it.
  virtual void doze(int timeout_us) = 0;
  virtual void hush(bool hushed) = 0;
};

}  // namespace bagua
