#include "control/link.h"

#include <errno.h>
#include <sys/socket.h>

#include "common/clock.h"

namespace bagua {

void Link::share(Ring out, Ring in, std::shared_ptr<void> keepalive) {
  out_ = out;
  in_ = in;
  keepalive_ = std::move(keepalive);
}

void Link::close(double deadline_s) {
  while (out_.there() && open() && !outgoing_.empty() && now_s() < deadline_s) flush();
  if (open() && !out_.there())
    socket_.write_all(outgoing_.data() + left_, outgoing_.size() - left_, deadline_s);
  cut();
}

void Link::cut() {
  socket_.close();
  outgoing_.clear();
  left_ = 0;
}

// ---- sending ---------------------------------------------------------------------------------

void Link::put(int32_t rank, std::string_view bytes) {
  if (!open()) return;
  const Header header{static_cast<uint32_t>(bytes.size()), rank};
  outgoing_.append(reinterpret_cast<const char*>(&header), sizeof header);
  outgoing_.append(bytes);
}

bool Link::push() {
  if (outgoing_.empty() || watched_) return false;
  flush();
  return watched_ = !outgoing_.empty() && !out_.there();
}

bool Link::resume() {
  flush();
  watched_ = !outgoing_.empty();
  return !watched_;
}

void Link::flush() {
  if (out_.there()) return flush_to_ring();
  while (left_ < outgoing_.size()) {
    const ssize_t n = ::send(fd(), outgoing_.data() + left_, outgoing_.size() - left_,
                             MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (n < 0) left_ = outgoing_.size();  // broken: reading will report the loss
    if (n > 0) left_ += static_cast<size_t>(n);
  }
  forget_sent();
}

void Link::flush_to_ring() {
  const auto write = [this] {
    left_ += out_.write(outgoing_.data() + left_, outgoing_.size() - left_);
    return left_ == outgoing_.size();
  };
  if (!write()) {
    out_.wait_for_room();
    write();
  }
  forget_sent();
  if (out_.must_wake_reader()) wake_peer();
}

void Link::forget_sent() {
  if (left_ < outgoing_.size() / 2) return;  // or else every byte is moved many times
  outgoing_.erase(0, left_);
  left_ = 0;
}

void Link::wake_peer() const {
  if (!open()) return;
  // A full socket wakes by what is in it already.
  if (::send(fd(), "!", 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;
}

// ---- receiving -------------------------------------------------------------------------------

bool Link::read() {
  char buffer[16 << 10];
  ssize_t n;
  do {
    n = ::recv(fd(), buffer, sizeof buffer, MSG_DONTWAIT);
    // Where frames come through a ring there are but bells here.
    if (n > 0 && !in_.there()) incoming_.append(buffer, static_cast<size_t>(n));
  } while (n == static_cast<ssize_t>(sizeof buffer) || (n < 0 && errno == EINTR));
  const bool over = n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
  if (in_.there()) {
    push();  // there may be room again
    read_ring();
  }
  return !over;
}

void Link::read_ring() {
  in_.read(incoming_);
  if (in_.must_wake_writer()) wake_peer();
}

}  // namespace bagua
