// TCP sockets owned by objects, and the addresses of this machine.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace bagua {

// A child of fork() has none of its parent's: its copies are closed at once, so that they do not
// keep a connection open when the parent is killed.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : own_(std::make_unique<Descriptor>(fd)) {}

  int fd() const { return own_ ? own_->fd : -1; }
  bool open() const { return fd() >= 0; }
  void close() { own_.reset(); }

  // Whole buffers or false, within the deadline (a now_s() time).
  bool write_all(const void* data, size_t nbytes, double deadline_s) const;
  bool read_all(void* data, size_t nbytes, double deadline_s) const;

 private:
  struct Descriptor {
    explicit Descriptor(int fd);
    ~Descriptor();
    Descriptor(const Descriptor&) = delete;
    void in_child();
    int fd;
  };
  std::unique_ptr<Descriptor> own_;
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
