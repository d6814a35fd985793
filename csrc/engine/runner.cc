#include "engine/runner.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/clock.h"
#include "common/memory.h"

namespace bagua {
namespace {

constexpr const char* kNotCaptured =
    "that takes NCCL on all ranks, an allreduce, broadcast or reducescatter that it can do, and "
    "one exchange before the capture";

}  // namespace

Runner::Runner(const Station& station, Door& door, Agreement& agreement, Waiter& waiter)
    : at_(station),
      door_(door),
      agreement_(agreement),
      waiter_(waiter),
      allreduce_(at_.config.allreduce),
      crew_(
          at_.config.helpers > 0
              ? std::make_unique<Crew>(at_.config.helpers, [this] { return door_.anybody_waits(); })
              : nullptr) {}

void Runner::accept_next() {
  agreement_.accept_next(tasks_);
  for (const Task& task : tasks_)
    for (const RequestPtr& request : task.requests)
      if (request->stands_in) furnish(*request);
}

bool Runner::take_task() {
  if (under_way_.empty()) {
    const Task& next = tasks_.front();
    if (next.requests.empty()) {
      const bool last = next.last;
      agreement_.finish_join(next.set, next.last_joined);
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
Runner::Exchange& Runner::open_exchange() {
  under_way_.push_back(std::make_unique<Exchange>(*this, tasks_.front()));
  tasks_.pop_front();
  return *under_way_.back();
}

void Runner::take_ahead() {
  if (!agreement_.has_decisions())
    took_ahead_ |= agreement_.take_submissions(took_ahead_ ? kLoneNbytes : 0);
}

bool Runner::work_ahead() {
  for (size_t i = 1; i < under_way_.size(); ++i) {
    under_way_[i]->allreduce->advance();
    if (under_way_[i]->count()) return true;
  }
  if (tasks_.empty() && agreement_.has_decisions()) accept_next();
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
bool Runner::may_begin(const Task& next) const {
  const auto fits = [](const RequestPtr& request) {
    return request->description.kind == OpKind::kAllreduce && !request->description.on_device &&
           !request->device;
  };
  const auto all_fit = [&](const Task& task) {
    return !task.requests.empty() && std::all_of(task.requests.begin(), task.requests.end(), fits);
  };
  const std::vector<int>& ranks = agreement_.members_of(next.set).ranks;
  if (under_way_.size() >= kTracks || !all_fit(next) ||
      node_count(*at_.transport, ranks) < ranks.size())
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

std::string Runner::label() const {
  if (under_way_.empty()) return "an exchange";
  const auto& requests = under_way_.front()->requests;
  const size_t more = requests.size() - 1;
  return requests[0]->label() + (more > 0 ? " and " + std::to_string(more) + " more" : "");
}

// ---- one exchange ----------------------------------------------------------------------------

Runner::Exchange::Exchange(Runner& runner, const Task& task)
    : runner(runner),
      task(task),
      requests(this->task.requests),
      place(runner.free_place()),
      group(*runner.at_.transport, runner.waiter_, runner.agreement_.members_of(task.set).ranks,
            runner.agreement_.members_of(task.set).me, task.track),
      bench{*runner.scratch_[place],
            runner.allreduce_,
            runner.at_.config.fusion_nbytes,
            runner.crew_.get(),
            [&runner](const Collective& row, const Job& job) { runner.tell_choice(row, job); },
            [this] {
              end();
              count();
              announce();
            }} {
  ++runner.exchange_count_;
}

// The first one, while exchanges come one by one: what one of them has grown is there for the next.
size_t Runner::free_place() {
  size_t place = 0;
  const auto is_taken = [&](const auto& exchange) { return exchange->place == place; };
  while (std::any_of(under_way_.begin(), under_way_.end(), is_taken)) ++place;
  if (!scratch_[place]) scratch_[place] = std::make_unique<Scratch>(at_.arenas());
  return place;
}

// Of devices: their results are on their way.
void Runner::Exchange::end() {
  if (bench.staging) bench.staging->end();
  if (bench.nccl) bench.nccl->end(requests);
}

// Before who waits for the requests can look. Whether anything was done since the last time.
bool Runner::Exchange::count() {
  const Work& done = group.work();
  const bool more = done.touched_nbytes > counted.touched_nbytes;
  runner.sent_nbytes_ += done.sent_nbytes - counted.sent_nbytes;
  runner.touched_nbytes_ += done.touched_nbytes - counted.touched_nbytes;
  runner.codec_us_ += static_cast<int64_t>((done.codec_s - counted.codec_s) * 1e6);
  counted = done;
  return more;
}

// Before anybody can look. Requests whose values were announced have been told.
void Runner::Exchange::tell_odd() const {
  const std::vector<int>& odd = group.odd()->ranks;
  for (const RequestPtr& request : requests)
    if (!odd.empty() && !request->handle->has_values()) request->handle->odd = odd;
}

// Who waits for the values may go on.
void Runner::Exchange::announce() const {
  tell_odd();
  runner.door_.announce(requests);
}

void Runner::carry_out(Exchange& exchange) {
  const auto& requests = exchange.requests;
  Workbench& bench = exchange.bench;
  const Description& d = requests[0]->description;
  run_special(*requests[0]);
  if (leave_alone(exchange)) return agreement_.complete(requests, nullptr);
  bench.nccl = nccl_for(exchange.task.set, requests, exchange.group, bench);
  std::string why_not;
  if (nccl_ && d.on_device) why_not = nccl_->sets().refusal(exchange.task.set);
  if (d.captured && !bench.nccl)
    why_not = requests[0]->label() + " cannot be captured in a CUDA graph: " + kNotCaptured;
  if (!why_not.empty())
    return agreement_.complete(requests, make_failure(ErrorKind::kUsage, why_not));
  bench.staging = bench.nccl ? nullptr : staging_for(requests);
  if (bench.staging) {
    if (requests[0]->kept[0]) bench.values_final = {};  // what is kept may change until the end
    bench.staging->begin(requests, exchange.group,
                         d.kind != OpKind::kBroadcast || d.root == at_.rank);
  }
  if (exchange.allreduce) {
    exchange.allreduce->run();
  } else {
    run_exchange(requests, exchange.group, agreement_.members_of(exchange.task.set).ranks, bench);
  }
  exchange.end();
  exchange.count();
  exchange.tell_odd();
  agreement_.complete(requests, nullptr);
}

// Whether it is done with what is there: all that is left is to say from when on.
bool Runner::leave_alone(const Exchange& exchange) {
  const auto& requests = exchange.requests;
  const auto stays = [](const RequestPtr& request) { return stays_alone(*request); };
  if (exchange.group.size() > 1 || !std::all_of(requests.begin(), requests.end(), stays))
    return false;
  for (const RequestPtr& request : requests) {
    if (!request->device) continue;
    request->device->let_go();
    request->handle->returned_to(*request->device, request->starts[0], /*may_fail=*/false);
  }
  return true;
}

// With zeros.
void Runner::furnish(Request& request) {
  const Description& d = request.description;
  Device* device = request.device;
  auto memories = std::make_shared<std::vector<std::shared_ptr<char>>>();
  const auto zeros = [&](size_t nbytes) {
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
  for (const TensorInfo& tensor : tensors_of(d)) {
    const auto nbytes =
        static_cast<size_t>(std::max<int64_t>(tensor.count(), 0)) * dtype_nbytes(tensor.dtype);
    char* in = zeros(nbytes);
    // Its result may come while the zeros still are under way.
    char* out = d.kind == OpKind::kReducescatter ? zeros(nbytes) : in;
    request.parts.push_back({in, out, device != nullptr});
  }
  if (device) request.starts = {device->mark(nullptr)};
  request.keepalive = memories;
  if (d.registered) request.keepalive = memories->at(0);
  request.stands_in = false;
}

// Null if it cannot be, or they are in the host's memory.
NcclExchange* Runner::nccl_for(int32_t set, const std::vector<RequestPtr>& requests, Group& group,
                               const Workbench& bench) {
  if (!requests[0]->description.on_device) return nullptr;
  Device* device = requests[0]->device;  // none if this rank has joined and never had one
  if (!nccl_ || (device && !nccl_->device())) {
    std::string why_not;
    const NcclLibrary* library = nullptr;
    if (device && at_.config.nccl) library = device->nccl(at_.config.nccl_path, why_not);
    const auto tell = [this](LogLevel level, const std::string& text) {
      at_.log.write(level, text);
    };
    const bool first_of_many = at_.rank == 0 && at_.size > 1;
    if (!why_not.empty())
      tell(first_of_many ? LogLevel::kWarning : LogLevel::kInfo,
           "tensors on a GPU go through the host's memory, which is slow: " + why_not);
    nccl_ = std::make_unique<NcclExchange>(library, device, at_.config, tell);
  }
  const auto tell_all = [&](const std::vector<int64_t>& mine) {
    return exchange_counts(OpKind::kAllgather, mine, static_cast<int64_t>(mine.size()), group,
                           bench);
  };
  return nccl_->begin(set, requests, group, tell_all) ? nccl_.get() : nullptr;
}

// Null if all are in the host's memory.
Staging* Runner::staging_for(const std::vector<RequestPtr>& requests) {
  Device* device = nullptr;
  for (const RequestPtr& request : requests)
    if (request->device) device = request->device;
  if (!device) return nullptr;
  if (!staging_) {
    const auto warn = [this](const std::string& text) { at_.log.write(LogLevel::kWarning, text); };
    staging_ = std::make_unique<Staging>(*device, at_.arenas(), warn);
    at_.log.write(LogLevel::kInfo,
                  "tensors on " + device->name() + " go through the host's memory");
  }
  return staging_.get();
}

// What was chosen is told once.
void Runner::tell_choice(const Collective& row, const Job& job) {
  if (!chosen_.insert(&row).second || !at_.log.enabled(LogLevel::kInfo)) return;
  at_.log.write(LogLevel::kInfo, std::string(kind_name(row.kind)) + " over " +
                                     std::to_string(job.group.size()) + " ranks uses " + row.name);
}

void Runner::run_special(Request& request) {
  const Description& d = request.description;
  if (d.kind == OpKind::kAddProcessSet) {
    request.handle->value = agreement_.add_set(d.layout);
  } else if (d.kind == OpKind::kRemoveProcessSet) {
    if (nccl_) nccl_->sets().forget(d.root);
    agreement_.remove_set(d.root);
  }
}

// ---- at the end ------------------------------------------------------------------------------

// Messages of a broken exchange may still be read or written by the transport, whenever anybody
// lets MPI make progress. Nobody can say when they are done, so their memory is never freed.
void Runner::let_go() {
  bool still = !nccl_ || nccl_->abort();
  if (!still) keep_for_ever(std::move(nccl_));
  if (staging_) {
    still = staging_->settle() && still;
    keep_for_ever(std::move(staging_));  // the device may still bring something
  }
  if (at_.transport->abort() && still) return;
  for (const auto& exchange : under_way_) {
    for (const RequestPtr& request : exchange->requests) {
      take_back(*request);
      keep_for_ever(request->keepalive);
      for (const Output& output : request->handle->outputs) keep_for_ever(output.data);
    }
    keep_for_ever(std::move(scratch_[exchange->place]));
  }
}

// What others write to in place and the program may go on to use.
void Runner::take_back(const Request& request) {
  Node* const node = at_.transport->node();
  if (!node || request.description.kind != OpKind::kAllreduce) return;
  bool all = true;
  size_t number = 0;
  for_each_tensor(request.description, [&](DType dtype, const int64_t* dimensions, size_t ndim) {
    const Part& part = request.parts[number++];
    const auto nbytes = static_cast<size_t>(count_of(dimensions, ndim)) * dtype_nbytes(dtype);
    if (part.out && !part.on_device && !part.staged) all = node->take_back(part.out, nbytes) && all;
  });
  if (!all)
    at_.log.write(LogLevel::kWarning,
                  request.label() +
                      ": the system has no memory for a copy of what its exchange has "
                      "left; a rank that was only stopped may still write to it");
}

void Runner::tidy() {
  if (nccl_) nccl_->sets().tidy();
}

// What they were given, other ranks may wait for, and so does the program for theirs; that it takes
// long is for the watch to tell. Then NCCL's own threads send what they still have.
bool Runner::finish_on_device() {
  if (!nccl_) return true;
  if (nccl_->under_way()) return false;
  try {
    if (!agreement_.anything_open()) nccl_->sets().finish();
  } catch (const std::exception& error) {
    at_.log.write(LogLevel::kWarning, std::string("while stopping: ") + error.what());
  }
  return true;
}

Runner::Counters Runner::counters() const {
  const auto read = [](const std::atomic<int64_t>& count) {
    return count.load(std::memory_order_relaxed);
  };
  return {read(sent_nbytes_), read(exchange_count_), crew_ ? crew_->joined() : 0,
          read(touched_nbytes_), read(codec_us_)};
}

std::vector<RequestPtr> Runner::give_up() {
  std::vector<RequestPtr> open;
  const auto add = [&](const Task& task) {
    open.insert(open.end(), task.requests.begin(), task.requests.end());
  };
  for (const Task& task : tasks_) add(task);
  for (const auto& exchange : under_way_) add(exchange->task);
  under_way_.clear();
  tasks_.clear();
  return open;
}

}  // namespace bagua
