// The engine's bad days: refusals, stalls, silent ranks, poison, and stopping.
#include <algorithm>
#include <utility>

#include "collective/peers.h"
#include "common/clock.h"
#include "common/memory.h"
#include "common/ranks_text.h"
#include "engine/engine.h"

namespace bagua {
namespace {

constexpr double kLastWorkS = 30;  // that devices still do for others when this rank leaves
constexpr double kAskAfterS = 1;   // in an exchange, whether its caller was interrupted
constexpr double kAskEveryS = 0.25;
constexpr double kVerdictS = 1;  // after a transport's error: time for rank 0 to say who died

std::string seconds(double s) { return std::to_string(static_cast<int>(s + 0.5)) + " s"; }

}  // namespace

// What is wrong with a request by itself.
std::string Engine::refuse(const Request& request) {
  const Description& d = request.description;
  const bool reduces = d.kind == OpKind::kAllreduce || d.kind == OpKind::kReducescatter;
  const bool needs_rows = d.kind == OpKind::kAlltoall || d.kind == OpKind::kReducescatter;
  std::string problem;
  for_each_tensor(d, [&](DType dtype, const int64_t*, size_t ndim) {
    if (needs_rows && ndim == 0)
      problem = std::string(kind_name(d.kind)) + " needs at least one dimension";
    if (!reduces) return;
    if (d.op == ReduceOp::kAdasum && !is_float(dtype))
      problem = std::string("Adasum needs a floating-point tensor, not ") + dtype_name(dtype);
    if (is_complex(dtype) && (d.op == ReduceOp::kMin || d.op == ReduceOp::kMax))
      problem = std::string(op_name(d.op)) + " has no meaning for " + dtype_name(dtype);
    if (!d.codec.empty() && dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16)
      problem = std::string("codecs carry floats of 32 and 16 bits, not ") + dtype_name(dtype);
    if (!d.peers.empty() && !is_float(dtype))
      problem = std::string("peers average floats, not ") + dtype_name(dtype);
    if (dtype == DType::kBool && d.op == ReduceOp::kAverage)
      problem = "average has no meaning for bool; use Sum (any) or Product (all)";
  });
  if (d.kind == OpKind::kReducescatter && d.op == ReduceOp::kAdasum)
    problem = "reducescatter cannot use Adasum";
  const bool adds = d.op == ReduceOp::kSum || d.op == ReduceOp::kAverage;
  if (!d.codec.empty() && !adds) problem = std::string(op_name(d.op)) + " cannot use a codec";
  if (!d.peers.empty() && d.op != ReduceOp::kAverage)
    problem = std::string("peers can be averaged only, not ") + op_name(d.op);
  if (!d.codec.empty() && !d.peers.empty() && parse_peers(d.peers).kind != Peers::kRing)
    problem = "a codec goes with all peers or a ring, not with " + d.peers;
  return problem;
}

// What is wrong with it in its process set.
std::string Engine::refuse_in(const Request& request, const std::vector<int>& ranks) {
  const Description& d = request.description;
  const int n = static_cast<int>(ranks.size());
  if (d.kind == OpKind::kBroadcast && std::find(ranks.begin(), ranks.end(), d.root) == ranks.end())
    return "root " + std::to_string(d.root) + " is not in the process set of " + ranks_text(ranks);
  if (d.kind == OpKind::kAddProcessSet) {
    for (size_t i = 0; i < d.layout.size(); ++i) {
      if (d.layout[i] < 0 || d.layout[i] >= size_)
        return "rank " + std::to_string(d.layout[i]) + " does not exist in a world of " +
               std::to_string(size_);
      if (i > 0 && d.layout[i] == d.layout[i - 1])
        return "rank " + std::to_string(d.layout[i]) + " is named twice";
    }
    if (d.layout.empty()) return "a process set needs at least one rank";
  }
  if (d.kind == OpKind::kAlltoall) {
    int64_t sum = 0;
    for (const int64_t rows : request.splits) {
      if (rows < 0) return "splits has a negative number";
      if (rows > request.rows[0] - sum)  // which no sum overflows
        return "splits add up to more than the tensor's " + std::to_string(request.rows[0]) +
               " rows";
      sum += rows;
    }
    if (static_cast<int>(request.splits.size()) != n)
      return "splits has " + std::to_string(request.splits.size()) + " numbers for " +
             std::to_string(n) + " ranks";
    if (sum != request.rows[0])
      return "splits add up to " + std::to_string(sum) + " but the tensor has " +
             std::to_string(request.rows[0]) + " rows";
  }
  return "";
}

void Engine::tick() {
  const double now = now_s();
  if (now - ticked_s_ < 0.5) return;
  ticked_s_ = now;
  if (anything_open() && under_way_.empty()) transport_->progress();
  const bool waiting = (anything_open() || on_device()) && now - open_since_s_ > 1;
  const int silent = liveness_.tick(now, waiting || stopping_now_);
  if (silent >= 0)
    lose(silent, "has not answered for " + seconds(config_.peer_timeout_s) +
                     ": stopped, or its machine is overloaded or unreachable (peer_timeout_s)");
  if (ledger_) look_for_stalls(now);
  if (ledger_ && stopping_now_) look_for_stragglers(now);
  if (on_device()) look_at_device(now);
  const bool idle = under_way_.empty() && !anything_open() && !on_device();
  if (nccl_ && idle && !stopping_now_) nccl_->tidy();
}

// A rank is gone without a goodbye. That ends the engine, unless this rank is leaving anyway.
void Engine::lose(int rank, const std::string& how) {
  if (left_[static_cast<size_t>(rank)]) return;
  left_[static_cast<size_t>(rank)] = true;
  liveness_.forget(rank);
  if (!stopping_now_) throw Verdict(name_of(rank) + " " + how);
  if (ledger_) ledger_->leave(rank);
}

void Engine::look_for_stalls(double now) {
  if (config_.stall_fail_s > 0) {
    for (const auto& stall : ledger_->stalls(now, config_.stall_fail_s))
      ledger_->reject(stall, stall.label + ": " + ranks_text(stall.missing) + " not ready after " +
                                 seconds(config_.stall_fail_s) +
                                 "; did it skip this call, or take another branch? "
                                 "(stall_fail_s)");
    decide();
  }
  if (config_.stall_warn_s <= 0 || now - warned_s_ < config_.stall_warn_s) return;
  const auto stalls = ledger_->stalls(now, config_.stall_warn_s);
  if (stalls.empty()) return;
  warned_s_ = now;
  std::string text = "some ranks wait for others";
  if (config_.stall_fail_s == 0)
    text += ", for as long as it takes (with stall_fail_s, bagua-run --stall-fail-s 300, it fails)";
  text += ":";
  for (size_t i = 0; i < stalls.size(); ++i) {
    if (i == 10) {
      text += "\n  and " + std::to_string(stalls.size() - i) + " more";
      break;
    }
    text += "\n  " + stalls[i].label + ": waiting " + seconds(now - stalls[i].since_s) + " for " +
            ranks_text(stalls[i].missing);
  }
  log_.write(LogLevel::kWarning, text);
}

// Rank 0 stays until everybody has shut down, as long as they have something to say.
void Engine::look_for_stragglers(double now) {
  std::vector<int> ranks;
  double since_s = stopping_since_s_;
  for (int rank = 0; rank < size_; ++rank) {
    if (left_[static_cast<size_t>(rank)]) continue;
    ranks.push_back(rank);
    since_s = std::max(since_s, ledger_->heard_s(rank));
  }
  if (ranks.empty()) return;
  const std::string text = "rank 0 has shut down, and for " + seconds(now - since_s) +
                           " has waited for " + ranks_text(ranks) +
                           " to do so: a program ends when all ranks have; does one compute for "
                           "long, or is it stuck?";
  if (config_.stall_fail_s > 0 && now - since_s > config_.stall_fail_s)
    throw Verdict(text + " (stall_fail_s)");
  const double quiet_s = now - std::max(warned_s_, since_s);
  if (config_.stall_warn_s <= 0 || quiet_s < config_.stall_warn_s) return;
  warned_s_ = now;
  log_.write(LogLevel::kWarning, text);
}

// An agreed exchange should only take as long as its bytes; when nothing arrives for long, say so.
void Engine::check_progress(double waited_s, int peer, double& warned_s) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (abandoned_) throw Verdict(name_of(rank_) + " has ended bagua during an exchange");
  }
  const auto stuck = [&] {
    const std::vector<RequestPtr> none;
    const auto& requests = under_way_.empty() ? none : under_way_.front()->requests;
    std::string text = requests.empty() ? "an exchange" : requests[0]->label();
    if (requests.size() > 1) text += " and " + std::to_string(requests.size() - 1) + " more";
    return text + ", on which all ranks had agreed, made no progress for " + seconds(waited_s) +
           (peer < 0 ? "" : ", waiting for " + name_of(peer));
  };
  constexpr const char* kPerhaps =
      " although all ranks answer: is the network between them blocked? (stall_fail_s)";
  if (config_.stall_fail_s > 0 && waited_s > config_.stall_fail_s)
    throw PeerError(stuck() + kPerhaps);
  const double now = now_s();
  if (interrupted_ && waited_s > kAskAfterS && now - asked_s_ > kAskEveryS) {
    asked_s_ = now;
    if (ask_caller()) throw Verdict(name_of(rank_) + " was interrupted: " + stuck());
  }
  if (config_.stall_warn_s <= 0 || now - warned_s < config_.stall_warn_s) return;
  warned_s = now;
  log_.write(LogLevel::kWarning, stuck() + kPerhaps);
}

// Its answer may take long, for it may need a lock that others hold. No silence must come of that.
bool Engine::ask_caller() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    asks_ = true;
    trouble_ = nullptr;
  }
  changed_.notify_all();
  channel_->hush(false);
  channel_->wake();
  const bool interrupted = (*interrupted_)();
  std::unique_lock<std::mutex> lock(mutex_);
  asks_ = false;
  channel_->wake();
  changed_.notify_all();
  changed_.wait(lock, [&] { return !lent_; });
  channel_->hush(true);
  if (trouble_) std::rethrow_exception(std::exchange(trouble_, nullptr));
  return interrupted;
}

// What a device was given ends when every rank's device has come to it; the host waits for none.
void Engine::look_at_device(double now) {
  nccl_->check();
  const double waited_s = now - nccl_->given_s();
  const std::string text = "what NCCL was given " + seconds(waited_s) +
                           " ago is not done although all ranks answer: is another rank's GPU far "
                           "behind, or the network between them blocked? (stall_fail_s)";
  if (config_.stall_fail_s > 0 && waited_s > config_.stall_fail_s) throw PeerError(text);
  const double quiet_s = now - std::max(device_warned_s_, nccl_->given_s());
  if (config_.stall_warn_s <= 0 || quiet_s < config_.stall_warn_s) return;
  device_warned_s_ = now;
  log_.write(LogLevel::kWarning, text);
}

// A transport often only knows that something broke; rank 0 knows who. Wait a moment for its word.
FailurePtr Engine::verdict_on(FailurePtr failure) {
  if (failure->kind != ErrorKind::kPeer) return failure;
  try {
    for (const double until_s = now_s() + kVerdictS; now_s() < until_s;) receive(50000);
  } catch (const Verdict& verdict) {
    return make_failure(ErrorKind::kPeer, verdict.what());
  } catch (const std::exception&) {
    return failure;  // the first error tells more
  }
  return failure;
}

void Engine::poison(FailurePtr failure) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) return;
    failure_ = failure;
  }
  log_.write(LogLevel::kInfo, "engine failed: " + failure->what);
  // Who has heard of it from another rank tells the same; else it is this one's own.
  const bool mine = failure->kind != ErrorKind::kPeer;
  const std::string what = mine ? name_of(rank_) + " failed: " + failure->what : failure->what;
  const std::string fault = text_message(MessageType::kFault, what);
  for (int rank = 0; rank < size_; ++rank) {
    const bool connected = rank != rank_ && (rank == 0 || rank_ == 0);
    if (connected && !left_[static_cast<size_t>(rank)]) channel_->send(rank, fault);
  }
  let_go_of_exchange();
  fail_everything(failure);
}

// Messages of a broken exchange may still be read or written by the transport, whenever anybody
// lets MPI make progress. Nobody can say when they are done, so their memory is never freed.
void Engine::let_go_of_exchange() {
  const bool still = !nccl_ || nccl_->abort();
  if (!still) keep_for_ever(std::move(nccl_));
  if (staging_) {
    staging_->settle();
    keep_for_ever(std::move(staging_));  // the device may still bring something
  }
  if (transport_->abort() && still) return;
  for (const auto& exchange : under_way_) {
    for (const RequestPtr& request : exchange->requests) {
      keep_for_ever(request->keepalive);
      for (const Output& output : request->handle->outputs) keep_for_ever(output.data);
    }
    keep_for_ever(std::move(scratch_[exchange->place]));
  }
}

// Every open request gets the failure, also those nobody has looked at yet.
void Engine::fail_everything(const FailurePtr& failure) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    taken_.insert(taken_.end(), submissions_.begin(), submissions_.end());
    submissions_.clear();
  }
  open_count_ += static_cast<int64_t>(taken_.size());
  std::vector<RequestPtr> open;
  open.swap(taken_);
  for (auto& [id, set] : sets_) {
    for (Entry& entry : set.entries)
      if (entry.open) open.push_back(std::move(entry.open));
    for (auto& [key, request] : set.open) open.push_back(request);
    set.open.clear();
    if (set.joining) open.push_back(std::exchange(set.joining, nullptr));
    set.report.clear();
  }
  open.insert(open.end(), agreed_.begin(), agreed_.end());
  agreed_.clear();
  for (const auto& exchange : under_way_) tasks_.push_back(exchange->task);
  under_way_.clear();
  for (const Task& task : tasks_)
    open.insert(open.end(), task.requests.begin(), task.requests.end());
  tasks_.clear();
  open.erase(std::remove_if(open.begin(), open.end(),
                            [](const RequestPtr& request) { return request->handle->done(); }),
             open.end());
  complete(open, failure);
  open_count_ = 0;
  decisions_.clear();
}

// Whether devices have done what they were given, which other ranks may wait for. Then NCCL's own
// threads send what they still have.
bool Engine::finish_on_devices() {
  if (!nccl_) return true;
  if (stopping_since_s_ == 0) stopping_since_s_ = now_s();
  if (nccl_->under_way() && now_s() - stopping_since_s_ < kLastWorkS) return false;
  try {
    if (!anything_open() && !nccl_->under_way()) nccl_->finish();
  } catch (const std::exception& error) {
    log_.write(LogLevel::kWarning, std::string("while stopping: ") + error.what());
  }
  return true;
}

// One step of stopping; true when nothing is left to do. Called by the coordination thread. What
// was decided before the others heard of it is still carried out: they count on it.
bool Engine::try_stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_ || abandoned_) return true;
  }
  if (!stopping_now_) {
    if (!finish_on_devices()) return false;
    stopping_now_ = true;
    stopping_since_s_ = now_s();
    if (!ledger_) {
      channel_->send(0, text_message(MessageType::kBye));
    } else {
      left_[0] = true;
      ledger_->leave(0);
    }
    while (turn(0)) {
    }
  }
  // Rank 0 coordinates until everyone has left; the others stay until it has answered.
  const bool heard = ledger_ || left_[0] || failure();
  if (heard && anything_open())
    fail_everything(make_failure(ErrorKind::kUsage,
                                 "bagua was shut down on this rank while the request was in "
                                 "flight"));
  if (!ledger_) return heard;
  return std::all_of(left_.begin(), left_.end(), [](bool left) { return left; });
}

}  // namespace bagua
