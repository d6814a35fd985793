#include "engine/bucket.h"

#include <algorithm>

#include "common/memory.h"

namespace bagua {
Bucket::Bucket(std::shared_ptr<Engine> engine, std::string name, DType dtype,
               const std::vector<int64_t>& slot_counts, Description exchange, int32_t set,
               int32_t priority)
    : engine_(std::move(engine)),
      name_(std::move(name)),
      dtype_(dtype),
      set_(set),
      description_(std::move(exchange)),
      is_ready_(slot_counts.size()),
      left_(slot_counts.size()) {
  description_.priority = priority;
  const int64_t line = static_cast<int64_t>(kLineNbytes / dtype_nbytes(dtype));
  for (const int64_t count : slot_counts) {
    begins_.push_back(count_);
    count_ += (count + line - 1) / line * line;
  }
  arena_ = engine_->allocate(static_cast<size_t>(nbytes()));
  if (description_.op == ReduceOp::kAdasum) {  // weighs every tensor by itself
    for (size_t i = 0; i < slot_counts.size(); ++i) add_part(begins_[i], slot_counts[i]);
  } else {
    add_part(0, count_);
  }
}

void Bucket::add_part(int64_t begin, int64_t count) {
  char* data = arena_.get() + begin * static_cast<int64_t>(dtype_nbytes(dtype_));
  description_.add_tensor(dtype_, {count});
  parts_.push_back({data, data});
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

HandlePtr Bucket::launch(Engine::Urgency urgency) { return engine_->submit(start_over(), urgency); }

void Bucket::refuse(const std::string& problem) {
  auto request = start_over();
  request->refusal = problem;
  engine_->submit(std::move(request), Engine::Urgency::kNow);
}

RequestPtr Bucket::start_over() {
  quiet_ = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::fill(is_ready_.begin(), is_ready_.end(), false);
    left_ = is_ready_.size();
  }
  auto request = std::make_shared<Request>();
  request->name = name_;
  request->set = set_;
  request->description = description_;
  request->parts = parts_;
  request->keepalive = arena_;
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
