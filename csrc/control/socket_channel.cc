#include "control/socket_channel.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include "common/clock.h"
#include "common/errors.h"
#include "control/link.h"

namespace bagua {
namespace {

constexpr int32_t kEveryone = -1;  // whose a frame is that the carrier shares with all

class Ends : public SocketChannel {
 public:
  Ends(int rank, std::vector<Socket> sockets_by_rank)
      : rank_(rank),
        epoll_(::epoll_create1(EPOLL_CLOEXEC)),
        doze_epoll_(::epoll_create1(EPOLL_CLOEXEC)),
        event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {
    if (!epoll_.open() || !doze_epoll_.open() || !event_.open() || !timer_.open())
      throw InternalError(errno_text("epoll, eventfd or timerfd"));
    watch(EPOLL_CTL_ADD, event_.fd(), kWake, EPOLLIN);
    watch(EPOLL_CTL_ADD, timer_.fd(), kTimer, EPOLLIN);
    hush(false);
    for (size_t peer = 0; peer < sockets_by_rank.size(); ++peer)
      if (sockets_by_rank[peer].open())
        add(static_cast<int>(peer), std::move(sockets_by_rank[peer]));
    std::vector<int> themselves(sockets_by_rank.size());
    std::iota(themselves.begin(), themselves.end(), 0);
    set_carriers(std::move(themselves));
  }

  ~Ends() override { Ends::close(); }

  // A last goodbye may still be in our hands; give the kernel a moment to take it.
  void close() override {
    const double deadline_s = now_s() + 0.2;
    for (Link& peer : peers_) peer.close(deadline_s);
  }

  void share(int rank, char* out, char* in, std::shared_ptr<void> keepalive) override {
    at(rank).share(Ring(out), Ring(in), std::move(keepalive));
    near_.push_back(rank);
  }

  void go_by(int carrier, Socket socket) override {
    add(carrier, std::move(socket));
    carrier_ = carrier;
  }

  void carry(int rank, Socket socket) override {
    add(rank, std::move(socket));
    carried_.push_back(rank);
  }

  void set_carriers(std::vector<int> carriers) override {
    carriers_ = std::move(carriers);
    loads_.assign(carriers_.size(), {});
    for (const int carrier : carriers_) ++loads_[static_cast<size_t>(carrier)].size;
  }

  int carrier_of(int rank) const override {
    return rank_ == 0 ? carriers_[static_cast<size_t>(rank)] : carrier_ ? carrier_ : rank_;
  }

  bool carries() const override {
    const auto is_there = [this](int rank) { return at(rank).open(); };
    return std::any_of(carried_.begin(), carried_.end(), is_there) && is_there(0);
  }

  bool all_ended() const override {
    for (size_t rank = 0; rank < carriers_.size(); ++rank)
      if (loads_[static_cast<size_t>(carriers_[rank])].size > 1 && peers_[rank].open())
        return false;
    return true;
  }

  bool ended(int rank) const override {
    if (peers_.size() <= static_cast<size_t>(rank) || !at(rank).was_open()) return false;
    pollfd looked{at(rank).fd(), POLLRDHUP, 0};
    return !at(rank).open() || ::poll(&looked, 1, 0) > 0;
  }

  void send(int rank, std::string_view bytes) override {
    at(rank).put(rank_ == 0 ? rank : rank_, bytes);
    push(rank);
  }

  void post(const std::vector<int>& ranks, std::string_view bytes) override {
    if (rank_ != 0) {
      at(carrier_).put(rank_, bytes);
      return push(carrier_);
    }
    for (const int rank : ranks) ++loads_[place_of(rank)].asked;
    for (const int rank : ranks) {
      const size_t carrier = place_of(rank);
      Load& load = loads_[carrier];
      const bool all = load.asked == load.size;
      if (!all || !load.told) peers_[carrier].put(all ? kEveryone : rank, bytes);
      load.told = true;
    }
    for (const int rank : ranks) {
      const size_t carrier = place_of(rank);
      Load& load = loads_[carrier];
      if (load.told) push(static_cast<int>(carrier));
      load = {load.size};
    }
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
      const int rank = static_cast<int>(name);
      if (events[i].events & EPOLLOUT && at(rank).resume())
        watch(EPOLL_CTL_MOD, at(rank).fd(), name, EPOLLIN);
      if (events[i].events & ~static_cast<uint32_t>(EPOLLOUT)) read(rank, inbox);
    }
    pass_on();
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
  // What rank 0 is about to post by one rank.
  struct Load {
    size_t size = 0;   // of all that go by it
    size_t asked = 0;  // of those that this is for
    bool told = false;
  };

  Link& at(int rank) { return peers_[static_cast<size_t>(rank)]; }
  const Link& at(int rank) const { return peers_[static_cast<size_t>(rank)]; }
  size_t place_of(int rank) const {
    return static_cast<size_t>(carriers_[static_cast<size_t>(rank)]);
  }

  void add(int rank, Socket socket) {
    if (peers_.size() <= static_cast<size_t>(rank)) peers_.resize(static_cast<size_t>(rank) + 1);
    at(rank).connect(std::move(socket));
    watch(EPOLL_CTL_ADD, at(rank).fd(), static_cast<uint32_t>(rank), EPOLLIN);
  }

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
      at(rank).sleeps(asleep);
      any = any || at(rank).ring_has_some();
    }
    if (asleep && any) wake();
  }

  void look_at_rings(std::vector<Message>& inbox) {
    for (const int rank : near_) {
      push(rank);
      if (!at(rank).ring_has_some()) continue;
      at(rank).read_ring();
      unpack(rank, inbox);
    }
    pass_on();
  }

  // What unpack() has found to be others'.
  void pass_on() {
    if (carried_.empty()) return;
    push(0);
    for (const int rank : carried_) push(rank);
  }

  // As much of what was put as there is room for; the rest when there is.
  void push(int rank) {
    if (at(rank).push())
      watch(EPOLL_CTL_MOD, at(rank).fd(), static_cast<uint32_t>(rank), EPOLLIN | EPOLLOUT);
  }

  void read(int rank, std::vector<Message>& inbox) {
    const bool over = !at(rank).read();
    unpack(rank, inbox);
    if (!over) return;
    // Closing does not take it out of the set while somebody has a copy.
    ::epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, at(rank).fd(), nullptr);
    at(rank).cut();
    if (rank == 0 || rank_ == 0) inbox.push_back({rank, true, {}});
  }

  void unpack(int rank, std::vector<Message>& inbox) {
    at(rank).unpack(
        [&](int32_t whose, std::string_view frame) { deliver(rank, whose, frame, inbox); });
  }

  // What has come by `rank`, and is for, or from, whom?
  void deliver(int rank, int32_t whose, std::string_view frame, std::vector<Message>& inbox) {
    if (rank_ == 0) return inbox.push_back({whose, false, std::string(frame)});
    if (rank == 0 || rank == carrier_) {
      if (whose == rank_ || whose == kEveryone) inbox.push_back({0, false, std::string(frame)});
      for (const int carried : carried_)
        if (whose == carried || whose == kEveryone) at(carried).put(carried, frame);
    } else {
      at(0).put(whose, frame);
    }
  }

  const int rank_;
  Socket epoll_;       // everything receive() looks at
  Socket doze_epoll_;  // epoll_ itself, unless hushed
  Socket event_;
  Socket timer_;
  std::vector<Link> peers_;    // by rank
  std::vector<int> near_;      // ranks with rings
  int carrier_ = 0;            // by whom this rank's posts go
  std::vector<int> carried_;   // whose posts go by this one
  std::vector<int> carriers_;  // rank 0: by rank
  std::vector<Load> loads_;    // by carrier

  std::mutex mutex_;  // of what follows: who sleeps
  bool receiving_ = false, dozing_ = false, hushed_ = false;
  bool asleep_ = false;
};

}  // namespace

std::unique_ptr<SocketChannel> accept_channel(SocketListener& listener, double timeout_s) {
  return std::make_unique<Ends>(0, listener.accept(timeout_s));
}

std::unique_ptr<SocketChannel> connect_channel(const std::string& address, int rank,
                                               double timeout_s) {
  std::vector<Socket> sockets(1);
  sockets[0] = connect_to_listener(address, 0, rank, timeout_s);
  return std::make_unique<Ends>(rank, std::move(sockets));
}

}  // namespace bagua
