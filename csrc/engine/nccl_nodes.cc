#include "engine/nccl_nodes.h"

#include <algorithm>
#include <utility>

#include "common/errors.h"
#include "engine/outcome.h"

namespace bagua {
namespace {

int place_in(const std::vector<int>& members, int me) {
  return static_cast<int>(std::find(members.begin(), members.end(), me) - members.begin());
}

}  // namespace

NcclNodes::NcclNodes(const NcclLibrary& library, Device& device, const Group& group,
                     NcclGroup::WaitUntil wait_until)
    : library_(library),
      device_(device),
      layout_(node_layout_of(group)),
      me_(group.me()),
      wait_until_(std::move(wait_until)) {}

// Whoever fails says so at once, and the others, whom NCCL lets wait for it, give up.
std::string NcclNodes::split(NcclGroup& all, Group& group) {
  Outcome outcome(group);
  const auto pointless = [&] { return outcome.failed(); };
  const bool alone = layout_.mine.size() == 1;
  std::string why_not = add(near_, all, alone ? std::vector<int>{} : layout_.mine, pointless);
  if (why_not.empty()) why_not = add(far_, all, layout_.partners, pointless);
  if (!why_not.empty()) why_not = "rank " + std::to_string(group.rank_of(me_)) + ": " + why_not;
  return outcome.settle(why_not);
}

// NCCL asks everybody for every part, those too who are in none.
std::string NcclNodes::add(NcclGroup*& group, NcclGroup& all, const std::vector<int>& members,
                           const std::function<bool()>& pointless) {
  auto part = std::make_unique<NcclGroup>(library_, device_, static_cast<int>(members.size()),
                                          place_in(members, me_), wait_until_);
  try {
    part->begin(all, members.empty() ? NcclGroup::kNoColor : members[0]);
  } catch (const InternalError& error) {
    return error.what();
  }
  const std::string why_not = part->begun(pointless);
  if (!why_not.empty() || members.empty()) return why_not;
  group = part.get();
  groups_.push_back(std::move(part));
  return "";
}

void NcclNodes::allreduce(const OnDevice& on, const Job& job) {
  const auto exchange = [&](float* data, int64_t count) {
    const std::vector<Slice> slices = slices_for(*job.coding, count, layout_.leaders);
    NcclGroup::Counts counts(layout_.mine.size(), 0);
    for (size_t i = 0; i < slices.size(); ++i) counts[i] = slices[i].count;
    const Slice mine =
        far_ ? slices[static_cast<size_t>(place_in(layout_.mine, me_))] : Slice{0, 0};
    float* const floats = data + mine.begin;
    auto* const all = reinterpret_cast<char*>(data);
    auto* const own = reinterpret_cast<char*>(floats);

    if (near_) near_->reducescatter(all, own, counts, DType::kF32, {ReduceOp::kSum, 1});
    if (mine.count > 0) {
      // The finish is of all ranks, once; what is kept lies where the values do.
      Job across{job.group, job.scratch, DType::kF32, job.op, job.finish};
      across.coding = job.coding;
      for (size_t i = 0; i < job.kept.size(); ++i)
        if (job.kept[i]) across.kept[i] = job.kept[i] + mine.begin;
      const OnDevice leaders{*far_,
                             on.device,
                             on.stream,
                             static_cast<int>(layout_.partners.size()),
                             place_in(layout_.partners, me_),
                             on.borrow};
      allreduce_floats(leaders, across, floats, mine.count);
    }
    if (near_) near_->allgather(own, all, counts, DType::kF32);
  };
  in_floats(on, job, exchange);
}

}  // namespace bagua
