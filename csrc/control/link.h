// One connection of the control channel and what waits on either side of it, in frames: whose each
// is, and bytes. They go through the socket, or through two rings if these are there; then the
// socket only wakes, and tells of a loss.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "control/ring.h"
#include "control/socket.h"

namespace bagua {

class Link {
 public:
  struct Header {
    uint32_t length;
    int32_t rank;
  };

  void connect(Socket socket) {
    socket_ = std::move(socket);
    was_open_ = true;
  }
  void share(Ring out, Ring in, std::shared_ptr<void> keepalive);
  bool open() const { return socket_.open(); }
  bool was_open() const { return was_open_; }  // is, or has been
  int fd() const { return socket_.fd(); }
  // What was put, within a moment; and the end.
  void close(double deadline_s);
  // Nobody is there any more.
  void cut();

  // Adds a frame to what is to be sent; to a peer that is gone, nothing.
  void put(int32_t rank, std::string_view bytes);
  // Sends as much as there is room for. Whether from now on the socket has to be watched for more.
  bool push();
  // There is room in the socket that is watched. Whether it need not be any more.
  bool resume();

  // Takes what has come. False at the end.
  bool read();
  // The same, of the ring alone.
  void read_ring();
  bool ring_has_some() const { return !in_.empty(); }
  // Says whether this side sleeps; a peer that writes then wakes it. Look once more after that.
  void sleeps(bool asleep) { in_.sleeps(asleep); }

  // Hands on the frames that are whole: deliver(rank, bytes).
  template <class Deliver>
  void unpack(Deliver&& deliver) {
    size_t begin = 0;
    while (incoming_.size() - begin >= sizeof(Header)) {
      Header header;
      std::memcpy(&header, incoming_.data() + begin, sizeof header);
      if (incoming_.size() - begin - sizeof header < header.length) break;
      begin += sizeof header;
      deliver(header.rank, std::string_view(incoming_.data() + begin, header.length));
      begin += header.length;
    }
    incoming_.erase(0, begin);
  }

 private:
  void flush();
  void flush_to_ring();
  void forget_sent();
  void wake_peer() const;

  Socket socket_;
  bool was_open_ = false;
  Ring in_, out_;
  std::string incoming_;  // bytes of a frame not yet whole
  std::string outgoing_;  // bytes that found no room yet, after the first `left_` of them
  size_t left_ = 0;
  bool watched_ = false;
  std::shared_ptr<void> keepalive_;
};

}  // namespace bagua
