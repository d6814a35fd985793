#include "engine/staging.h"

#include <algorithm>
#include <utility>

#include "common/memory.h"

namespace bagua {
namespace {

// Large enough for the full speed of a bus, small enough for an exchange to begin early.
constexpr size_t kChunkNbytes = 1 << 20;

}  // namespace

Staging::Staging(Device& device, std::shared_ptr<Arenas> arenas, Warn warn)
    : device_(device),
      arenas_(std::move(arenas)),
      warn_(std::move(warn)),
      in_(device.add_stream()),
      out_(device.add_stream()) {}

// Everything has come that was waited for; nobody has waited for what left.
Staging::~Staging() {
  try {
    device_.drain(out_);
  } catch (const std::exception&) {  // it is broken, and writes no more
  }
}

void Staging::begin(const std::vector<RequestPtr>& requests, Group& group, bool brings) {
  group_ = &group;
  device_.let_go();
  chunks_.clear();
  results_.clear();
  chunks_there_ = 0;
  ended_ = false;
  requests_.clear();
  for (const RequestPtr& request : requests)
    if (request->device) {
      requests_.push_back(request);
      keepalives_.push_back(request->keepalive);
    }

  // What an allreduce or a broadcast gives is where its input was.
  const OpKind kind = requests[0]->description.kind;
  const bool in_place = kind == OpKind::kAllreduce || kind == OpKind::kBroadcast;
  struct Need {
    const char* from;
    char* to;  // of the result, on the device; or null
    size_t in_nbytes, out_nbytes;
    std::function<void(char* in, char* out)> place;
  };
  std::vector<Need> needs;
  // What is kept from time to time comes first: where values are, it is, too.
  for (const RequestPtr& request : requests_) {
    if (!request->kept[0]) continue;
    int64_t count = 0;
    for (const TensorInfo& tensor : tensors_of(request->description)) count += tensor.count();
    const size_t nbytes = static_cast<size_t>(count) * sizeof(float);
    for (float*& kept : request->kept) {
      auto* memory = reinterpret_cast<char*>(kept);
      const auto place = [&kept](char* in, char*) { kept = reinterpret_cast<float*>(in); };
      if (memory) needs.push_back({memory, memory, nbytes, nbytes, place});
    }
  }
  tensors_ = 0;
  for (const RequestPtr& request : requests_) {
    const std::vector<TensorInfo> tensors = tensors_of(request->description);
    for (size_t i = 0; i < request->parts.size(); ++i) {
      Part& part = request->parts[i];
      if (!part.on_device) continue;
      const TensorInfo& tensor = tensors[i];
      const int64_t rows = request->rows.empty() || tensor.shape.empty() ? -1 : request->rows[i];
      const int64_t count = rows < 0 ? tensor.count() : rows * tensor.row_count();
      int64_t out_count = part.out ? count : 0;
      if (kind == OpKind::kReducescatter)
        out_count = slice_of(tensor.shape[0], group.size(), group.me()).count * tensor.row_count();
      const auto item = static_cast<int64_t>(dtype_nbytes(tensor.dtype));
      const auto place = [&part](char* in, char* out) {
        part = {in, part.out ? out : nullptr, /*on_device=*/false, /*staged=*/true};
      };
      needs.push_back({part.in, part.out, static_cast<size_t>(count * item),
                       static_cast<size_t>(out_count * item), place});
      ++tensors_;
    }
  }
  size_t total = 0;
  for (const Need& need : needs) total += whole_lines(need.in_nbytes) * (in_place ? 1 : 2);
  turn_ ^= 1;
  places_ = 0;
  char* room = room_in(memories_[turn_], total, /*host_writes_first=*/!brings || !in_place);
  for (const RequestPtr& request : requests_)
    for (const Device::Mark& start : request->starts) device_.follow(brings ? in_ : out_, start);
  for (const Need& need : needs) {
    char* in = room;
    char* out = in_place ? in : in + whole_lines(need.in_nbytes);
    if (brings) bring(in, need.from, need.in_nbytes);
    if (need.out_nbytes > 0) results_.push_back({out, need.to, need.out_nbytes});
    need.place(in, out);
    room = out + whole_lines(need.in_nbytes);
  }
}

// Memory from which everything has left by the time that somebody writes there: the device follows
// what it took, the host has to wait. It may take a while to get more.
char* Staging::room_in(Memory& memory, size_t nbytes, bool host_writes_first) {
  const bool grows = memory.nbytes < nbytes;
  if (grows || host_writes_first) group_->wait_until([&] { return device_.reached(memory.given); });
  if (grows) {
    const size_t more = std::max(nbytes, 2 * memory.nbytes);
    memory = {};  // let go before asking for more
    const auto data = arenas_ ? arenas_->allocate(more) : allocate_lines(more);
    memory = {device_.pin(data, more), more, nullptr};
    if (!memory.data) {
      memory.data = data;
      if (!std::exchange(warned_, true))
        warn_(device_.name() +
              " cannot pin memory of the host (is there a limit, ulimit -l?): "
              "what is exchanged waits for what was computed before");
    }
  }
  device_.follow(in_, memory.given);
  return memory.data.get();
}

void Staging::bring(char* to, const char* from, size_t nbytes) {
  for (size_t at = 0; at < nbytes; at += kChunkNbytes) {
    const size_t n = std::min(kChunkNbytes, nbytes - at);
    device_.copy(to + at, from + at, n, in_);
    group_->touch(2 * n);
    chunks_.push_back({to + at + n, device_.mark(in_)});
  }
}

void Staging::need(const char* data, size_t nbytes) {
  const auto there = [&] { return chunks_there_ == 0 ? nullptr : chunks_[chunks_there_ - 1].end; };
  for (; chunks_there_ < chunks_.size() && there() < data + nbytes; ++chunks_there_) {
    const Device::Mark& mark = chunks_[chunks_there_].mark;
    group_->wait_until([&] { return device_.reached(mark); });
  }
}

void Staging::need() {
  if (!chunks_.empty()) need(chunks_.back().end, 0);
}

char* Staging::place_for(char* result, size_t nbytes) {
  std::deque<Memory>& memories = of_places_[turn_];
  if (places_ == memories.size()) memories.emplace_back();
  char* place = room_in(memories[places_++], std::max<size_t>(nbytes, 1), true);
  if (nbytes == 0) return place;
  results_.insert(after(place), {place, result, nbytes});
  ++tensors_;
  return place;
}

// The first result that lies behind a place.
std::vector<Staging::Result>::iterator Staging::after(const char* place) {
  return std::upper_bound(results_.begin(), results_.end(), place,
                          [](const char* at, const Result& result) { return at < result.from; });
}

bool Staging::holds(const char* data) const {
  return std::any_of(results_.begin(), results_.end(), [&](const Result& result) {
    return data >= result.from && data < result.from + result.nbytes;
  });
}

void Staging::give(const char* data, size_t nbytes) {
  if (nbytes == 0) return;
  if (tensors_ > 1) need();  // they may share memory: all are read before one is written
  Result& result = *std::prev(after(data));
  result.given = true;
  device_.copy(result.to + (data - result.from), data, nbytes, out_);
  group_->touch(2 * nbytes);
}

void Staging::end() {
  if (std::exchange(ended_, true)) return;
  need();
  for (Result& result : results_)
    if (!result.given) give(result.from, result.nbytes);
  const Device::Mark end = device_.mark(out_);
  memories_[turn_].given = end;
  for (size_t i = 0; i < places_; ++i) of_places_[turn_][i].given = end;
  for (const RequestPtr& request : requests_)
    request->handle->returned_to(device_, end, /*may_fail=*/false);
  requests_.clear();
  keepalives_.clear();
}

}  // namespace bagua
