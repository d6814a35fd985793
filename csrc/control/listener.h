// How ranks find each other over TCP: one listens and announces where, the others connect to it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "control/socket.h"

namespace bagua {

// Called several times a second by who waits; throws where there is nothing to wait for any more.
using Look = std::function<void()>;

class SocketListener {
 public:
  // The first of these ranks listens. `interfaces`: comma-separated names to announce, empty for
  // all that are up.
  SocketListener(std::vector<int> ranks, const std::string& interfaces);
  // Rank 0 listens to all of so many.
  SocketListener(int size, const std::string& interfaces);

  // What the others need to connect: a secret and every address they may try.
  const std::string& address() const { return address_; }
  // Waits until all have connected. In the order of the ranks, of which the first has none.
  std::vector<Socket> accept(double timeout_s, const Look& look = {});

 private:
  std::string missing(const std::vector<Socket>& sockets) const;

  const std::vector<int> ranks_;
  Socket socket_;
  std::string secret_;
  std::string address_;
};

// The connection of `rank` to `listener`, when all the others have theirs.
Socket connect_to_listener(const std::string& address, int listener, int rank, double timeout_s,
                           const Look& look = {});

}  // namespace bagua
