#include "engine/nccl_exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

#include "codec/gpu.h"
#include "collective/node_layout.h"
#include "common/clock.h"
#include "common/memory.h"
#include "engine/allreduce.h"
#include "engine/nccl_card.h"
#include "engine/nccl_coded.h"
#include "engine/nccl_peers.h"
#include "engine/outcome.h"
#include "engine/split_factor.h"

namespace bagua {
namespace {

std::string shared_gpu(int i, int j) {
  return "ranks " + std::to_string(i) + " and " + std::to_string(j) +
         " compute on one GPU: call torch.cuda.set_device(bagua.torch.local_rank()) before the "
         "first tensor is there, give each rank one by bagua-run --own-gpu, start fewer ranks, or "
         "allow it with allow_shared_gpu (bagua-run --allow-shared-gpu)";
}

std::string at_rank(int rank) { return "rank " + std::to_string(rank) + ": "; }

constexpr int kFirstThatShares = 23000;
constexpr double kEndS = 2;
constexpr const char* kMore = "; NCCL_DEBUG=WARN tells more";

// Whether NCCL would do it, whoever asks: a matter of the description alone.
bool fits(const Description& d) {
  if (!d.on_device) return false;
  const bool varies = d.kind == OpKind::kAllgather || d.kind == OpKind::kAlltoall;
  const bool reduces = d.kind == OpKind::kAllreduce || d.kind == OpKind::kReducescatter;
  if (!varies && !reduces && d.kind != OpKind::kBroadcast) return false;
  if (d.captured && varies) return false;
  const bool scales = reduces && (d.prescale != 1 || d.postscale != 1);
  bool all = true;
  for_each_tensor(d, [&](DType dtype, const int64_t*, size_t) {
    all = all && (reduces ? NcclGroup::can_reduce(dtype, d.op) : NcclGroup::can_move(dtype));
    all = all && (d.codec.empty() || (is_linear(d.op) && can_code_on_device(d.codec, dtype)));
    all = all && (!scales || (is_float(dtype) && is_linear(d.op)));
  });
  return all;
}

// The same for those with peers, if they count. A graph would meet the same ones for ever.
bool meets(const Description& d) {
  bool all = !d.captured;
  for_each_tensor(d, [&](DType dtype, const int64_t*, size_t) {
    all = all && can_meet_on_device(dtype, !d.codec.empty());
  });
  return all;
}

std::vector<NcclGroup::Piece> pieces_of(const Job& job) {
  std::vector<NcclGroup::Piece> pieces;
  for (const Fragment& f : job.fragments) pieces.push_back({f.in, f.out, f.count});
  return pieces;
}

}  // namespace

NcclExchange::NcclExchange(const NcclLibrary* library, Device* device, const Config& config,
                           Tell tell)
    : library_(library),
      device_(device),
      wanted_(config.nccl),
      shares_(config.nccl_shares_gpu),
      allowed_(config.allow_shared_gpu),
      tell_(std::move(tell)),
      stream_(device ? device->add_stream() : nullptr) {}

// What other ranks still are to get from NCCL's threads gets a moment.
NcclExchange::~NcclExchange() {
  end_last();
  while (ends()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (abort()) return;
  for (auto& [nbytes, memory] : borrowed_) keep_for_ever(std::move(memory));
  for (auto& [nbytes, memory] : returned_) keep_for_ever(std::move(memory));
}

// Everybody tells what it has, and all come to the same conclusion.
void NcclExchange::agree(int32_t set, const TellAll& tell_all) {
  NcclCard mine;
  mine.version = device_ ? 0 : -1;
  Members everyone(group_->size());
  std::iota(everyone.begin(), everyone.end(), 0);
  if (device_) {
    const std::string identity = device_->identity();
    std::memcpy(mine.gpu, identity.data(), std::min(identity.size(), sizeof mine.gpu));
  }
  if (library_ && device_ && (!is_first(everyone) || give_id(mine.id))) {
    mine.version = library_->version;
    mine.kernels = device_->runs_kernels();
    mine.shares = shares_ && library_->version >= kFirstThatShares;
  }
  const NcclCards cards = cards_of(tell_all(numbers_of(mine)));
  if (undecided(cards)) return;
  Agreed& agreed = sets_[set];
  const auto [i, j] = sharers(cards);
  if (i != j && !allowed_) {
    agreed.refusal =
        shared_gpu(group_->rank_of(static_cast<int>(i)), group_->rank_of(static_cast<int>(j)));
    return;
  }
  std::string why_not = obstacle(cards);
  const bool was_to_be = (i == j || why_not.empty()) && wanted_ && group_->me() == 0;
  if (why_not.empty()) agreed.all = connect(everyone, cards[0].id, why_not);
  if (!agreed.all)
    return tell_(was_to_be ? LogLevel::kWarning : LogLevel::kInfo, "NCCL is not used: " + why_not);
  tell_(LogLevel::kInfo,
        "tensors on " + device_->name() + " go by NCCL " + version_text(*library_));
  agreed.has_kernels = all_have(cards, &NcclCard::kernels);
  if (!agreed.has_kernels)
    tell_(LogLevel::kInfo,
          "codecs, and averages and scales that NCCL cannot take by itself, "
          "go by the host's memory: a rank's GPU is older than these kernels");
}

// Whether some kernel of ours comes before or after NCCL, or between.
bool NcclExchange::takes_kernels(const Description& d) const {
  if (is_special(d)) return true;
  if (!is_linear(d.op)) return false;
  const Finish finish = finish_of(d, group_->size());
  bool any = false;
  for_each_tensor(d, [&](DType dtype, const int64_t*, size_t) {
    const double factor = finish.factor / finish.divisor;
    any = any || (is_float(dtype) && split_factor(dtype, factor, group_->size()).after != 1);
  });
  return any;
}

// Whether this rank gives them the id: its threads wait for the others.
bool NcclExchange::is_first(const Members& members) const {
  return !members.empty() && members[0] == group_->me();
}

// Behind each is a thread of NCCL's that waits for ranks: what was not used is for the next time.
bool NcclExchange::give_id(NcclId& id) {
  if (!has_id_) has_id_ = library_->get_unique_id(&id_) == NcclResult::kSuccess;
  id = id_;
  return has_id_;
}

// A communicator for each group, or for no group of the set. All ranks of the set call this, those
// who are in no group with nobody, and are told alike why not. It cannot deadlock: a rank begins
// its group's without waiting for anybody, and begins no other before all of the set have settled
// this one, so nobody waits in one group for a rank that waits in another. Who waits in begun()
// hears of whoever fails or dies, as in any other wait. Until all have begun only this knows of it:
// check() would take a failure for that of a peer.
std::unique_ptr<NcclGroup> NcclExchange::connect(const Members& members, const NcclId& id,
                                                 std::string& why_not) {
  Outcome outcome(*group_);
  std::unique_ptr<NcclGroup> nccl;
  if (!members.empty()) {
    if (is_first(members)) has_id_ = false;
    const auto place = std::find(members.begin(), members.end(), group_->me()) - members.begin();
    nccl = std::make_unique<NcclGroup>(
        *library_, *device_, static_cast<int>(members.size()), static_cast<int>(place),
        [this](const std::function<bool()>& reached) { group_->wait_until(reached); });
    try {
      nccl->begin(id);
    } catch (const InternalError& error) {
      why_not = error.what();
    }
    if (why_not.empty()) why_not = nccl->begun([&] { return outcome.failed(); });
    if (!why_not.empty()) why_not = at_rank(group_->rank_of(group_->me())) + why_not;
  }
  why_not = outcome.settle(why_not);
  if (why_not.empty()) return nccl;
  why_not += kMore;
  return nullptr;
}

// With an id that the first of each group gives. The cards say nothing else here, but that a rank
// has what it is to give.
std::unique_ptr<NcclGroup> NcclExchange::connect(const Members& members, const TellAll& tell_all,
                                                 std::string& why_not) {
  NcclCard mine;
  mine.version = !is_first(members) || give_id(mine.id);
  const NcclCards cards = cards_of(tell_all(numbers_of(mine)));
  for (size_t i = 0; i < cards.size(); ++i)
    if (cards[i].version == 0)
      why_not = at_rank(group_->rank_of(static_cast<int>(i))) + "ncclGetUniqueId failed" + kMore;
  if (!why_not.empty()) return nullptr;
  return connect(members, members.empty() ? NcclId{} : cards[members[0]].id, why_not);
}

// Not as NCCL does it by itself. Inside one node, or alone, some codecs and peers do not count.
bool NcclExchange::is_special(const Description& d) const {
  const bool meant = !d.codec.empty() || !d.peers.empty();
  return meant && group_->size() > 1 && !(d.exact_in_nodes && group_->node());
}

bool NcclExchange::begin(int32_t set, const std::vector<RequestPtr>& requests, Group& group,
                         const TellAll& tell_all) {
  group_ = &group;
  const bool captured = requests[0]->description.captured;
  if (sets_.count(set) == 0 && !captured) agree(set, tell_all);
  for (const RequestPtr& request : requests)
    if (!fits(request->description)) return false;
  const auto found = sets_.find(set);
  if (found == sets_.end() || !found->second.all) return false;
  Agreed& agreed = found->second;
  const Description& first = requests[0]->description;  // in this they are alike
  nodes_ = nullptr;
  special_ = is_special(first);
  for (const RequestPtr& request : requests)
    if (special_ && !first.peers.empty() && !meets(request->description)) return false;
  if (special_ && first.exact_in_nodes && group.on_shared_nodes()) {
    if (!agreed.nodes_known && !captured) make_nodes(agreed, tell_all);
    nodes_ = agreed.nodes.get();
    if (!nodes_) return false;
  }
  nccl_ = agreed.all.get();
  if (!agreed.has_kernels)
    for (const RequestPtr& request : requests)
      if (takes_kernels(request->description)) return false;
  device_->let_go();
  if (!captured) see_to_registered(requests);
  if (captured && !captured_) captured_ = device_->add_stream();
  on_ = captured ? captured_ : stream_;
  nccl_->use(on_, captured);
  if (nodes_) nodes_->use(on_, captured);
  for (const RequestPtr& request : requests)
    for (const Device::Mark& start : request->starts) device_->follow(on_, start);
  return true;
}

// In the first exchange that is for them: made before, everybody would pay for them. NCCL may wait
// for the device meanwhile, and what is under way there ends by itself, since all ranks have given
// it before they come to this.
void NcclExchange::make_nodes(Agreed& agreed, const TellAll& tell_all) {
  agreed.nodes_known = true;
  std::string why_not;
  if (!agreed.has_kernels) why_not = "a rank's GPU is older than their kernels";
  auto nodes = std::make_unique<NcclNodes>();
  const NodeLayout layout = node_layout_of(*group_);
  nodes->leaders = layout.leaders;
  nodes->weights = layout.weights;
  const bool alone = layout.mine.size() == 1;
  if (why_not.empty()) nodes->near = connect(alone ? Members{} : layout.mine, tell_all, why_not);
  if (why_not.empty()) nodes->far = connect(layout.partners, tell_all, why_not);
  if (!why_not.empty())
    return tell_(group_->me() == 0 ? LogLevel::kWarning : LogLevel::kInfo,
                 "what is exact only inside nodes goes by the host's memory: " + why_not);
  tell_(LogLevel::kInfo, "exact inside nodes: NCCL within, and between " +
                             std::to_string(layout.leaders) + " leaders of each");
  agreed.nodes = std::move(nodes);
}

const std::string& NcclExchange::refusal(int32_t set) const {
  static const std::string none;
  const auto found = sets_.find(set);
  return found == sets_.end() ? none : found->second.refusal;
}

// While a graph is captured NCCL does so by itself.
void NcclExchange::see_to_registered(const std::vector<RequestPtr>& requests) {
  if (nccl_->has_registered() && !under_way()) nccl_->forget_unused();
  for (const RequestPtr& request : requests)
    if (request->description.registered)
      nccl_->register_memory({request->keepalive, request->parts[0].out},
                             static_cast<size_t>(nbytes_of(request->description)));
}

std::shared_ptr<char> NcclExchange::allocate_registered(size_t nbytes) {
  return library_ && device_ ? nccl_memory(*library_, *device_, nbytes) : nullptr;
}

char* NcclExchange::borrow(size_t nbytes) {
  nbytes = Device::lent_nbytes(nbytes);
  const auto fits = on_ == stream_ ? returned_.lower_bound(nbytes) : returned_.end();
  if (fits != returned_.end() && fits->first <= 2 * nbytes) {
    borrowed_.push_back({fits->first, std::move(fits->second)});
    returned_.erase(fits);
  } else {
    borrowed_.push_back({nbytes, lend(nbytes)});
  }
  return borrowed_.back().second.get();
}

// In exchange for what is too small: sizes may grow and grow.
std::shared_ptr<char> NcclExchange::lend(size_t nbytes) {
  const auto larger = returned_.lower_bound(nbytes);
  if (on_ == stream_ && larger != returned_.begin()) {
    const auto smaller = std::prev(larger);
    device_->keep_until(last_, std::move(smaller->second));
    returned_.erase(smaller);
  }
  try {
    return device_->lend(nbytes);
  } catch (const UsageError&) {  // there is no room
    if (returned_.empty()) throw;
  }
  group_->wait_until([&] { return device_->reached(last_); });  // or a rank fails
  returned_.clear();
  return device_->lend(nbytes);
}

// Calls give(how) so that NCCL reduces to the places where `results` are, and does the rest.
template <class Give>
void NcclExchange::reduce(const Job& job, const std::vector<NcclGroup::Piece>& results,
                          Give&& give) {
  if (!is_float(job.dtype) || !is_linear(job.op)) return give({job.op, job.finish.factor});
  const SplitFactor factor =
      split_factor(job.dtype, job.finish.factor / job.finish.divisor, group_->size());
  const bool alone = group_->size() == 1;  // whose average is the sum
  if (factor.after == 1) return give({alone ? ReduceOp::kSum : job.op, job.finish.factor});
  give({ReduceOp::kSum, factor.before});
  for (const NcclGroup::Piece& p : results)
    gpu_scale(job.dtype, p.out, p.count, factor.after, *device_, on_);
}

void NcclExchange::run(OpKind kind, const Job& job) {
  using How = NcclGroup::How;
  if (special_) {
    const OnDevice on{*nccl_,         *device_,     on_,
                      group_->size(), group_->me(), [this](size_t n) { return borrow(n); }};
    if (nodes_) return nodes_->allreduce(on, job);
    return job.peers.all() ? allreduce_coded(on, job) : allreduce_with_peers(on, job);
  }
  switch (kind) {
    case OpKind::kAllreduce:
      return reduce(job, pieces_of(job),
                    [&](How how) { nccl_->allreduce(pieces_of(job), job.dtype, how); });
    case OpKind::kBroadcast:
      return nccl_->broadcast(pieces_of(job), job.dtype, job.root);
    case OpKind::kAllgather:
      return nccl_->allgather(job.in, job.out, job.out_counts, job.dtype);
    case OpKind::kReducescatter:
      return reduce(
          job, {{job.in, job.out, job.in_counts[static_cast<size_t>(group_->me())]}},
          [&](How how) { nccl_->reducescatter(job.in, job.out, job.in_counts, job.dtype, how); });
    case OpKind::kAlltoall:
      return nccl_->alltoall(job.in, job.out, job.in_counts, job.out_counts, job.dtype);
    default:
      throw InternalError(std::string(kind_name(kind)) + " is not NCCL's");
  }
}

void NcclExchange::end(const std::vector<RequestPtr>& requests) {
  const Device::Mark end = device_->mark(on_);
  if (!device_->captured(end)) {
    last_ = end;
    given_s_ = now_s();
  }
  for (const RequestPtr& request : requests)
    request->handle->returned_to(*device_, end, /*may_fail=*/group_->size() > 1);
  for (auto& [nbytes, memory] : borrowed_) {
    if (on_ == stream_) {
      returned_.emplace(nbytes, std::move(memory));
    } else {
      device_->keep_until(end, std::move(memory));
    }
  }
  borrowed_.clear();
}

bool NcclExchange::under_way() const noexcept {
  try {
    return last_ && !device_->reached(last_);
  } catch (const std::exception&) {
    return false;  // the device is broken, and everybody who asks it hears so
  }
}

template <class Each>
void NcclExchange::for_each_group(Agreed& agreed, Each&& each) {
  if (agreed.all) each(agreed.all);
  if (!agreed.nodes) return;
  for (auto* group : {&agreed.nodes->near, &agreed.nodes->far})
    if (*group) each(*group);
}

void NcclExchange::check() {
  for (auto& [set, agreed] : sets_) for_each_group(agreed, [](auto& group) { group->check(); });
}

bool NcclExchange::abort() noexcept {
  std::vector<NcclGroup*> all;
  for (auto& [set, agreed] : sets_)
    for_each_group(agreed, [&](auto& group) { all.push_back(group.get()); });
  for (auto& group : left_) all.push_back(group.get());
  ending_->hurries = true;
  if (!NcclGroup::abort(all)) return false;
  return !device_ || device_->drains_in_time(stream_);
}

void NcclExchange::forget(int32_t set) {
  const auto found = sets_.find(set);
  if (found == sets_.end()) return;
  for_each_group(found->second, [&](auto& group) { left_.push_back(std::move(group)); });
  sets_.erase(found);
}

bool NcclExchange::has_left() const {
  return std::any_of(left_.begin(), left_.end(), [](const auto& group) { return group->ends(); });
}

void NcclExchange::tidy() { end_left(/*is_last=*/false); }

// By a thread for each, which may have to wait for the device, and that for other ranks, or for
// what another of them has there.
void NcclExchange::end_left(bool is_last) {
  for (auto it = left_.begin(); it != left_.end();) {
    if (!(*it)->ends()) {
      ++it;
      continue;
    }
    auto end = [group = std::shared_ptr<NcclGroup>(std::move(*it)), ending = ending_,
                is_last]() mutable {
      try {
        group->end(ending->hurries, is_last);
      } catch (const Error&) {  // the device is broken
      }
      group.reset();
      --ending->count;
    };
    it = left_.erase(it);
    ++ending_->count;
    try {
      std::thread(std::move(end)).detach();
    } catch (const std::system_error&) {  // no more threads here: it is aborted
      --ending_->count;
    }
  }
}

void NcclExchange::finish() {
  while (!sets_.empty()) forget(sets_.begin()->first);
  end_last();
}

void NcclExchange::end_last() {
  end_left(/*is_last=*/true);
  if (finished_s_ == 0) finished_s_ = now_s();
}

bool NcclExchange::ends() {
  if (finished_s_ == 0) return false;
  const double waited_s = now_s() - finished_s_;
  if (waited_s > kEndS) ending_->hurries = true;
  return ending_->count > 0 && waited_s < 2 * kEndS;
}

}  // namespace bagua
