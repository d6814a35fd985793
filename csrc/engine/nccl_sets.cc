#include "engine/nccl_sets.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

#include "collective/node_layout.h"
#include "common/clock.h"
#include "common/errors.h"
#include "engine/nccl_card.h"
#include "engine/outcome.h"

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

}  // namespace

NcclSets::NcclSets(const NcclLibrary* library, Device* device, const Config& config, Tell tell)
    : library_(library),
      device_(device),
      wanted_(config.nccl),
      shares_(config.nccl_shares_gpu),
      allowed_(config.allow_shared_gpu),
      tell_(std::move(tell)) {}

NcclSets::Agreed* NcclSets::of(int32_t set, Group& group, const TellAll* tell_all) {
  group_ = &group;
  if (sets_.count(set) == 0 && tell_all) agree(set, *tell_all);
  const auto found = sets_.find(set);
  return found == sets_.end() ? nullptr : &found->second;
}

NcclNodes* NcclSets::nodes_of(Agreed& agreed, const TellAll* tell_all) {
  if (!agreed.nodes_known && tell_all) make_nodes(agreed, *tell_all);
  return agreed.nodes.get();
}

// Everybody tells what it has, and all come to the same conclusion.
void NcclSets::agree(int32_t set, const TellAll& tell_all) {
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

// Whether this rank gives them the id: its threads wait for the others.
bool NcclSets::is_first(const Members& members) const {
  return !members.empty() && members[0] == group_->me();
}

// Behind each is a thread of NCCL's that waits for ranks: what was not used is for the next time.
bool NcclSets::give_id(NcclId& id) {
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
std::unique_ptr<NcclGroup> NcclSets::connect(const Members& members, const NcclId& id,
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
std::unique_ptr<NcclGroup> NcclSets::connect(const Members& members, const TellAll& tell_all,
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

// In the first exchange that is for them: made before, everybody would pay for them. NCCL may wait
// for the device meanwhile, and what is under way there ends by itself, since all ranks have given
// it before they come to this.
void NcclSets::make_nodes(Agreed& agreed, const TellAll& tell_all) {
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

const std::string& NcclSets::refusal(int32_t set) const {
  static const std::string none;
  const auto found = sets_.find(set);
  return found == sets_.end() ? none : found->second.refusal;
}

template <class Each>
void NcclSets::for_each_group(Agreed& agreed, Each&& each) {
  if (agreed.all) each(agreed.all);
  if (!agreed.nodes) return;
  for (auto* group : {&agreed.nodes->near, &agreed.nodes->far})
    if (*group) each(*group);
}

void NcclSets::check() {
  for (auto& [set, agreed] : sets_) for_each_group(agreed, [](auto& group) { group->check(); });
}

bool NcclSets::abort() noexcept {
  std::vector<NcclGroup*> all;
  for (auto& [set, agreed] : sets_)
    for_each_group(agreed, [&](auto& group) { all.push_back(group.get()); });
  for (auto& group : left_) all.push_back(group.get());
  ending_->hurries = true;
  return NcclGroup::abort(all);
}

void NcclSets::forget(int32_t set) {
  const auto found = sets_.find(set);
  if (found == sets_.end()) return;
  for_each_group(found->second, [&](auto& group) { left_.push_back(std::move(group)); });
  sets_.erase(found);
}

bool NcclSets::has_left() const {
  return std::any_of(left_.begin(), left_.end(), [](const auto& group) { return group->ends(); });
}

// By a thread for each, which may have to wait for the device, and that for other ranks, or for
// what another of them has there.
void NcclSets::end_left(bool is_last) {
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

void NcclSets::finish() {
  while (!sets_.empty()) forget(sets_.begin()->first);
  end_last();
}

void NcclSets::end_last() {
  end_left(/*is_last=*/true);
  if (finished_s_ == 0) finished_s_ = now_s();
}

bool NcclSets::ends() {
  if (finished_s_ == 0) return false;
  const double waited_s = now_s() - finished_s_;
  if (waited_s > kEndS) ending_->hurries = true;
  return ending_->count > 0 && waited_s < 2 * kEndS;
}

void NcclSets::end_now() {
  end_last();
  while (ends()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace bagua
