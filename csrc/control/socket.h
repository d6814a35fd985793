// TCP sockets owned by objects, and the addresses of this machine.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace bagua {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    close();
    fd_ = std::exchange(other.fd_, -1);
    return *this;
  }

  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void close();

  // Whole buffers or false, within the deadline (a now_s() time).
  bool write_all(const void* data, size_t nbytes, double deadline_s) const;
  bool read_all(void* data, size_t nbytes, double deadline_s) const;

 private:
  int fd_ = -1;
};

struct Endpoint {
  std::string host;  // numeric
  int port = 0;
};

Socket listen_anywhere(int backlog, int* port);
// An open() socket or, at the deadline, one that is not.
Socket accept_one(const Socket& listener, double deadline_s);
Socket connect_to(const Endpoint& endpoint, double deadline_s);

// Numeric addresses of the interfaces that are up, those named in the comma-separated list only
// if it is not empty; loopback last, for peers on the same machine.
std::vector<std::string> local_addresses(const std::string& interfaces);

std::string random_hex(int nbytes);
std::string errno_text(const std::string& what);

}  // namespace bagua
