// Small control messages between rank 0 and everyone else, by event: a thread in receive() sleeps
// in the kernel until a message, a wake-up or the loss of a peer comes, so an idle job exchanges
// nothing and costs nothing. Tensors never travel here.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace bagua {

struct Message {
  int from;
  bool lost;          // the connection ended without a goodbye: that process is gone
  std::string bytes;  // empty when lost
};

class Channel {
 public:
  virtual ~Channel() = default;

  // Never blocks: what the kernel will not take now is kept and sent by later receive() calls.
  virtual void send(int peer, std::string_view bytes) = 0;

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
