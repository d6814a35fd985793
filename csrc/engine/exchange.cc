#include "engine/exchange.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <list>

#include "common/memory.h"
#include "engine/tensors.h"

namespace bagua {
namespace {

int member_of(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

// Elements that come from a device do so while the exchange goes on with others, if it can.
void connect(Job& job, const Collective& row, Staging& staging) {
  const bool in_segments = !job.coding || job.dtype == DType::kF32;
  if (!row.pipelined || !in_segments || !staging.holds(job.data)) return staging.need();
  const auto item = static_cast<int64_t>(job.item());
  job.prepare = [&job, &staging, item](int64_t begin, int64_t count) {
    staging.need(job.data + begin * item, static_cast<size_t>(count * item));
  };
  job.arrived = [&job, &staging, item](int64_t begin, int64_t count) {
    staging.give(job.data + begin * item, static_cast<size_t>(count * item));
  };
}

// Memory for a result, where the tensors are.
char* allocate(Output& output, const Workbench& bench, size_t nbytes) {
  output.on_device = bench.nccl != nullptr;
  if (bench.nccl) output.user = std::make_shared<std::atomic<Device::Stream>>(nullptr);
  output.data = bench.nccl ? bench.nccl->allocate(nbytes, output.user) : allocate_lines(nbytes);
  return output.data.get();
}

// The row that does a job, and what the job has to know for it.
const Collective& choose(OpKind kind, Job& job, const Workbench& bench) {
  const bool named = kind == OpKind::kAllreduce;
  const Collective& row =
      choose_collective(kind, job, named ? std::string_view(bench.allreduce.for_all) : "auto");
  bench.chosen(row, job);
  job.between_nodes = bench.allreduce.between_nodes;
  job.chosen = bench.chosen;
  job.crew = bench.crew;
  return row;
}

char* place_of(const Job& job, const Fragment& f) {
  return job.data + f.begin * static_cast<int64_t>(job.item());
}

// For what wants elements in one place: brings fragments there.
void gather(Job& job, char* place) {
  job.data = place;
  for (const Fragment& f : job.fragments)
    copy(job.group, place_of(job, f), f.in, static_cast<size_t>(f.count) * job.item());
}

// And takes the results from there.
void scatter(const Job& job) {
  for (const Fragment& f : job.fragments)
    copy(job.group, f.out, place_of(job, f), static_cast<size_t>(f.count) * job.item());
}

void carry_out(const Collective& row, Job& job, const Workbench& bench, Staging* staging) {
  if (staging) connect(job, row, *staging);
  if (job.fragments.empty() || row.scattered) return row.run(job);
  gather(job, bench.scratch.get(Scratch::kFusion, job.nbytes()));
  row.run(job);
  scatter(job);
}

void run_on_host(OpKind kind, Job& job, const Workbench& bench, Staging* staging) {
  carry_out(choose(kind, job, bench), job, bench, staging);
}

void run(OpKind kind, Job& job, const Workbench& bench) {
  if (bench.nccl) return bench.nccl->run(kind, job);
  run_on_host(kind, job, bench, bench.staging);
}

// Allreduces in the host's memory, one after the other; several at a time where the row can, of
// jobs that are one tensor each.
class Allreduces {
 public:
  explicit Allreduces(const Workbench& bench) : bench_(bench) {}

  void add(Job& job) {
    const Collective& row = choose(OpKind::kAllreduce, job, bench_);
    // What tells neighbors waits for none of them.
    const bool full = job.peers.all() && nbytes_ + job.nbytes() > kAheadNbytes;
    if (&row != row_ || full) flush();
    if (!row.run_all || !job.data) {
      flush();
      return carry_out(row, job, bench_, bench_.staging);
    }
    row_ = &row;
    nbytes_ += job.nbytes();
    Job& mine = jobs_.emplace_back(std::move(job));
    if (bench_.staging) connect(mine, row, *bench_.staging);
  }

  void flush() {
    Jobs together;
    for (Job& job : jobs_) together.push_back(&job);
    if (!together.empty()) row_->run_all(together);
    jobs_.clear();
    nbytes_ = 0;
  }

 private:
  const Workbench& bench_;
  std::list<Job> jobs_;  // whose callbacks refer to them
  const Collective* row_ = nullptr;
  size_t nbytes_ = 0;
};

// Scales everything, in the place where the results go.
void scale_all(Job& job, double factor) {
  if (job.data) return scale(job.dtype, job.data, job.count, factor);
  for (Fragment& f : job.fragments) {
    copy(job.group, f.out, f.in, static_cast<size_t>(f.count) * job.item());
    scale(job.dtype, f.out, f.count, factor);
    f.in = f.out;
  }
}

// Sums may be scaled once, at the end and before rounding; other reductions are prescaled first.
Finish finish_of(const Description& d, int nranks) {
  Finish finish;
  finish.divisor = d.op == ReduceOp::kAverage ? nranks : 1;
  finish.factor = (is_linear(d.op) ? d.prescale : 1) * d.postscale;
  return finish;
}

void exchange_allreduce(const std::vector<RequestPtr>& requests, Group& group,
                        const Workbench& bench) {
  const Description& d = requests[0]->description;
  const Finish finish = finish_of(d, group.size());
  const bool fuse = d.op != ReduceOp::kAdasum && d.codec.empty() && d.peers.empty();
  Coding coding;
  if (!d.codec.empty()) coding = parse_coding(d.codec);
  Peers peers = parse_peers(d.peers);
  peers.round += requests[0]->round;
  std::vector<Tensor> tensors = tensors_by_dtype(requests);
  const std::vector<Apart> apart = take_apart(tensors, group, bench);
  Allreduces allreduces(bench);
  size_t laid = 0;  // tensors that are jobs of their own
  for_jobs(tensors, group, bench, fuse, [&](Job& job) {
    job.op = d.op;
    job.finish = finish;
    job.coding = coding.codec ? &coding : nullptr;
    job.peers = peers;
    job.exact_in_nodes = d.exact_in_nodes;
    // Not of several tensors: results come to them at the end.
    if (job.data && ++laid == tensors.size() && apart.empty())
      job.values_final = bench.values_final;
    job.leaves = job.data && job.dtype == DType::kF32 && !bench.staging;
    if (bench.staging && (!is_linear(d.op) || group.size() == 1)) bench.staging->need();
    if (!is_linear(d.op) && d.prescale != 1) scale_all(job, d.prescale);
    if (group.size() == 1 && !bench.nccl) return scale_all(job, finish.factor);
    if (bench.nccl) return bench.nccl->run(OpKind::kAllreduce, job);
    allreduces.add(job);
  });
  allreduces.flush();
  put_back(apart, group, bench);
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
    job.out = allocate(output, bench, static_cast<size_t>(total) * job.item());
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
  job.out = allocate(output, bench, static_cast<size_t>(total) * job.item());
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
      scale(job.dtype, scaled, infos[i].count(), d.prescale);
      job.in = scaled;
    }
    run(OpKind::kReducescatter, job, bench);
  }
}

}  // namespace

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
      return exchange_allreduce(requests, group, bench);
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
