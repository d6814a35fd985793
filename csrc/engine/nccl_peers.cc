#include "engine/nccl_peers.h"

#include <algorithm>
#include <vector>

#include "codec/gpu.h"
#include "collective/coded.h"
#include "collective/neighbors.h"
#include "common/scaled.h"

namespace bagua {
namespace {

// At a time: the device has this once for each who meets, and once as floats.
constexpr int64_t kPartNbytes = scaled(32 << 20);
// Where kernels load rows of any floats.
constexpr int64_t kRowNbytes = 16;

int64_t whole_rows(int64_t nbytes) { return (nbytes + kRowNbytes - 1) / kRowNbytes * kRowNbytes; }

}  // namespace

bool can_meet_on_device(DType dtype) { return float_like(dtype); }

void allreduce_with_peers(const OnDevice& on, const Job& job, DType dtype, char* data,
                          int64_t count) {
  const Meeting meet = meeting(job.peers, on.size, on.me);
  const Mean mean = mean_of(job, meet, on.me);
  Finish finish = job.finish;
  finish.divisor = mean.divisor;
  const auto sources = static_cast<int>(mean.sources.size());
  const Coding exact = dtype == DType::kF32 ? parse_coding("raw") : half_coding(dtype);
  const auto item = static_cast<int64_t>(dtype_nbytes(dtype));
  const int64_t part = std::min(count, kPartNbytes / item), stride = whole_rows(part * item);
  char* const places = on.borrow(static_cast<size_t>(stride * sources));
  auto* const floats =
      reinterpret_cast<float*>(on.borrow(static_cast<size_t>(part) * sizeof(float)));
  for (int64_t at = 0; at < count; at += part, data += part * item) {
    const int64_t n = std::min(part, count - at);
    char* mine = nullptr;  // apart from data, which may be registered where places are not
    std::vector<NcclGroup::Place> theirs;
    for (int i = 0; i < sources; ++i) {
      const int rank = mean.sources[static_cast<size_t>(i)].rank;
      char* const place = places + i * stride;
      if (rank == on.me) mine = place;
      if (rank != on.me) theirs.push_back({rank, place});
    }
    on.device.copy(mine, data, static_cast<size_t>(n * item), on.stream);
    if (!theirs.empty()) on.nccl.meet(mine, meet.give_to, theirs, n, dtype);
    for (int i = 0; mean.scaled && i < sources; ++i)
      gpu_scale(dtype, places + i * stride, n, mean.sources[static_cast<size_t>(i)].factor,
                on.device, on.stream);
    gpu_add_up(exact, {places, stride, sources}, finish, nullptr, n, data, floats, on.device,
               on.stream);
  }
}

void allreduce_with_peers(const OnDevice& on, const Job& job) {
  const Fragment& all = job.fragments.at(0);
  if (all.in != all.out)
    on.device.copy(all.out, all.in, static_cast<size_t>(all.count) * job.item(), on.stream);
  allreduce_with_peers(on, job, job.dtype, all.out, all.count);
}

}  // namespace bagua
