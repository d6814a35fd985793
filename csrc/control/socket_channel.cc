#include "control/socket_channel.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "common/clock.h"
#include "common/errors.h"
#include "control/ring.h"

namespace bagua {
namespace {

constexpr size_t kSecretNbytes = 32;
// One attempt to reach one address, so that an unroutable one does not use up the whole time.
constexpr double kAttemptS = 3;

// Frames are a 32-bit length and that many bytes.
constexpr size_t kHeaderNbytes = sizeof(uint32_t);

struct Peer {
  Socket socket;
  Ring in, out;          // if there, frames take this way and bytes of the socket only wake
  std::string incoming;  // bytes of a frame not yet whole
  std::string outgoing;  // bytes that found no room yet, after the first `left` of them
  size_t left = 0;
  std::shared_ptr<void> keepalive;
};

class Ends : public SocketChannel {
 public:
  explicit Ends(std::vector<Socket> sockets_by_rank)
      : epoll_(::epoll_create1(EPOLL_CLOEXEC)),
        doze_epoll_(::epoll_create1(EPOLL_CLOEXEC)),
        event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
        peers_(sockets_by_rank.size()) {
    if (!epoll_.open() || !doze_epoll_.open() || !event_.open() || !timer_.open())
      throw InternalError(errno_text("epoll, eventfd or timerfd"));
    watch(EPOLL_CTL_ADD, event_.fd(), kWake, EPOLLIN);
    watch(EPOLL_CTL_ADD, timer_.fd(), kTimer, EPOLLIN);
    hush(false);
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      peers_[rank].socket = std::move(sockets_by_rank[rank]);
      if (peers_[rank].socket.open())
        watch(EPOLL_CTL_ADD, peers_[rank].socket.fd(), static_cast<uint32_t>(rank), EPOLLIN);
    }
  }

  // A last goodbye may still be in our hands; give the kernel a moment to take it.
  ~Ends() override {
    const double deadline_s = now_s() + 0.2;
    for (Peer& peer : peers_) {
      while (peer.out.there() && peer.socket.open() && !peer.outgoing.empty() &&
             now_s() < deadline_s)
        flush(peer);
      if (peer.socket.open() && !peer.out.there())
        peer.socket.write_all(peer.outgoing.data() + peer.left, peer.outgoing.size() - peer.left,
                              deadline_s);
    }
  }

  void share(int rank, char* out, char* in, std::shared_ptr<void> keepalive) override {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    peer.out = Ring(out);
    peer.in = Ring(in);
    peer.keepalive = std::move(keepalive);
    near_.push_back(rank);
  }

  bool ended(int rank) const override {
    const Socket& socket = peers_[static_cast<size_t>(rank)].socket;
    pollfd looked{socket.fd(), POLLRDHUP, 0};
    return !socket.open() || ::poll(&looked, 1, 0) > 0;
  }

  void send(int rank, std::string_view bytes) override {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (!peer.socket.open()) return;
    const bool blocked = !peer.outgoing.empty();
    const auto length = static_cast<uint32_t>(bytes.size());
    peer.outgoing.append(reinterpret_cast<const char*>(&length), kHeaderNbytes);
    peer.outgoing.append(bytes);
    if (blocked) return;
    flush(peer);
    if (!peer.outgoing.empty() && !peer.out.there())
      watch(EPOLL_CTL_MOD, peer.socket.fd(), static_cast<uint32_t>(rank), EPOLLIN | EPOLLOUT);
  }

  void receive(int timeout_us, std::vector<Message>& inbox) override {
    look_at_rings(inbox);
    epoll_event events[64];
    int n = ::epoll_wait(epoll_.fd(), events, 64, 0);
    if (n == 0 && timeout_us != 0 && inbox.empty()) {
      set_sleep([&] { receiving_ = true; });
      sleep(epoll_.fd(), timeout_us);
      set_sleep([&] { receiving_ = false; });
      look_at_rings(inbox);
      n = ::epoll_wait(epoll_.fd(), events, 64, 0);
    }
    for (int i = 0; i < n; ++i) {
      const uint32_t name = events[i].data.u32;
      if (name == kWake || name == kTimer) {
        uint64_t count;
        const int fd = name == kWake ? event_.fd() : timer_.fd();
        if (::read(fd, &count, sizeof count) < 0) continue;  // it was reset meanwhile
        continue;
      }
      Peer& peer = peers_[name];
      if (events[i].events & EPOLLOUT) {
        flush(peer);
        if (peer.outgoing.empty()) watch(EPOLL_CTL_MOD, peer.socket.fd(), name, EPOLLIN);
      }
      if (events[i].events & ~static_cast<uint32_t>(EPOLLOUT))
        read(peer, static_cast<int>(name), inbox);
    }
  }

  void wake() override {
    const uint64_t one = 1;
    if (::write(event_.fd(), &one, sizeof one) < 0) return;  // full: it is awake anyway
  }

  void wake_after(int delay_us) override {
    delay_us = std::max(delay_us, 1);  // zero would stop the timer
    itimerspec when{};
    when.it_value.tv_sec = delay_us / 1000000;
    when.it_value.tv_nsec = delay_us % 1000000 * 1000L;
    ::timerfd_settime(timer_.fd(), 0, &when, nullptr);
  }

  void doze(int timeout_us) override {
    set_sleep([&] { dozing_ = true; });
    sleep(doze_epoll_.fd(), timeout_us);
    set_sleep([&] { dozing_ = false; });
  }

  void hush(bool hushed) override {
    epoll_event event{};
    event.events = EPOLLIN;
    ::epoll_ctl(doze_epoll_.fd(), hushed ? EPOLL_CTL_DEL : EPOLL_CTL_ADD, epoll_.fd(), &event);
    set_sleep([&] { hushed_ = hushed; });
  }

 private:
  static constexpr uint32_t kWake = UINT32_MAX;
  static constexpr uint32_t kTimer = UINT32_MAX - 1;

  void watch(int operation, int fd, uint32_t name, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u32 = name;
    if (::epoll_ctl(epoll_.fd(), operation, fd, &event) != 0)
      throw InternalError(errno_text("epoll_ctl"));
  }

  // epoll_wait counts in milliseconds; ppoll on the epoll descriptor counts in nanoseconds.
  static void sleep(int fd, int timeout_us) {
    pollfd waiting{fd, POLLIN, 0};
    const timespec limit{timeout_us / 1000000, timeout_us % 1000000 * 1000L};
    ::ppoll(&waiting, 1, timeout_us < 0 ? nullptr : &limit, nullptr);
  }

  // Changes who sleeps, and tells the writers of all rings whether they have to wake somebody.
  template <class Change>
  void set_sleep(Change&& change) {
    std::lock_guard<std::mutex> lock(mutex_);
    change();
    const bool asleep = receiving_ || (dozing_ && !hushed_);
    if (std::exchange(asleep_, asleep) == asleep && !asleep) return;
    bool any = false;
    for (const int rank : near_) {
      Ring& ring = peers_[static_cast<size_t>(rank)].in;
      ring.sleeps(asleep);
      any = any || !ring.empty();
    }
    if (asleep && any) wake();
  }

  void look_at_rings(std::vector<Message>& inbox) {
    for (const int rank : near_) {
      Peer& peer = peers_[static_cast<size_t>(rank)];
      if (!peer.outgoing.empty()) flush(peer);
      if (!peer.in.empty()) read_ring(peer, rank, inbox);
    }
  }

  void read_ring(Peer& peer, int rank, std::vector<Message>& inbox) {
    peer.in.read(peer.incoming);
    if (peer.in.must_wake_writer()) ring_bell(peer);
    unpack(peer, rank, inbox);
  }

  static void ring_bell(Peer& peer) {
    if (!peer.socket.open()) return;
    // A full socket wakes by what is in it already.
    if (::send(peer.socket.fd(), "!", 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;
  }

  static void flush(Peer& peer) {
    if (peer.out.there()) return flush_to_ring(peer);
    while (peer.left < peer.outgoing.size()) {
      const ssize_t n = ::send(peer.socket.fd(), peer.outgoing.data() + peer.left,
                               peer.outgoing.size() - peer.left, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      if (n < 0) peer.left = peer.outgoing.size();  // broken: reading will report the loss
      if (n > 0) peer.left += static_cast<size_t>(n);
    }
    forget_sent(peer);
  }

  static void forget_sent(Peer& peer) {
    if (peer.left < peer.outgoing.size() / 2) return;  // or else every byte is moved many times
    peer.outgoing.erase(0, peer.left);
    peer.left = 0;
  }

  static void flush_to_ring(Peer& peer) {
    const auto write = [&] {
      peer.left +=
          peer.out.write(peer.outgoing.data() + peer.left, peer.outgoing.size() - peer.left);
      return peer.left == peer.outgoing.size();
    };
    if (!write()) {
      peer.out.wait_for_room();
      write();
    }
    forget_sent(peer);
    if (peer.out.must_wake_reader()) ring_bell(peer);
  }

  void read(Peer& peer, int rank, std::vector<Message>& inbox) {
    char buffer[16 << 10];
    ssize_t n;
    do {
      n = ::recv(peer.socket.fd(), buffer, sizeof buffer, MSG_DONTWAIT);
      // Where frames come through a ring there are but bells here.
      if (n > 0 && !peer.in.there()) peer.incoming.append(buffer, static_cast<size_t>(n));
    } while (n == static_cast<ssize_t>(sizeof buffer) || (n < 0 && errno == EINTR));
    const bool lost = n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
    if (peer.in.there()) {
      if (!peer.outgoing.empty()) flush(peer);  // there may be room again
      read_ring(peer, rank, inbox);
    } else {
      unpack(peer, rank, inbox);
    }
    if (!lost) return;
    // Closing does not take it out of the set while somebody has a copy.
    ::epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, peer.socket.fd(), nullptr);
    peer.socket.close();
    inbox.push_back({rank, true, {}});
  }

  static void unpack(Peer& peer, int rank, std::vector<Message>& inbox) {
    size_t at = 0;
    while (peer.incoming.size() - at >= kHeaderNbytes) {
      uint32_t length;
      std::memcpy(&length, peer.incoming.data() + at, kHeaderNbytes);
      if (peer.incoming.size() - at - kHeaderNbytes < length) break;
      inbox.push_back({rank, false, peer.incoming.substr(at + kHeaderNbytes, length)});
      at += kHeaderNbytes + length;
    }
    peer.incoming.erase(0, at);
  }

  Socket epoll_;       // everything receive() looks at
  Socket doze_epoll_;  // epoll_ itself, unless hushed
  Socket event_;
  Socket timer_;
  std::vector<Peer> peers_;  // by rank
  std::vector<int> near_;    // ranks with rings

  std::mutex mutex_;  // of what follows: who sleeps
  bool receiving_ = false, dozing_ = false, hushed_ = false;
  bool asleep_ = false;
};

std::string missing_ranks(const std::vector<Socket>& sockets) {
  std::string text;
  for (size_t rank = 1; rank < sockets.size(); ++rank)
    if (!sockets[rank].open()) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

// How many the other side had given up, to try again.
int close_ended(std::vector<Socket>& sockets) {
  int count = 0;
  for (Socket& socket : sockets) {
    char byte;
    if (!socket.open() || ::recv(socket.fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 0) continue;
    socket.close();
    ++count;
  }
  return count;
}

}  // namespace

SocketListener::SocketListener(int size, const std::string& interfaces)
    : size_(size), secret_(random_hex(kSecretNbytes / 2)) {
  int port = 0;
  socket_ = listen_anywhere(std::max(size, 16), &port);
  address_ = secret_ + " " + std::to_string(port);
  for (const std::string& host : local_addresses(interfaces)) address_ += " " + host;
}

std::unique_ptr<SocketChannel> SocketListener::accept(double timeout_s) {
  const double deadline_s = now_s() + timeout_s;
  std::vector<Socket> sockets(static_cast<size_t>(size_));
  for (int connected = 1; connected < size_;) {
    Socket socket = accept_one(socket_, deadline_s);
    if (!socket.open() && now_s() >= deadline_s)
      throw PeerError("rank " + missing_ranks(sockets) + " did not connect to rank 0 within " +
                      std::to_string(static_cast<int>(timeout_s)) +
                      " s; is a firewall between them, or should network_interfaces name another "
                      "interface? (start_timeout_s sets the limit)");
    char hello[kSecretNbytes + sizeof(int32_t)];
    if (!socket.open() ||
        !socket.read_all(hello, sizeof hello, std::min(deadline_s, now_s() + kAttemptS)))
      continue;  // a stranger
    int32_t rank;
    std::memcpy(&rank, hello + kSecretNbytes, sizeof rank);
    if (secret_.compare(0, kSecretNbytes, hello, kSecretNbytes) != 0) continue;
    if (rank < 1 || rank >= size_ || !socket.write_all("!", 1, deadline_s)) continue;
    Socket& place = sockets[static_cast<size_t>(rank)];
    if (!place.open()) ++connected;  // else it missed our answer and tries again
    place = std::move(socket);
    if (connected == size_) connected -= close_ended(sockets);
  }
  // Nobody goes on, to where only MPI could be waited with, before all are here.
  for (int rank = 1; rank < size_; ++rank)
    if (!sockets[static_cast<size_t>(rank)].write_all(".", 1, deadline_s))
      throw PeerError("rank " + std::to_string(rank) + " is gone before all ranks were connected");
  return std::make_unique<Ends>(std::move(sockets));
}

std::unique_ptr<SocketChannel> connect_channel(const std::string& address, int rank,
                                               double timeout_s) {
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
      // Another host may own this address too; only rank 0 of this job answers.
      if (!socket.read_all(&answer, 1, attempt_s)) continue;
      if (!socket.read_all(&answer, 1, now_s() + timeout_s + kAttemptS))
        throw PeerError("rank " + std::to_string(rank) +
                        " is connected to rank 0, but another rank is not; what that one and rank "
                        "0 say tells why");
      std::vector<Socket> sockets(1);
      sockets[0] = std::move(socket);
      return std::make_unique<Ends>(std::move(sockets));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  throw PeerError("rank " + std::to_string(rank) + " could not connect to rank 0 at port" +
                  address.substr(secret.size()) + " within " +
                  std::to_string(static_cast<int>(timeout_s)) +
                  " s; check the network between the hosts or name an interface with "
                  "network_interfaces");
}

}  // namespace bagua
