#include "control/listener.h"

#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <sstream>
#include <thread>
#include <utility>

#include "common/clock.h"
#include "common/errors.h"

namespace bagua {
namespace {

constexpr size_t kSecretNbytes = 32;
// One attempt to reach one address, so that an unroutable one does not use up the whole time.
constexpr double kAttemptS = 3;
constexpr double kSliceS = 0.2;  // of a wait, between looks

std::vector<int> first_ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::string named(int rank) { return "rank " + std::to_string(rank); }
std::string whole_seconds(double s) { return std::to_string(static_cast<int>(s)) + " s"; }

bool read_byte(const Socket& socket, char* byte, double deadline_s, const Look& look) {
  for (;;) {
    const double slice_s = std::min(deadline_s, now_s() + kSliceS);
    if (socket.read_all(byte, 1, slice_s)) return true;
    const bool ended = now_s() < slice_s;
    if (look) look();
    if (ended || now_s() >= deadline_s) return false;
  }
}

// How many the other side had given up, to try again.
size_t close_ended(std::vector<Socket>& sockets) {
  size_t count = 0;
  for (Socket& socket : sockets) {
    char byte;
    if (!socket.open() || ::recv(socket.fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 0) continue;
    socket.close();
    ++count;
  }
  return count;
}

}  // namespace

SocketListener::SocketListener(std::vector<int> ranks, const std::string& interfaces)
    : ranks_(std::move(ranks)), secret_(random_hex(kSecretNbytes / 2)) {
  int port = 0;
  socket_ = listen_anywhere(std::max(static_cast<int>(ranks_.size()), 16), &port);
  address_ = secret_ + " " + std::to_string(port);
  for (const std::string& host : local_addresses(interfaces)) address_ += " " + host;
}

SocketListener::SocketListener(int size, const std::string& interfaces)
    : SocketListener(first_ranks(size), interfaces) {}

std::string SocketListener::missing(const std::vector<Socket>& sockets) const {
  std::string text;
  for (size_t i = 1; i < ranks_.size(); ++i)
    if (!sockets[i].open()) text += (text.empty() ? "" : ", ") + std::to_string(ranks_[i]);
  return text;
}

std::vector<Socket> SocketListener::accept(double timeout_s, const Look& look) {
  const double deadline_s = now_s() + timeout_s;
  std::vector<Socket> sockets(ranks_.size());
  for (size_t connected = 1; connected < ranks_.size();) {
    Socket socket = accept_one(socket_, std::min(deadline_s, now_s() + kSliceS));
    if (look) look();
    if (!socket.open() && now_s() >= deadline_s)
      throw PeerError("rank " + missing(sockets) + " did not connect to " + named(ranks_[0]) +
                      " within " + whole_seconds(timeout_s) +
                      "; is a firewall between them, or should network_interfaces name another "
                      "interface? (start_timeout_s sets the limit)");
    char hello[kSecretNbytes + sizeof(int32_t)];
    if (!socket.open() ||
        !socket.read_all(hello, sizeof hello, std::min(deadline_s, now_s() + kAttemptS)))
      continue;  // a stranger
    int32_t rank;
    std::memcpy(&rank, hello + kSecretNbytes, sizeof rank);
    if (secret_.compare(0, kSecretNbytes, hello, kSecretNbytes) != 0) continue;
    const auto known = std::find(ranks_.begin() + 1, ranks_.end(), rank);
    if (known == ranks_.end() || !socket.write_all("!", 1, deadline_s)) continue;
    Socket& place = sockets[static_cast<size_t>(known - ranks_.begin())];
    if (!place.open()) ++connected;  // else it missed our answer and tries again
    place = std::move(socket);
    if (connected == ranks_.size()) connected -= close_ended(sockets);
  }
  // Nobody goes on, to where only MPI could be waited with, before all are here.
  for (size_t i = 1; i < ranks_.size(); ++i)
    if (!sockets[i].write_all(".", 1, deadline_s))
      throw PeerError(named(ranks_[i]) + " is gone before all ranks were connected");
  return sockets;
}

Socket connect_to_listener(const std::string& address, int listener, int rank, double timeout_s,
                           const Look& look) {
  std::istringstream words(address);
  std::string secret;
  int port = 0;
  words >> secret >> port;
  std::vector<std::string> hosts;
  for (std::string host; words >> host;) hosts.push_back(host);

  const double deadline_s = now_s() + timeout_s;
  std::string hello = secret;
  const auto number = static_cast<int32_t>(rank);
  hello.append(reinterpret_cast<const char*>(&number), sizeof number);
  while (now_s() < deadline_s) {
    for (const std::string& host : hosts) {
      const double attempt_s = std::min(deadline_s, now_s() + kAttemptS);
      Socket socket = connect_to({host, port}, attempt_s);
      char answer;
      if (!socket.open() || !socket.write_all(hello.data(), hello.size(), attempt_s)) continue;
      // Another host may own this address too; only who listens for this job answers.
      if (!socket.read_all(&answer, 1, attempt_s)) continue;
      if (!read_byte(socket, &answer, now_s() + timeout_s + kAttemptS, look))
        throw PeerError(named(rank) + " is connected to " + named(listener) +
                        ", but another rank is not; what that one and " + named(listener) +
                        " say tells why");
      return socket;
    }
    if (look) look();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  throw PeerError(named(rank) + " could not connect to " + named(listener) + " at port" +
                  address.substr(secret.size()) + " within " + whole_seconds(timeout_s) +
                  "; check the network between the hosts or name an interface with "
                  "network_interfaces");
}

}  // namespace bagua
