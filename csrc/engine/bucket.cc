#include "engine/bucket.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <new>

#include "common/memory.h"

namespace bagua {
namespace {

// Pages that nobody writes to cost nothing.
std::shared_ptr<float> zeros(int64_t count) {
  auto* data =
      static_cast<float*>(std::calloc(static_cast<size_t>(std::max<int64_t>(count, 1)), 4));
  if (!data) throw std::bad_alloc();
  return {data, [](float* p) { std::free(p); }};
}

// Where the arenas of all buckets begin and end.
struct AllArenas {
  std::mutex mutex;
  std::map<const char*, const char*> ends;
};
AllArenas& arenas() {
  static auto* all = new AllArenas;
  return *all;
}

}  // namespace

Bucket::~Bucket() {
  std::lock_guard<std::mutex> lock(arenas().mutex);
  arenas().ends.erase(arena_.get());
}

bool Bucket::in_an_arena(const char* data) {
  std::lock_guard<std::mutex> lock(arenas().mutex);
  const auto next = arenas().ends.upper_bound(data);
  return next != arenas().ends.begin() && data < std::prev(next)->second;
}

Bucket::Bucket(std::shared_ptr<Engine> engine, std::string name, DType dtype,
               const std::vector<int64_t>& slot_counts, Description exchange, int32_t set,
               int32_t priority, int kept, Device* device, const Allocate& allocate)
    : engine_(std::move(engine)),
      name_(std::move(name)),
      dtype_(dtype),
      set_(set),
      device_(device),
      description_(std::move(exchange)),
      is_ready_(slot_counts.size()),
      left_(slot_counts.size()) {
  description_.priority = priority;
  description_.on_device = device != nullptr;
  const auto item = static_cast<int64_t>(dtype_nbytes(dtype));
  const bool adasum = description_.op == ReduceOp::kAdasum;  // weighs every tensor by itself
  const bool coded = !description_.codec.empty();
  const bool anywhere = !device && !adasum && (description_.peers.empty() || coded) &&
                        engine_->exchanges_anywhere(set);
  std::vector<int> together, alone;
  for (size_t i = 0; i < slot_counts.size(); ++i) {
    const bool large = anywhere && slot_counts[i] * item >= kLoneNbytes;
    (adasum || large ? alone : together).push_back(static_cast<int>(i));
  }
  begins_.resize(slot_counts.size());
  part_of_.assign(slot_counts.size(), -1);
  const int64_t shared = add_slots(together, slot_counts);
  add_slots(alone, slot_counts);
  const auto arena_nbytes = static_cast<size_t>(nbytes());
  arena_ = device ? allocate(arena_nbytes) : engine_->allocate(arena_nbytes);
  if (kept > static_cast<int>(Kept().size()))
    throw InternalError("a bucket keeps 3 floats a value");
  for (int i = 0; i < kept; ++i) {
    if (!device) {
      kept_.push_back(zeros(count_));
      continue;
    }
    const auto memory = allocate(static_cast<size_t>(count_) * sizeof(float));
    kept_.emplace_back(memory, reinterpret_cast<float*>(memory.get()));
  }
  if (shared > 0 || alone.empty()) add_part(0, shared);
  for (const int slot : alone) {
    if (anywhere) part_of_[static_cast<size_t>(slot)] = static_cast<int>(parts_.size());
    add_part(begins_[static_cast<size_t>(slot)], slot_counts[static_cast<size_t>(slot)]);
  }
  // Last: only a whole bucket takes it back.
  std::lock_guard<std::mutex> lock(arenas().mutex);
  arenas().ends[arena_.get()] = arena_.get() + nbytes();
}

// Gives these slots places behind those there are; returns the end of the last.
int64_t Bucket::add_slots(const std::vector<int>& slots, const std::vector<int64_t>& counts) {
  const auto line = description_.codec.empty()
                        ? static_cast<int64_t>(kLineNbytes / dtype_nbytes(dtype_))
                        : int64_t{1};
  for (const int slot : slots) {
    begins_[static_cast<size_t>(slot)] = count_;
    count_ += (counts[static_cast<size_t>(slot)] + line - 1) / line * line;
  }
  return count_;
}

std::vector<bool> Bucket::large() const {
  std::vector<bool> large;
  for (const int part : part_of_) large.push_back(part >= 0);
  return large;
}

void Bucket::add_part(int64_t begin, int64_t count) {
  char* data = arena_.get() + begin * static_cast<int64_t>(dtype_nbytes(dtype_));
  description_.add_tensor(dtype_, {count});
  parts_.push_back({data, data, device_ != nullptr});
}

bool Bucket::ready(int slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = static_cast<size_t>(slot);
  if (is_ready_.at(at)) return false;
  is_ready_[at] = true;
  return --left_ == 0;
}

bool Bucket::ready_but_not_last(int slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = static_cast<size_t>(slot);
  if (is_ready_.at(at)) return true;
  if (left_ == 1) return false;
  is_ready_[at] = true;
  --left_;
  return true;
}

void Bucket::came_by(Device::Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end())
    streams_.push_back(stream);
}

void Bucket::meet(Device::Stream stream) {
  met_.clear();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    met_.swap(streams_);
  }
  met_.erase(std::remove(met_.begin(), met_.end(), stream), met_.end());
  if (met_.empty()) return;
  // A stream that is captured can wait only for what is captured with it; its owner has seen to the
  // others before.
  if (device_->captured(device_->mark(stream))) {
    const auto elsewhere = [&](Device::Stream other) {
      return !device_->captured(device_->mark(other));
    };
    met_.erase(std::remove_if(met_.begin(), met_.end(), elsewhere), met_.end());
  }
  for (const Device::Stream other : met_) device_->follow(stream, device_->mark(other));
}

void Bucket::part(Device::Stream stream) {
  if (met_.empty()) return;
  const Device::Mark mark = device_->mark(stream);
  for (const Device::Stream other : met_) device_->follow(other, mark);
  met_.clear();
}

HandlePtr Bucket::launch(Urgency urgency, const std::vector<Place>& places,
                         std::shared_ptr<void> keepalive, std::vector<Device::Mark> starts) {
  auto request = start_over();
  request->device = device_;
  request->starts = std::move(starts);
  // What a graph will write to again stays.
  if (device_ && !request->starts.empty() && device_->captured(request->starts[0]))
    device_->keep_until(request->starts[0], request->keepalive);
  for (const Place& place : places) {
    const int part = part_of_.at(static_cast<size_t>(place.slot));
    if (part < 0) throw InternalError("this slot must be in the arena");
    request->parts[static_cast<size_t>(part)] = {place.data, place.data};
  }
  if (keepalive)
    request->keepalive = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
        std::move(request->keepalive), std::move(keepalive));
  last_ = engine_->submit(std::move(request), urgency);
  ++launch_count_;
  return last_;
}

void Bucket::refuse(const std::string& problem) {
  auto request = start_over();
  request->refusal = problem;
  engine_->submit(std::move(request), Urgency::kNow);
}

void Bucket::count_anew() {
  quiet_ = false;
  std::lock_guard<std::mutex> lock(mutex_);
  std::fill(is_ready_.begin(), is_ready_.end(), false);
  left_ = is_ready_.size();
}

RequestPtr Bucket::start_over() {
  count_anew();
  auto request = std::make_shared<Request>();
  request->name = name_;
  request->set = set_;
  request->description = description_;
  request->parts = parts_;
  request->keepalive = arena_;
  if (!kept_.empty()) {
    auto owners = std::make_shared<std::vector<std::shared_ptr<void>>>(1, arena_);
    for (size_t i = 0; i < kept_.size(); ++i) {
      request->kept[i] = kept_[i].get();
      owners->push_back(kept_[i]);
    }
    request->keepalive = std::move(owners);
  }
  return request;
}

std::vector<int> Bucket::missing() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> slots;
  for (size_t i = 0; i < is_ready_.size(); ++i)
    if (!is_ready_[i]) slots.push_back(static_cast<int>(i));
  return slots;
}

}  // namespace bagua
