// The carrying out of what was agreed.
#include <algorithm>
#include <cstring>
#include <utility>

#include "common/clock.h"
#include "common/memory.h"
#include "engine/engine.h"

namespace bagua {
namespace {

constexpr const char* kNotCaptured =
    "that takes NCCL on all ranks, an allreduce, broadcast or reducescatter that it can do, and "
    "one exchange before the capture";

}  // namespace

// Whether that was the last one of what was agreed on at once.
bool Engine::take_task() {
  if (under_way_.empty()) {
    const Task& next = tasks_.front();
    if (next.requests.empty()) {
      const bool last = next.last;
      finish_join(next.set, next.last_joined);
      tasks_.pop_front();
      return last;
    }
    open_exchange();
  }
  if (under_way_.size() == 1 && tasks_.empty()) took_ahead_ = false;
  carry_out(*under_way_.front());
  const bool last = under_way_.front()->task.last;
  under_way_.pop_front();
  held_back_ = false;
  return last;
}

// Of the first task.
Engine::Exchange& Engine::open_exchange() {
  under_way_.push_back(std::make_unique<Exchange>(*this, tasks_.front()));
  tasks_.pop_front();
  return *under_way_.back();
}

// While this rank waits for others in an exchange: does what it can for one of those that have
// begun ahead, or begins one more, so that links are busy. Whether that was anything. Not more at a
// time, for others wait for this rank, too.
bool Engine::work_ahead() {
  for (size_t i = 1; i < under_way_.size(); ++i) {
    under_way_[i]->allreduce->advance();
    if (under_way_[i]->count()) return true;
  }
  if (tasks_.empty() && !decisions_.empty() && sets_.count(decisions_.front().set) > 0)
    accept_next();
  if (held_back_ || tasks_.empty()) return false;
  held_back_ = !may_begin(tasks_.front());
  if (held_back_) return false;
  Exchange& next = open_exchange();
  next.allreduce.emplace(next.requests, next.group, next.bench);
  next.allreduce->begin();
  next.count();
  return true;
}

// Who shares memory does not send. Of another process set it might meet, on its track, what others
// have not yet done before it.
bool Engine::may_begin(const Task& next) const {
  const auto fits = [](const RequestPtr& request) {
    return request->description.kind == OpKind::kAllreduce && !request->description.on_device &&
           !request->device;
  };
  const auto all_fit = [&](const Task& task) {
    return !task.requests.empty() && std::all_of(task.requests.begin(), task.requests.end(), fits);
  };
  const std::vector<int>& ranks = sets_.at(next.set).ranks;
  if (under_way_.size() >= kTracks || !all_fit(next) ||
      node_count(*transport_, ranks) < ranks.size())
    return false;
  int64_t nbytes = next.nbytes;
  for (const auto& exchange : under_way_) {
    const Task& task = exchange->task;
    nbytes += task.nbytes;
    if (task.set != next.set || !all_fit(task) || overlap(task.requests, next.requests))
      return false;
  }
  return nbytes <= static_cast<int64_t>(kAheadNbytes);
}

Engine::Exchange::Exchange(Engine& engine, const Task& task)
    : engine(engine),
      task(task),
      requests(this->task.requests),
      place(engine.free_place()),
      group(*engine.transport_, *engine.waiter_, engine.sets_.at(task.set).ranks,
            engine.sets_.at(task.set).me, task.track),
      bench{*engine.scratch_[place],
            engine.allreduce_,
            engine.config_.fusion_nbytes,
            engine.crew_.get(),
            [&engine](const Collective& row, const Job& job) { engine.tell_choice(row, job); },
            [this] {
              end();
              count();
              this->engine.announce(*this);
            }} {
  ++engine.exchange_count_;
}

// The first one, while exchanges come one by one: what one of them has grown is there for the next.
size_t Engine::free_place() {
  size_t place = 0;
  const auto is_taken = [&](const auto& exchange) { return exchange->place == place; };
  while (std::any_of(under_way_.begin(), under_way_.end(), is_taken)) ++place;
  if (!scratch_[place]) scratch_[place] = std::make_unique<Scratch>(arenas());
  return place;
}

// Of devices: their results are on their way.
void Engine::Exchange::end() {
  if (bench.staging) bench.staging->end();
  if (bench.nccl) bench.nccl->end(requests);
}

// Before who waits for the requests can look. Whether anything was done since the last time.
bool Engine::Exchange::count() {
  const Work& done = group.work();
  const bool more = done.touched_nbytes > counted.touched_nbytes;
  engine.sent_nbytes_ += done.sent_nbytes - counted.sent_nbytes;
  engine.touched_nbytes_ += done.touched_nbytes - counted.touched_nbytes;
  engine.codec_us_ += static_cast<int64_t>((done.codec_s - counted.codec_s) * 1e6);
  counted = done;
  return more;
}

// Before anybody can look. Requests whose values were announced have been told.
void Engine::Exchange::tell_odd() const {
  const std::vector<int>& odd = group.odd()->ranks;
  for (const RequestPtr& request : requests)
    if (!odd.empty() && !request->handle->has_values()) request->handle->odd = odd;
}

void Engine::carry_out(Exchange& exchange) {
  const auto& requests = exchange.requests;
  Workbench& bench = exchange.bench;
  const Description& d = requests[0]->description;
  run_special(*requests[0]);
  bench.nccl = nccl_for(exchange.task.set, requests, exchange.group, bench);
  if (d.captured && !bench.nccl)
    return complete(requests,
                    make_failure(ErrorKind::kUsage,
                                 requests[0]->label() +
                                     " cannot be captured in a CUDA graph: " + kNotCaptured));
  bench.staging = bench.nccl ? nullptr : staging_for(requests);
  if (bench.staging) {
    if (requests[0]->kept[0]) bench.values_final = {};  // what is kept may change until the end
    bench.staging->begin(requests, exchange.group, d.kind != OpKind::kBroadcast || d.root == rank_);
  }
  if (exchange.allreduce) {
    exchange.allreduce->run();
  } else {
    run_exchange(requests, exchange.group, sets_.at(exchange.task.set).ranks, bench);
  }
  exchange.end();
  exchange.count();
  exchange.tell_odd();
  complete(requests, nullptr);
}

// Null if it cannot be, or they are in the host's memory.
NcclExchange* Engine::nccl_for(int32_t id, const std::vector<RequestPtr>& requests, Group& group,
                               const Workbench& bench) {
  if (!config_.nccl || !requests[0]->description.on_device) return nullptr;
  if (!nccl_ || (device_ && !nccl_->device())) {
    std::string why_not;
    const NcclLibrary* library = device_ ? device_->nccl(config_.nccl_path, why_not) : nullptr;
    const auto tell = [this](LogLevel level, const std::string& text) { log_.write(level, text); };
    if (!why_not.empty()) tell(LogLevel::kInfo, why_not);
    nccl_ = std::make_unique<NcclExchange>(library, device_, config_.nccl_shares_gpu, tell);
  }
  const auto tell_all = [&](const std::vector<int64_t>& mine) {
    return exchange_counts(OpKind::kAllgather, mine, static_cast<int64_t>(mine.size()), group,
                           bench);
  };
  return nccl_->begin(id, requests, group, tell_all) ? nccl_.get() : nullptr;
}

// Null if all are in the host's memory.
Staging* Engine::staging_for(const std::vector<RequestPtr>& requests) {
  Device* device = nullptr;
  for (const RequestPtr& request : requests)
    if (request->device) device = request->device;
  if (!device) return nullptr;
  if (!staging_) {
    const auto warn = [this](const std::string& text) { log_.write(LogLevel::kWarning, text); };
    staging_ = std::make_unique<Staging>(*device, arenas(), warn);
    log_.write(LogLevel::kInfo, "tensors on " + device->name() + " go through the host's memory");
  }
  return staging_.get();
}

// Who waits for the values may go on.
void Engine::announce(const Exchange& exchange) {
  exchange.tell_odd();
  std::lock_guard<std::mutex> lock(mutex_);
  for (const RequestPtr& request : exchange.requests)
    request->handle->has_values_.store(true, std::memory_order_release);
  if (waiting_ > 0) changed_.notify_all();
}

// What was chosen is told once.
void Engine::tell_choice(const Collective& row, const Job& job) {
  if (!chosen_.insert(&row).second || !log_.enabled(LogLevel::kInfo)) return;
  log_.write(LogLevel::kInfo, std::string(kind_name(row.kind)) + " over " +
                                  std::to_string(job.group.size()) + " ranks uses " + row.name);
}

// A rank that has joined contributes nothing: zeros, or no rows.
RequestPtr Engine::stand_in(const Set& set, const Entry& entry) {
  const Description& d = entry.description;
  auto request = std::make_shared<Request>();
  request->description = d;
  auto memories = std::make_shared<std::vector<std::shared_ptr<char>>>();
  const auto zeros = [&](size_t nbytes) {
    Device* device = request->device;
    std::shared_ptr<char> memory;
    if (d.registered && device && nccl_) memory = nccl_->allocate_registered(nbytes);
    if (!memory) memory = device ? device->lend(nbytes) : allocate_lines(nbytes);
    if (device) {
      device->clear(memory.get(), nbytes, /*stream=*/nullptr);
    } else {
      std::memset(memory.get(), 0, nbytes);
    }
    memories->push_back(memory);
    return memory.get();
  };
  if (d.on_device) request->device = device_;  // where this rank's own tensors are, if it had any
  for (const TensorInfo& tensor : tensors_of(d)) {
    const auto nbytes =
        static_cast<size_t>(std::max<int64_t>(tensor.count(), 0)) * dtype_nbytes(tensor.dtype);
    char* in = zeros(nbytes);
    // Its result may come while the zeros still are under way.
    char* out = d.kind == OpKind::kReducescatter ? zeros(nbytes) : in;
    request->parts.push_back({in, out, request->device != nullptr});
    if (d.kind == OpKind::kAllgather || d.kind == OpKind::kAlltoall) request->rows.push_back(0);
  }
  if (request->device) request->starts = {request->device->mark(nullptr)};
  request->splits.assign(set.ranks.size(), 0);
  request->keepalive = memories;
  if (d.registered) request->keepalive = memories->at(0);
  ++open_count_;
  return request;
}

// Of unnamed requests of the others, so that who has joined goes on where they are.
void Engine::count_past(int32_t id, uint64_t seq) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t& next = doors_[id].next_seq;
  next = std::max(next, seq + 1);
}

void Engine::run_special(Request& request) {
  const Description& d = request.description;
  if (d.kind == OpKind::kAddProcessSet) {
    const int32_t id = next_set_++;
    Set& set = sets_[id];
    set.ranks.assign(d.layout.begin(), d.layout.end());
    const auto me = std::find(set.ranks.begin(), set.ranks.end(), rank_);
    set.me = me == set.ranks.end() ? -1 : static_cast<int>(me - set.ranks.begin());
    request.handle->value = id;
    std::lock_guard<std::mutex> lock(mutex_);
    doors_[id].ranks = set.ranks;
  } else if (d.kind == OpKind::kRemoveProcessSet) {
    if (nccl_) nccl_->forget(d.root);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      doors_.erase(d.root);
    }
    Set& set = sets_.at(d.root);
    set.removed = true;
    removed_.push_back(d.root);
    if (set.me < 0) return;
    set.report.last = true;
    send_reports();
  }
}

void Engine::finish_join(int32_t id, int last_joined) {
  Set& set = sets_.at(id);
  if (!set.joining) return;
  set.joining->handle->value = last_joined;
  complete({std::exchange(set.joining, nullptr)}, nullptr);
}

void Engine::complete(const std::vector<RequestPtr>& requests, const FailurePtr& failure) {
  open_since_s_ = now_s();
  open_count_ -= static_cast<int64_t>(requests.size());
  for (const RequestPtr& request : requests) {
    if (failure) request->handle->outputs.clear();
    request->handle->failure_ = failure;
    if (!failure && request->handle->device()) request->handle->keepalive_ = request->keepalive;
    request->keepalive.reset();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const RequestPtr& request : requests) {
    const auto door = doors_.find(request->set);
    if (!request->name.empty() && door != doors_.end()) door->second.names.erase(request->name);
    request->handle->done_.store(true, std::memory_order_release);
  }
  if (waiting_ > 0) changed_.notify_all();
}

}  // namespace bagua
