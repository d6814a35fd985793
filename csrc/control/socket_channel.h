// The control channel over TCP: everyone is connected to rank 0. A process that dies closes its
// sockets, so its loss is seen at once; one that is only stopped is found by pings.
//
// On a node without rank 0, posts may go by one rank, the carrier, to which the others of the node
// are connected as well, by rings. Losses are rank 0's to see and to tell.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "control/channel.h"
#include "control/listener.h"

namespace bagua {

class SocketChannel : public Channel {
 public:
  // All these before anything is sent.

  // From now on messages to and from this peer go through two rings in memory that both processes
  // see (see ring.h), the peer's the other way round; the socket only wakes, and tells of a loss.
  virtual void share(int peer, char* out, char* in, std::shared_ptr<void> keepalive) = 0;
  // A rank of this node by which posts go from now on.
  virtual void go_by(int carrier, Socket socket) = 0;
  // A rank of this node whose posts go by this one.
  virtual void carry(int rank, Socket socket) = 0;
  // To rank 0: by whom posts to each rank go; to itself if by nobody.
  virtual void set_carriers(std::vector<int> carriers) = 0;

  // Whether a peer that was connected has closed its end: its process has failed or is gone.
  // Takes nothing that has come, as receive() would.
  virtual bool ended(int peer) const = 0;
};

// Rank 0's, when the others have come.
std::unique_ptr<SocketChannel> accept_channel(SocketListener& listener, double timeout_s);
// Everyone else's.
std::unique_ptr<SocketChannel> connect_channel(const std::string& address, int rank,
                                               double timeout_s);

}  // namespace bagua
