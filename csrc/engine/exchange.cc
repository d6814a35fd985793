#include "engine/exchange.h"

#include <algorithm>
#include <cstring>

#include "common/memory.h"
#include "engine/allreduce.h"
#include "engine/jobs.h"
#include "engine/tensors.h"

namespace bagua {
namespace {

int member_of(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

// Memory for a result, where the tensor was that it is of; and where the exchange writes it.
char* allocate(Output& output, const Workbench& bench, const Part& part, size_t nbytes) {
  output.on_device = bench.nccl || part.staged;
  if (!output.on_device) {
    output.data = allocate_lines(nbytes);
    return output.data.get();
  }
  output.user = std::make_shared<std::atomic<Device::Stream>>(nullptr);
  if (bench.nccl) {
    output.data = bench.nccl->allocate(nbytes, output.user);
    return output.data.get();
  }
  output.data = bench.staging->allocate(nbytes, output.user);
  return bench.staging->place_for(output.data.get(), nbytes);
}

void run(OpKind kind, Job& job, const Workbench& bench) {
  if (bench.nccl) return bench.nccl->run(kind, job);
  run_on_host(kind, job, bench, bench.staging);
}

void exchange_broadcast(const std::vector<RequestPtr>& requests, Group& group,
                        const std::vector<int>& ranks, const Workbench& bench) {
  for (const RequestPtr& request : requests) {
    const int root = member_of(ranks, request->description.root);
    auto tensors = tensors_by_dtype({request});
    // Only the root's input matters; the others' must not be copied over their outputs in vain.
    if (group.me() != root)
      for (Tensor& t : tensors) t.in = t.out;
    for_jobs(tensors, group, bench, true, [&](Job& job) {
      job.root = root;
      run(OpKind::kBroadcast, job, bench);
    });
  }
}

void exchange_allgather(const Request& request, Group& group, const Workbench& bench) {
  const auto infos = tensors_of(request.description);
  const auto n = static_cast<size_t>(group.size());
  const std::vector<int64_t> rows = exchange_counts(
      OpKind::kAllgather, request.rows, static_cast<int64_t>(infos.size()), group, bench);
  for (size_t i = 0; i < infos.size(); ++i) {
    const int64_t row_count = infos[i].row_count();
    Output& output = request.handle->outputs.emplace_back();
    Job job{group, bench.scratch, infos[i].dtype};
    int64_t total = 0;
    for (size_t rank = 0; rank < n; ++rank) {
      output.rows.push_back(rows[rank * infos.size() + i]);
      job.out_counts.push_back(output.rows.back() * row_count);
      total += job.out_counts.back();
    }
    job.in = request.parts[i].in;
    job.out = allocate(output, bench, request.parts[i], static_cast<size_t>(total) * job.item());
    run(OpKind::kAllgather, job, bench);
  }
}

void exchange_alltoall(const Request& request, Group& group, const Workbench& bench) {
  const TensorInfo info = tensors_of(request.description)[0];
  const int64_t row_count = info.row_count();
  Output& output = request.handle->outputs.emplace_back();
  output.rows = exchange_counts(OpKind::kAlltoall, request.splits, 1, group, bench);
  Job job{group, bench.scratch, info.dtype};
  int64_t total = 0;
  for (size_t rank = 0; rank < output.rows.size(); ++rank) {
    job.in_counts.push_back(request.splits[rank] * row_count);
    job.out_counts.push_back(output.rows[rank] * row_count);
    total += job.out_counts.back();
  }
  job.in = request.parts[0].in;
  job.out = allocate(output, bench, request.parts[0], static_cast<size_t>(total) * job.item());
  run(OpKind::kAlltoall, job, bench);
}

void exchange_reducescatter(const Request& request, Group& group, const Workbench& bench) {
  const Description& d = request.description;
  const auto infos = tensors_of(d);
  for (size_t i = 0; i < infos.size(); ++i) {
    if (infos[i].count() == 0) continue;
    Job job{group, bench.scratch, infos[i].dtype, d.op, finish_of(d, group.size())};
    for (int rank = 0; rank < group.size(); ++rank)
      job.in_counts.push_back(slice_of(infos[i].shape[0], group.size(), rank).count *
                              infos[i].row_count());
    job.in = request.parts[i].in;
    job.out = request.parts[i].out;
    if (!is_linear(d.op) && d.prescale != 1) {
      const int64_t nbytes = infos[i].count() * static_cast<int64_t>(job.item());
      if (bench.staging) bench.staging->need();
      char* scaled = bench.scratch.get(Scratch::kFusion, static_cast<size_t>(nbytes));
      copy(group, scaled, job.in, static_cast<size_t>(nbytes));
      group.touch(2 * static_cast<size_t>(nbytes));
      scale(job.dtype, scaled, infos[i].count(), d.prescale);
      job.in = scaled;
    }
    run(OpKind::kReducescatter, job, bench);
  }
}

}  // namespace

bool stays_alone(const Request& request) {
  const Description& d = request.description;
  const bool same = d.kind == OpKind::kBroadcast ||
                    (d.kind == OpKind::kAllreduce && d.prescale == 1 && d.postscale == 1);
  const auto in_place = [](const Part& part) { return part.in == part.out; };
  return same && std::all_of(request.parts.begin(), request.parts.end(), in_place) &&
         (!request.device || request.starts.size() == 1);
}

std::vector<int64_t> exchange_counts(OpKind kind, const std::vector<int64_t>& in, int64_t per_rank,
                                     Group& group, const Workbench& bench) {
  const auto n = static_cast<size_t>(group.size());
  const size_t out_count = n * static_cast<size_t>(per_rank);
  char* memory = bench.scratch.get(Scratch::kCounts, (out_count + in.size()) * sizeof(int64_t));
  char* sent = memory + out_count * sizeof(int64_t);
  std::memcpy(sent, in.data(), in.size() * sizeof(int64_t));
  Job job{group, bench.scratch, DType::kI64};
  job.in = sent;
  job.out = memory;
  job.in_counts.assign(n, per_rank);
  job.out_counts.assign(n, per_rank);
  run_on_host(kind, job, bench, /*staging=*/nullptr);
  const auto* out = reinterpret_cast<const int64_t*>(memory);
  return {out, out + out_count};
}

void run_exchange(const std::vector<RequestPtr>& requests, Group& group,
                  const std::vector<int>& ranks, const Workbench& bench) {
  switch (requests[0]->description.kind) {
    case OpKind::kAllreduce:
      return Allreduce(requests, group, bench).run();
    case OpKind::kBroadcast:
      return exchange_broadcast(requests, group, ranks, bench);
    case OpKind::kAllgather:
      for (const RequestPtr& request : requests) exchange_allgather(*request, group, bench);
      return;
    case OpKind::kAlltoall:
      for (const RequestPtr& request : requests) exchange_alltoall(*request, group, bench);
      return;
    case OpKind::kReducescatter:
      for (const RequestPtr& request : requests) exchange_reducescatter(*request, group, bench);
      return;
    default:
      return;  // barrier, join and process sets: agreeing was all there was to do
  }
}

}  // namespace bagua
