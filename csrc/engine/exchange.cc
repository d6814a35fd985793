#include "engine/exchange.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "common/memory.h"

namespace bagua {
namespace {

struct Tensor {
  DType dtype;
  const char* in;
  char* out;
  int64_t count;
  const std::vector<Fragment>* fragments;  // null if it is in one place
  Kept kept;                               // of its first value
  size_t nbytes() const { return static_cast<size_t>(count) * dtype_nbytes(dtype); }
};

bool lone(const Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()) >= kLoneNbytes; }

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

void run_on_host(OpKind kind, Job& job, const Workbench& bench, Staging* staging) {
  const bool named = kind == OpKind::kAllreduce;
  const Collective& row =
      choose_collective(kind, job, named ? std::string_view(bench.allreduce.for_all) : "auto");
  bench.chosen(row, job);
  job.between_nodes = bench.allreduce.between_nodes;
  job.chosen = bench.chosen;
  job.crew = bench.crew;
  if (staging) connect(job, row, *staging);
  if (job.fragments.empty() || row.scattered) return row.run(job);
  const auto item = static_cast<int64_t>(job.item());
  job.data = bench.scratch.get(Scratch::kFusion, job.nbytes());
  int64_t end = 0;
  for (const Fragment& f : job.fragments) {
    std::memset(job.data + end * item, 0, static_cast<size_t>((f.begin - end) * item));
    copy(job.group, job.data + f.begin * item, f.in, static_cast<size_t>(f.count * item));
    end = f.begin + f.count;
  }
  std::memset(job.data + end * item, 0, static_cast<size_t>((job.count - end) * item));
  const std::vector<Fragment> fragments = std::move(job.fragments);
  job.fragments.clear();
  row.run(job);
  for (const Fragment& f : fragments)
    copy(job.group, f.out, job.data + f.begin * item, static_cast<size_t>(f.count * item));
}

void run(OpKind kind, Job& job, const Workbench& bench) {
  if (bench.nccl) return bench.nccl->run(kind, job);
  run_on_host(kind, job, bench, bench.staging);
}

// Non-empty tensors of all requests, element types together, otherwise in order.
std::vector<Tensor> tensors_by_dtype(const std::vector<RequestPtr>& requests) {
  std::vector<Tensor> tensors;
  for (const RequestPtr& request : requests) {
    const Part* part = request->parts.data();
    const auto* fragments = request->fragments.empty() ? nullptr : &request->fragments;
    Kept kept = request->kept;
    for_each_tensor(request->description, [&](DType dtype, const int64_t* dims, size_t ndim) {
      const int64_t count = count_of(dims, ndim);
      if (count > 0) tensors.push_back({dtype, part->in, part->out, count, fragments, kept});
      fragments = nullptr;
      for (float*& values : kept)
        if (values) values += count;
      ++part;
    });
  }
  const auto by_dtype = [](const Tensor& a, const Tensor& b) { return a.dtype < b.dtype; };
  if (!std::is_sorted(tensors.begin(), tensors.end(), by_dtype))
    std::stable_sort(tensors.begin(), tensors.end(), by_dtype);
  return tensors;
}

// Calls run(job) on jobs whose data is one tensor, or fragments that hold several.
void on_stretches(const std::vector<Tensor>& tensors, Group& group, const Workbench& bench,
                  bool fuse, const std::function<void(Job&)>& run) {
  for (size_t begin = 0; begin < tensors.size();) {
    Job job{group, bench.scratch, tensors[begin].dtype};
    job.kept = tensors[begin].kept;
    size_t end = begin;
    do {
      const Tensor& t = tensors[end++];
      if (t.fragments) {
        for (const Fragment& f : *t.fragments)
          job.fragments.push_back({job.count + f.begin, f.count, f.in, f.out});
      } else {
        job.fragments.push_back({job.count, t.count, t.in, t.out});
      }
      job.count += t.count;
    } while (fuse && end < tensors.size() && tensors[end].dtype == job.dtype &&
             !lone(tensors[begin]) && !lone(tensors[end]) &&
             job.nbytes() + tensors[end].nbytes() <= static_cast<size_t>(bench.fusion_nbytes));
    if (end == begin + 1 && !tensors[begin].fragments && !bench.nccl) {
      job.fragments.clear();
      job.data = tensors[begin].out;
      copy(group, job.data, tensors[begin].in, job.nbytes());
    }
    run(job);
    begin = end;
  }
}

// Whether what one tensor's result overwrites is another one's, too.
bool overlap(const std::vector<Tensor>& tensors) {
  struct Range {
    const char* begin;
    const char* end;
    size_t tensor;
  };
  std::vector<Range> ranges;
  ranges.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].fragments) continue;  // a bucket's results go to its arena
    ranges.push_back({tensors[i].out, tensors[i].out + tensors[i].nbytes(), i});
    if (tensors[i].in != tensors[i].out)
      ranges.push_back({tensors[i].in, tensors[i].in + tensors[i].nbytes(), i});
  }
  const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  if (!std::is_sorted(ranges.begin(), ranges.end(), before))
    std::sort(ranges.begin(), ranges.end(), before);
  for (size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].begin < ranges[i - 1].end && ranges[i].tensor != ranges[i - 1].tensor)
      return true;
  return false;
}

// Tensors that share memory, in copies.
struct Apart {
  std::vector<std::vector<char>> on_host;  // what is read
  struct Result {
    char* to;
    const char* from;
    size_t nbytes;
  };
  std::vector<Result> on_device;  // what is written, for NCCL writes several at once
};

// Tied weights, or a tensor and its view: all are read before any is written. Which tensors make a
// stretch does not change, since other ranks may see no overlap.
Apart take_apart(std::vector<Tensor>& tensors, const Workbench& bench) {
  Apart apart;
  if (tensors.size() < 2 || !overlap(tensors)) return apart;
  if (bench.staging) bench.staging->need();
  for (Tensor& t : tensors) {
    if (t.fragments) continue;
    if (bench.nccl) {
      char* copy = bench.nccl->borrow(t.nbytes());
      bench.nccl->copy(copy, t.in, t.nbytes());
      apart.on_device.push_back({t.out, copy, t.nbytes()});
      t.in = t.out = copy;
    } else {
      apart.on_host.emplace_back(t.in, t.in + t.nbytes());
      t.in = apart.on_host.back().data();
    }
  }
  return apart;
}

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
  const Apart apart = take_apart(tensors, bench);
  on_stretches(tensors, group, bench, fuse, [&](Job& job) {
    job.op = d.op;
    job.finish = finish;
    job.coding = coding.codec ? &coding : nullptr;
    job.peers = peers;
    job.exact_in_nodes = d.exact_in_nodes;
    // Not of fragments: results come to them at the end.
    if (job.data && tensors.size() == 1) job.values_final = bench.values_final;
    job.leaves = job.data && job.dtype == DType::kF32 && !bench.staging;
    if (bench.staging && (!is_linear(d.op) || group.size() == 1)) bench.staging->need();
    if (!is_linear(d.op) && d.prescale != 1) scale_all(job, d.prescale);
    if (group.size() == 1 && !bench.nccl) return scale_all(job, finish.factor);
    run(OpKind::kAllreduce, job, bench);
  });
  for (const Apart::Result& r : apart.on_device) bench.nccl->copy(r.to, r.from, r.nbytes);
}

void exchange_broadcast(const std::vector<RequestPtr>& requests, Group& group,
                        const std::vector<int>& ranks, const Workbench& bench) {
  for (const RequestPtr& request : requests) {
    const int root = member_of(ranks, request->description.root);
    auto tensors = tensors_by_dtype({request});
    // Only the root's input matters; the others' must not be copied over their outputs in vain.
    if (group.me() != root)
      for (Tensor& t : tensors) t.in = t.out;
    on_stretches(tensors, group, bench, true, [&](Job& job) {
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
