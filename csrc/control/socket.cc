#include "control/socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <sstream>

#include "common/clock.h"
#include "common/errors.h"
#include "common/forked.h"
#include "common/random.h"

namespace bagua {
namespace {

bool wait_for(int fd, short events, double deadline_s) {
  for (;;) {
    const double left_s = deadline_s - now_s();
    if (left_s <= 0) return false;
    pollfd waiting{fd, events, 0};
    const int n = ::poll(&waiting, 1, static_cast<int>(left_s * 1000) + 1);
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
  }
}

Socket prepared(int fd) {
  if (fd < 0) return Socket();
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  return Socket(fd);
}

bool listed(const std::string& interfaces, const std::string& name) {
  std::istringstream list(interfaces);
  for (std::string item; std::getline(list, item, ',');)
    if (item == name) return true;
  return false;
}

}  // namespace

Socket::Descriptor::Descriptor(int fd) : fd(fd) { Forked<Descriptor>::all().add(this); }

// All in one, or a child made meanwhile would close what has the same number next.
Socket::Descriptor::~Descriptor() {
  Forked<Descriptor>::all().remove(this, [this] { in_child(); });
}

void Socket::Descriptor::in_child() {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

bool Socket::write_all(const void* data, size_t nbytes, double deadline_s) const {
  const char* from = static_cast<const char*>(data);
  while (nbytes > 0) {
    if (!wait_for(fd(), POLLOUT, deadline_s)) return false;
    const ssize_t n = ::send(fd(), from, nbytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return false;
    from += n;
    nbytes -= static_cast<size_t>(n);
  }
  return true;
}

bool Socket::read_all(void* data, size_t nbytes, double deadline_s) const {
  char* to = static_cast<char*>(data);
  while (nbytes > 0) {
    if (!wait_for(fd(), POLLIN, deadline_s)) return false;
    const ssize_t n = ::recv(fd(), to, nbytes, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return false;
    to += n;
    nbytes -= static_cast<size_t>(n);
  }
  return true;
}

// One dual-stack socket; where the kernel has no IPv6, plain IPv4.
Socket listen_anywhere(int backlog, int* port) {
  for (const int family : {AF_INET6, AF_INET}) {
    Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket.open()) continue;
    sockaddr_storage address{};
    address.ss_family = static_cast<sa_family_t>(family);
    socklen_t length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    const int zero = 0;
    if (family == AF_INET6)
      ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
    if (::bind(socket.fd(), reinterpret_cast<sockaddr*>(&address), length) != 0) continue;
    if (::listen(socket.fd(), backlog) != 0) continue;
    ::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &length);
    *port = ntohs(family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                     : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
    return socket;
  }
  throw InternalError(errno_text("cannot listen for control connections"));
}

Socket accept_one(const Socket& listener, double deadline_s) {
  if (!wait_for(listener.fd(), POLLIN, deadline_s)) return Socket();
  return prepared(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
}

Socket connect_to(const Endpoint& endpoint, double deadline_s) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  if (::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found) !=
      0)
    return Socket();
  Socket socket = prepared(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const bool started =
      socket.open() &&
      (::connect(socket.fd(), found->ai_addr, found->ai_addrlen) == 0 || errno == EINPROGRESS);
  ::freeaddrinfo(found);
  if (!started || !wait_for(socket.fd(), POLLOUT, deadline_s)) return Socket();
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error == 0 ? std::move(socket) : Socket();
}

std::vector<std::string> local_addresses(const std::string& interfaces) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) throw InternalError(errno_text("getifaddrs"));
  std::vector<std::string> outside, loopback;
  for (const ifaddrs* it = all; it; it = it->ifa_next) {
    if (!it->ifa_addr || !(it->ifa_flags & IFF_UP)) continue;
    const int family = it->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (!interfaces.empty() && !listed(interfaces, it->ifa_name)) continue;
    char host[NI_MAXHOST];
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (::getnameinfo(it->ifa_addr, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0)
      continue;
    if (std::strchr(host, '%')) continue;  // link-local: means nothing on another machine
    (it->ifa_flags & IFF_LOOPBACK ? loopback : outside).push_back(host);
  }
  ::freeifaddrs(all);
  outside.insert(outside.end(), loopback.begin(), loopback.end());
  if (outside.empty())
    throw UsageError("no network interface that is up" +
                     (interfaces.empty() ? std::string() : " among '" + interfaces + "'") +
                     "; check network_interfaces");
  return outside;
}

std::string random_hex(int nbytes) {
  std::string bytes(static_cast<size_t>(nbytes), '\0');
  fill_randomly(bytes.data(), bytes.size());
  std::string hex;
  for (const unsigned char c : bytes) {
    hex += "0123456789abcdef"[c >> 4];
    hex += "0123456789abcdef"[c & 15];
  }
  return hex;
}

std::string errno_text(const std::string& what) { return what + ": " + std::strerror(errno); }

}  // namespace bagua
