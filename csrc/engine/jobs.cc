#include "engine/jobs.h"

namespace bagua {
namespace {

char* place_of(const Job& job, const Fragment& f) {
  return job.data + f.begin * static_cast<int64_t>(job.item());
}

}  // namespace

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

void place_single(Job& job, const Collective& row) {
  if (job.fragments.size() != 1) return;
  const Fragment only = job.fragments[0];
  if (row.scattered && only.in != only.out) return;
  job.fragments.clear();
  job.data = only.out;
  copy(job.group, job.data, only.in, job.nbytes());
}

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

void gather(Job& job, char* place) {
  job.data = place;
  for (const Fragment& f : job.fragments)
    copy(job.group, place_of(job, f), f.in, static_cast<size_t>(f.count) * job.item());
}

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
  const Collective& row = choose(kind, job, bench);
  place_single(job, row);
  carry_out(row, job, bench, staging);
}

}  // namespace bagua
