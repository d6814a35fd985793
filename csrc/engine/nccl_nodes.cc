#include "engine/nccl_nodes.h"

#include "engine/nccl_peers.h"

namespace bagua {

void NcclNodes::use(NcclGroup::Stream stream, bool captured) {
  for (auto* group : {&near, &far})
    if (*group) (*group)->use(stream, captured);
}

void NcclNodes::allreduce(const OnDevice& on, const Job& job) {
  const auto exchange = [&](float* data, int64_t count) {
    const std::vector<Slice> slices = slices_for(job.coding, count, leaders);
    const size_t me = near ? near->me() : 0;
    NcclGroup::Counts counts(near ? near->size() : 1, 0);
    for (size_t i = 0; i < slices.size(); ++i) counts[i] = slices[i].count;
    const Slice mine = far ? slices[me] : Slice{0, 0};
    float* const floats = data + mine.begin;
    auto* const all = reinterpret_cast<char*>(data);
    auto* const own = reinterpret_cast<char*>(floats);

    if (near) near->reducescatter(all, own, counts, DType::kF32, {ReduceOp::kSum, 1});
    if (mine.count > 0) {
      // The finish is of all ranks, once; what is kept lies where the values do.
      Job across{job.group, job.scratch, DType::kF32, job.op, job.finish};
      across.coding = job.coding;
      across.peers = job.peers;
      across.weights = weights;
      for (size_t i = 0; i < job.kept.size(); ++i)
        if (job.kept[i]) across.kept[i] = job.kept[i] + mine.begin;
      const OnDevice there{*far, on.device, on.stream, far->size(), far->me(), on.borrow};
      if (job.peers.all())
        allreduce_floats(there, across, floats, mine.count);
      else
        allreduce_with_peers(there, across, DType::kF32, own, mine.count);
    }
    if (near) near->allgather(own, all, counts, DType::kF32);
  };
  in_floats(on, job, exchange);
}

}  // namespace bagua
