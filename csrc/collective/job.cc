#include "collective/collective.h"

namespace bagua {
namespace {

// From here on it pays to wake somebody up; a piece is what one thread takes at a time.
constexpr size_t kCrewNbytes = 1 << 20;
constexpr int64_t kPieceNbytes = 128 << 10;

}  // namespace

void Job::reduce(const Targets& targets, const void* const* srcs, int nsrcs, int64_t n,
                 Finish finish) const {
  group.touch(static_cast<size_t>((nsrcs + targets.count) * n) * item());
  if (!crew || static_cast<size_t>(n) * item() < kCrewNbytes || !crew->idle())
    return bagua::reduce(dtype, op, targets, srcs, nsrcs, n, finish);
  crew->share(n, kPieceNbytes / static_cast<int64_t>(item()), [&](int64_t begin, int64_t count) {
    const auto at = begin * static_cast<int64_t>(item());
    std::vector<const void*> from;
    for (int i = 0; i < nsrcs; ++i) from.push_back(static_cast<const char*>(srcs[i]) + at);
    std::vector<void*> to;
    for (int i = 0; i < targets.count; ++i) to.push_back(static_cast<char*>(targets.all[i]) + at);
    bagua::reduce(dtype, op, {to.data(), targets.count, targets.streamed}, from.data(), nsrcs,
                  count, finish);
    if (targets.streamed > 0) stream_fence();  // nobody else's covers this thread's stores
  });
}

}  // namespace bagua
