// The control channel over TCP: rank 0 listens, everyone else connects to it. A process that dies
// closes its sockets, so its loss is seen at once; one that is only stopped is found by pings.
#pragma once

#include <memory>
#include <string>

#include "control/channel.h"
#include "control/socket.h"

namespace bagua {

class SocketChannel : public Channel {
 public:
  // From now on messages to and from this peer go through two rings in memory that both processes
  // see (see ring.h), the peer's the other way round; the socket only wakes, and tells of a loss.
  // Before anything was sent.
  virtual void share(int peer, char* out, char* in, std::shared_ptr<void> keepalive) = 0;
  // Whether the peer has closed its end: its process has failed or is gone. Takes nothing that has
  // come, as receive() would.
  virtual bool ended(int peer) const = 0;
};

// Rank 0's end before the others have come.
class SocketListener {
 public:
  // `interfaces`: comma-separated names to announce, empty for all that are up.
  SocketListener(int size, const std::string& interfaces);

  // What the others need to connect: a secret and every address they may try.
  const std::string& address() const { return address_; }
  // Waits until ranks 1 to size-1 have connected.
  std::unique_ptr<SocketChannel> accept(double timeout_s);

 private:
  const int size_;
  Socket socket_;
  std::string secret_;
  std::string address_;
};

// Everyone else's end.
std::unique_ptr<SocketChannel> connect_channel(const std::string& address, int rank,
                                               double timeout_s);

}  // namespace bagua
