#include "engine/allreduce.h"

#include <utility>

#include "common/memory.h"
#include "engine/jobs.h"

namespace bagua {
namespace {

// Scales everything, in the place where the results go.
void scale_all(Job& job, double factor) {
  if (factor != 1) job.group.touch(2 * job.nbytes());
  if (job.data) return scale(job.dtype, job.data, job.count, factor);
  for (Fragment& f : job.fragments) {
    copy(job.group, f.out, f.in, static_cast<size_t>(f.count) * job.item());
    scale(job.dtype, f.out, f.count, factor);
    f.in = f.out;
  }
}

}  // namespace

Finish finish_of(const Description& d, int nranks) {
  Finish finish;
  finish.divisor = d.op == ReduceOp::kAverage ? nranks : 1;
  finish.factor = (is_linear(d.op) ? d.prescale : 1) * d.postscale;
  return finish;
}

Allreduce::Allreduce(const std::vector<RequestPtr>& requests, Group& group, const Workbench& bench)
    : group_(group),
      bench_(bench),
      d_(requests[0]->description),
      tensors_(tensors_by_dtype(requests)),
      apart_(take_apart(tensors_, group, bench)) {
  const bool fuse = d_.op != ReduceOp::kAdasum && d_.codec.empty() && d_.peers.empty();
  if (!d_.codec.empty()) coding_ = parse_coding(d_.codec);
  Peers peers = parse_peers(d_.peers);
  peers.round += requests[0]->round;
  size_t laid = 0;  // tensors that are jobs of their own
  for_jobs(tensors_, group, bench, fuse, [&](Job& job) {
    job.op = d_.op;
    job.finish = finish_of(d_, group.size());
    job.coding = coding_.codec ? &coding_ : nullptr;
    job.peers = peers;
    job.exact_in_nodes = d_.exact_in_nodes;
    const bool alone = group.size() == 1 || bench.nccl;
    const Collective* row = alone ? nullptr : &choose(OpKind::kAllreduce, job, bench);
    if (row) place_single(job, *row);
    // Not of several tensors: results come to them at the end.
    if (job.data && ++laid == tensors_.size() && apart_.empty())
      job.values_final = bench.values_final;
    job.leaves = job.data && job.dtype == DType::kF32 && !bench.staging;
    add(jobs_.emplace_back(std::move(job)), row);
  });
}

void Allreduce::add(Job& job, const Collective* row) {
  // What comes from a device should not wait for the small ones that come last. As all ranks do,
  // whether or not their own tensors are on one.
  const bool begins = row && row->begin && (job.data || !d_.on_device);
  if (batches_.empty() || !begins || !has_room(batches_.back(), *row, job))
    batches_.push_back({row, begins, {}});
  batches_.back().jobs.push_back(&job);
  batches_.back().nbytes += job.nbytes();
}

// What tells neighbors waits for none of them.
bool Allreduce::has_room(const Batch& batch, const Collective& row, const Job& job) {
  return batch.begins && batch.row == &row &&
         (!job.peers.all() || batch.nbytes + job.nbytes() <= kAheadNbytes);
}

void Allreduce::begin() {
  if (!batches_.empty() && batches_[0].begins && !bench_.staging) under_way_ = begin(batches_[0]);
}

void Allreduce::run() {
  for (Batch& batch : batches_) {
    if (!batch.begins) {
      run_alone(batch.row, *batch.jobs[0]);
      continue;
    }
    if (!under_way_) under_way_ = begin(batch);
    std::exchange(under_way_, nullptr)->finish();
    for (Job* job : batch.jobs) scatter(*job);
  }
  put_back(apart_, group_, bench_);
}

void Allreduce::run_alone(const Collective* row, Job& job) {
  if (bench_.nccl) return bench_.nccl->run(OpKind::kAllreduce, job);
  prescale(job);
  if (!row) return scale_all(job, job.finish.factor);
  carry_out(*row, job, bench_, bench_.staging);
}

std::unique_ptr<UnderWay> Allreduce::begin(Batch& batch) {
  size_t scattered = 0;
  for (const Job* job : batch.jobs) scattered += job->data ? 0 : whole_lines(job->nbytes());
  char* place = bench_.scratch.get(Scratch::kFusion, scattered);
  for (Job* job : batch.jobs) {
    prescale(*job);
    if (bench_.staging) connect(*job, *batch.row, *bench_.staging);
    if (job->data) continue;
    gather(*job, place);
    place += whole_lines(job->nbytes());
  }
  return batch.row->begin(batch.jobs);
}

void Allreduce::prescale(Job& job) {
  const bool early = !is_linear(d_.op);
  if (bench_.staging && (early || group_.size() == 1)) bench_.staging->need();
  if (early && d_.prescale != 1) scale_all(job, d_.prescale);
}

}  // namespace bagua
