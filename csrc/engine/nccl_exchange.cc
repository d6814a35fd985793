#include "engine/nccl_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/nccl_coded.h"

namespace bagua {
namespace {

// What ranks must know of each other before they use NCCL together.
struct Card {
  int32_t version = 0;
  int32_t shares = 0;  // its GPU with others
  char gpu[16] = {};
  NcclId id = {};  // the first rank's counts
};
constexpr size_t kNumbers = sizeof(Card) / sizeof(int64_t);
static_assert(sizeof(Card) % sizeof(int64_t) == 0);

// Why not, or nothing.
std::string obstacle(const std::vector<Card>& cards) {
  for (size_t i = 0; i < cards.size(); ++i) {
    if (cards[i].version <= 0) return "not all ranks have it and a GPU";
    if (cards[i].version != cards[0].version) return "ranks have different versions of it";
    for (size_t j = 0; j < i; ++j)
      if (std::memcmp(cards[i].gpu, cards[j].gpu, sizeof cards[i].gpu) == 0 &&
          !(cards[i].shares && cards[j].shares))
        return "two ranks have one GPU, which takes NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1";
  }
  return "";
}

constexpr int kFirstThatShares = 23000;

bool is_linear(ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAverage; }

std::vector<NcclGroup::Piece> pieces_of(const Job& job) {
  std::vector<NcclGroup::Piece> pieces;
  for (const Fragment& f : job.fragments) pieces.push_back({f.in, f.out, f.count});
  return pieces;
}

}  // namespace

NcclExchange::NcclExchange(const NcclLibrary* library, Device* device, bool shares, Tell tell)
    : library_(library),
      device_(device),
      shares_(shares),
      tell_(std::move(tell)),
      stream_(device ? device->add_stream() : nullptr) {}

NcclExchange::~NcclExchange() {
  try {
    if (last_) device_->drain(stream_);
  } catch (const Error&) {  // the device is broken, and everybody who asks it hears so
  }
}

bool NcclExchange::fits(const Description& d) {
  if (!d.on_device || !d.peers.empty()) return false;
  const bool reduces = d.kind == OpKind::kAllreduce || d.kind == OpKind::kReducescatter;
  const bool scales = reduces && (d.prescale != 1 || d.postscale != 1);
  bool all = true;
  for_each_tensor(d, [&](DType dtype, const int64_t*, size_t) {
    all = all && (reduces ? NcclGroup::can_reduce(dtype, d.op) : NcclGroup::can_move(dtype));
    all = all && (d.codec.empty() || (is_linear(d.op) && can_code_on_device(d.codec, dtype)));
    all = all && (!scales || (is_float(dtype) && is_linear(d.op)));
  });
  return all;
}

// Everybody tells what it has, and all come to the same conclusion.
NcclGroup* NcclExchange::group_of(int32_t set, const TellAll& tell_all) {
  const auto known = groups_.find(set);
  if (known != groups_.end()) return known->second.get();
  Card mine;
  if (library_ && device_ && library_->get_unique_id(&mine.id) == NcclResult::kSuccess) {
    mine.version = library_->version;
    mine.shares = shares_ && library_->version >= kFirstThatShares;
    const std::string identity = device_->identity();
    std::memcpy(mine.gpu, identity.data(), std::min(identity.size(), sizeof mine.gpu));
  }
  std::vector<int64_t> numbers(kNumbers);
  std::memcpy(numbers.data(), &mine, sizeof mine);
  const std::vector<int64_t> all = tell_all(numbers);
  std::vector<Card> cards(all.size() / kNumbers);
  std::memcpy(static_cast<void*>(cards.data()), all.data(), cards.size() * sizeof mine);
  const std::string why_not = obstacle(cards);
  auto& nccl = groups_[set];
  if (why_not.empty()) {
    tell_("tensors on " + device_->name() + " go by NCCL " + version_text(*library_));
    nccl = std::make_unique<NcclGroup>(
        *library_, cards[0].id, group_->size(), group_->me(), stream_,
        [this](const std::function<bool()>& reached) { group_->wait_until(reached); });
  } else {
    tell_("NCCL is not used: " + why_not);
  }
  return nccl.get();
}

bool NcclExchange::begin(int32_t set, const std::vector<RequestPtr>& requests, Group& group,
                         const TellAll& tell_all) {
  group_ = &group;
  nccl_ = group_of(set, tell_all);
  if (!nccl_) return false;
  const Description& d = requests[0]->description;
  if (!d.codec.empty() && d.exact_in_nodes && group.on_shared_nodes() && !group.node())
    return false;  // exact inside the nodes only
  if (!under_way()) borrowed_.clear();
  for (const RequestPtr& request : requests)
    for (const Device::Mark& start : request->starts) device_->follow(stream_, start);
  return true;
}

const char* NcclExchange::copy_of(const char* from, size_t nbytes) {
  borrowed_.push_back(allocate(nbytes));
  device_->copy(borrowed_.back().get(), from, nbytes, stream_);
  return borrowed_.back().get();
}

char* NcclExchange::memory(Scratch::Lane lane, size_t nbytes) {
  Memory& memory = memories_[lane];
  if (memory.nbytes < nbytes) {
    borrowed_.push_back(std::move(memory.data));  // it may still be in use
    const size_t more = std::max(nbytes, 2 * memory.nbytes);
    memory = {allocate(more), more};
  }
  return memory.data.get();
}

void NcclExchange::run(OpKind kind, const Job& job) {
  const NcclGroup::How how = {job.op, job.finish.factor};
  const int size = group_->size();
  const bool exact = job.exact_in_nodes && group_->node();
  if (job.coding && size > 1 && !exact)
    return allreduce_coded({*nccl_, *device_, stream_, size, group_->me(),
                            [this](Scratch::Lane lane, size_t n) { return memory(lane, n); }},
                           job);
  switch (kind) {
    case OpKind::kAllreduce:
      return nccl_->allreduce(pieces_of(job), job.dtype, how);
    case OpKind::kBroadcast:
      return nccl_->broadcast(pieces_of(job), job.dtype, job.root);
    case OpKind::kAllgather:
      return nccl_->allgather(job.in, job.out, job.out_counts, job.dtype);
    case OpKind::kReducescatter:
      return nccl_->reducescatter(job.in, job.out, job.in_counts, job.dtype, how);
    case OpKind::kAlltoall:
      return nccl_->alltoall(job.in, job.out, job.in_counts, job.out_counts, job.dtype);
    default:
      throw InternalError(std::string(kind_name(kind)) + " is not NCCL's");
  }
}

void NcclExchange::end(const std::vector<RequestPtr>& requests) {
  last_ = mark();
  for (const RequestPtr& request : requests) request->handle->returned_to(*device_, last_);
}

void NcclExchange::check() {
  for (auto& [set, group] : groups_)
    if (group) group->check();
}

void NcclExchange::abort() {
  for (auto& [set, group] : groups_)
    if (group) group->abort();
}

}  // namespace bagua
