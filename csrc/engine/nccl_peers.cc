#include "engine/nccl_peers.h"

#include <algorithm>
#include <vector>

#include "codec/gpu.h"
#include "collective/coded.h"
#include "collective/mirrored.h"
#include "collective/neighbors.h"
#include "common/scaled.h"

namespace bagua {
namespace {

// What is worked on at a time: of this much the device has some rows.
constexpr int64_t kPartNbytes = scaled(32 << 20);
// Where kernels load several values at once.
constexpr int64_t kPlaceNbytes = 16;

int64_t whole_places(int64_t nbytes) {
  return (nbytes + kPlaceNbytes - 1) / kPlaceNbytes * kPlaceNbytes;
}

// Rows of floats that are added up, in order.
class Rows {
 public:
  Rows(const OnDevice& on, DType dtype, int most, int64_t count)
      : on_(on),
        dtype_(dtype),
        exact_(dtype == DType::kF32 ? Coding{find_codec("raw")} : half_coding(dtype)),
        item_(static_cast<int64_t>(dtype_nbytes(dtype))),
        stride_(whole_places(count * item_)),
        rows_(on.borrow(static_cast<size_t>(stride_ * most))),
        sum_(reinterpret_cast<float*>(on.borrow(static_cast<size_t>(count) * sizeof(float)))) {}

  char* at(int row) const { return rows_ + row * stride_; }
  float* floats_at(int row) const { return reinterpret_cast<float*>(at(row)); }
  void put(int row, const void* values, int64_t n) const {
    on_.device.copy(at(row), values, static_cast<size_t>(n * item_), on_.stream);
  }
  void scale(int row, int64_t n, double factor) const {
    if (factor != 1) gpu_scale(dtype_, at(row), n, factor, on_.device, on_.stream);
  }
  // The sum of the first rows, elsewhere.
  void add_up(int rows, Finish finish, int64_t n, void* to) const {
    gpu_add_up(exact_, {rows_, stride_, rows}, finish, nullptr, n, static_cast<char*>(to), sum_,
               on_.device, on_.stream);
  }

 private:
  const OnDevice& on_;
  const DType dtype_;
  const Coding exact_;
  const int64_t item_, stride_;
  char* const rows_;
  float* const sum_;
};

void average(const OnDevice& on, const Job& job, DType dtype, char* data, int64_t count) {
  const Meeting meet = meeting(job.peers, on.size, on.me);
  const Mean mean = mean_of(job, meet, on.me);
  Finish finish = job.finish;
  finish.divisor = mean.divisor;
  const auto sources = static_cast<int>(mean.sources.size());
  const auto item = static_cast<int64_t>(dtype_nbytes(dtype));
  if (sources == 1 && !mean.scaled && finish.identity()) return;  // it rests
  const int64_t part = std::min(count, kPartNbytes / item);
  const Rows rows(on, dtype, sources, part);
  int mine = 0;  // apart from data, which may be registered where theirs is not
  std::vector<NcclGroup::Place> theirs;
  for (int i = 0; i < sources; ++i) {
    const int rank = mean.sources[static_cast<size_t>(i)].rank;
    if (rank == on.me) mine = i;
    if (rank != on.me) theirs.push_back({rank, rows.at(i)});
  }
  for (int64_t at = 0; at < count; at += part, data += part * item) {
    const int64_t n = std::min(part, count - at);
    rows.put(mine, data, n);
    if (!theirs.empty()) on.nccl.meet(rows.at(mine), meet.give_to, theirs, n, dtype);
    for (int i = 0; i < sources; ++i) rows.scale(i, n, mean.sources[static_cast<size_t>(i)].factor);
    rows.add_up(sources, finish, n, data);
  }
}

// Parts begin where blocks of the codec do.
void mirror(const OnDevice& on, const Job& job, float* x, int64_t count) {
  const Coding& coding = *job.coding;
  const int left = (on.me + on.size - 1) % on.size, right = (on.me + 1) % on.size;
  const Shares shares = shares_of(job, left, on.me, right);
  const int64_t part = std::min<int64_t>(count, kPartNbytes / sizeof(float));
  const int64_t stride = whole_places(coding.wire_nbytes(part));
  char* const mine = on.borrow(static_cast<size_t>(3 * stride));
  char* const from_left = mine + stride;
  char* const from_right = left == right ? from_left : from_left + stride;
  std::vector<NcclGroup::Place> theirs = {{left, from_left}};
  if (left != right) theirs.push_back({right, from_right});
  const auto neighbors = left == right ? std::vector<int>{left} : std::vector<int>{left, right};
  const Rows rows(on, DType::kF32, 4, part);
  auto* const moved =
      reinterpret_cast<float*>(on.borrow(static_cast<size_t>(part) * sizeof(float)));
  for (int64_t at = 0; at < count; at += part, x += part) {
    const int64_t n = std::min(part, count - at);
    float *const w = job.kept[0] + at, *const l = job.kept[1] + at, *const r = job.kept[2] + at;
    const float factors[] = {shares.x, shares.l, shares.r, -shares.w};
    const float* values[] = {x, l, r, w};
    for (int i = 0; i < 4; ++i) {
      rows.put(i, values[i], n);
      rows.scale(i, n, factors[i]);
    }
    rows.add_up(4, {}, n, moved);
    gpu_encode(coding, moved, nullptr, n, mine, on.device, on.stream);
    on.nccl.meet(mine, neighbors, theirs, coding.wire_nbytes(n), DType::kU8);
    const auto follow = [&](const char* wire, float* copy) {
      rows.put(0, copy, n);
      gpu_decode(coding, wire, n, rows.floats_at(1), on.device, on.stream);
      rows.add_up(2, {}, n, copy);
    };
    follow(mine, w);
    on.device.copy(x, w, static_cast<size_t>(n) * sizeof(float), on.stream);
    follow(from_left, l);
    follow(from_right, r);
  }
}

}  // namespace

bool can_meet_on_device(DType dtype, bool coded) {
  return coded ? dtype == DType::kF32 : float_like(dtype);
}

void allreduce_with_peers(const OnDevice& on, const Job& job, DType dtype, char* data,
                          int64_t count) {
  if (job.coding) return mirror(on, job, reinterpret_cast<float*>(data), count);
  average(on, job, dtype, data, count);
}

void allreduce_with_peers(const OnDevice& on, const Job& job) {
  const Fragment& all = job.fragments.at(0);
  if (all.in != all.out)
    on.device.copy(all.out, all.in, static_cast<size_t>(all.count) * job.item(), on.stream);
  allreduce_with_peers(on, job, job.dtype, all.out, all.count);
}

}  // namespace bagua
