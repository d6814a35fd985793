#include "engine/nccl_exchange.h"

#include <utility>

#include "codec/gpu.h"
#include "common/clock.h"
#include "engine/allreduce.h"
#include "engine/nccl_coded.h"
#include "engine/nccl_peers.h"
#include "engine/split_factor.h"

namespace bagua {
namespace {

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
                           NcclSets::Tell tell)
    : library_(library),
      device_(device),
      stream_(device ? device->add_stream() : nullptr),
      sets_(library, device, config, std::move(tell)),
      loans_(device, stream_, [this](const auto& reached) { group_->wait_until(reached); }) {}

NcclExchange::~NcclExchange() {
  sets_.end_now();
  if (!abort()) loans_.keep_for_ever();
}

bool NcclExchange::abort() noexcept {
  return sets_.abort() && (!device_ || device_->drains_in_time(stream_));
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

// Not as NCCL does it by itself. Inside one node, or alone, some codecs and peers do not count.
bool NcclExchange::is_special(const Description& d) const {
  const bool meant = !d.codec.empty() || !d.peers.empty();
  return meant && group_->size() > 1 && !(d.exact_in_nodes && group_->node());
}

bool NcclExchange::begin(int32_t set, const std::vector<RequestPtr>& requests, Group& group,
                         const NcclSets::TellAll& tell_all) {
  group_ = &group;
  const bool captured = requests[0]->description.captured;
  const NcclSets::TellAll* const agreeing = captured ? nullptr : &tell_all;
  NcclSets::Agreed* const agreed = sets_.of(set, group, agreeing);
  for (const RequestPtr& request : requests)
    if (!fits(request->description)) return false;
  if (!agreed || !agreed->all) return false;
  const Description& first = requests[0]->description;  // in this they are alike
  nodes_ = nullptr;
  special_ = is_special(first);
  for (const RequestPtr& request : requests)
    if (special_ && !first.peers.empty() && !meets(request->description)) return false;
  if (special_ && first.exact_in_nodes && group.on_shared_nodes()) {
    nodes_ = sets_.nodes_of(*agreed, agreeing);
    if (!nodes_) return false;
  }
  nccl_ = agreed->all.get();
  if (!agreed->has_kernels)
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
    const auto lent = [this](size_t nbytes) { return borrow(nbytes); };
    const OnDevice on{*nccl_, *device_, on_, group_->size(), group_->me(), lent};
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
  loans_.end(end, on_);
}

bool NcclExchange::under_way() const noexcept {
  try {
    return last_ && !device_->reached(last_);
  } catch (const std::exception&) {
    return false;  // the device is broken, and everybody who asks it hears so
  }
}

}  // namespace bagua
