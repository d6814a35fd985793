#include <algorithm>

#include "collective/collective.h"

namespace bagua {
namespace {

// From here on it pays to wake somebody up; a piece is what one thread takes at a time.
constexpr size_t kCrewNbytes = 1 << 20;
constexpr int64_t kPieceNbytes = 128 << 10;
// Rows whose pieces need no memory to be named.
constexpr int kMostRows = 256;

}  // namespace

void Job::reduce(const Targets& targets, const void* const* srcs, int nsrcs, int64_t n,
                 Finish finish) const {
  const auto step = static_cast<int64_t>(item());
  const bool helped = crew && static_cast<size_t>(n) * item() >= kCrewNbytes && crew->idle();
  const auto touch = [&](int64_t count) {
    group.touch(static_cast<size_t>((nsrcs + targets.count) * count * step));
  };
  if (nsrcs > kMostRows || targets.count > kMostRows) {
    touch(n);
    return bagua::reduce(dtype, op, targets, srcs, nsrcs, n, finish);
  }
  const auto piece = [&](int64_t begin, int64_t count) {
    const void* from[kMostRows];
    void* to[kMostRows];
    for (int i = 0; i < nsrcs; ++i) from[i] = static_cast<const char*>(srcs[i]) + begin * step;
    for (int i = 0; i < targets.count; ++i)
      to[i] = static_cast<char*>(targets.all[i]) + begin * step;
    bagua::reduce(dtype, op, {to, targets.count, targets.streamed}, from, nsrcs, count, finish);
    if (targets.streamed > 0) stream_fence();  // nobody else's covers a helper's stores
  };
  const int64_t at_once = kLongNbytes / step;
  for (int64_t at = 0; at < n; at += at_once) {
    const int64_t count = std::min(at_once, n - at);
    touch(count);
    if (!helped) {
      piece(at, count);
      continue;
    }
    crew->share(count, kPieceNbytes / step,
                [&](int64_t begin, int64_t some) { piece(at + begin, some); });
  }
}

}  // namespace bagua
