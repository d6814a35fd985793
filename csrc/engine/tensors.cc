#include "engine/tensors.h"

#include <algorithm>
#include <utility>

#include "common/memory.h"

namespace bagua {
namespace {

bool lone(const Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()) >= kLoneNbytes; }

// Which tensors have memory that another one's result overwrites, or the other way round.
std::vector<bool> overlapping(const std::vector<Tensor>& tensors) {
  struct Range {
    const char* begin;
    const char* end;
    size_t tensor;
    bool written;
  };
  std::vector<Range> ranges;
  ranges.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    ranges.push_back({tensors[i].out, tensors[i].out + tensors[i].nbytes(), i, true});
    if (tensors[i].in != tensors[i].out)
      ranges.push_back({tensors[i].in, tensors[i].in + tensors[i].nbytes(), i, false});
  }
  const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  if (!std::is_sorted(ranges.begin(), ranges.end(), before))
    std::sort(ranges.begin(), ranges.end(), before);
  std::vector<bool> found(tensors.size());
  const Range *furthest = nullptr, *written = nullptr;  // of those before: all, or results
  for (const Range& range : ranges) {
    const Range* other = range.written ? furthest : written;
    if (other && range.begin < other->end && range.tensor != other->tensor)
      found[range.tensor] = found[other->tensor] = true;
    if (!furthest || range.end > furthest->end) furthest = &range;
    if (range.written && (!written || range.end > written->end)) written = &range;
  }
  return found;
}

void copy_over(char* to, const char* from, size_t nbytes, Group& group, const Workbench& bench) {
  if (bench.nccl) {
    bench.nccl->copy(to, from, nbytes);
  } else {
    copy(group, to, from, nbytes);
  }
}

}  // namespace

std::vector<Tensor> tensors_by_dtype(const std::vector<RequestPtr>& requests) {
  std::vector<Tensor> tensors;
  for (const RequestPtr& request : requests) {
    const Part* part = request->parts.data();
    Kept kept = request->kept;
    for_each_tensor(request->description, [&](DType dtype, const int64_t* dims, size_t ndim) {
      const int64_t count = count_of(dims, ndim);
      if (count > 0) tensors.push_back({dtype, part->in, part->out, count, kept});
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

void for_jobs(const std::vector<Tensor>& tensors, Group& group, const Workbench& bench, bool fuse,
              const std::function<void(Job&)>& run) {
  for (size_t begin = 0; begin < tensors.size();) {
    Job job{group, bench.scratch, tensors[begin].dtype};
    job.kept = tensors[begin].kept;
    size_t end = begin;
    do {
      const Tensor& t = tensors[end++];
      job.fragments.push_back({job.count, t.count, t.in, t.out});
      job.count += t.count;
    } while (fuse && end < tensors.size() && tensors[end].dtype == job.dtype &&
             !lone(tensors[begin]) && !lone(tensors[end]) &&
             job.nbytes() + tensors[end].nbytes() <= static_cast<size_t>(bench.fusion_nbytes));
    job.in_company = end > begin + 1;
    run(job);
    begin = end;
  }
}

bool overlap(const std::vector<RequestPtr>& some, const std::vector<RequestPtr>& others) {
  using Range = std::pair<const char*, const char*>;
  const auto ranges_of = [](const std::vector<RequestPtr>& requests) {
    std::vector<Range> ranges;
    for (const Tensor& t : tensors_by_dtype(requests)) {
      ranges.emplace_back(t.out, t.out + t.nbytes());
      if (t.in != t.out) ranges.emplace_back(t.in, t.in + t.nbytes());
    }
    std::sort(ranges.begin(), ranges.end());
    return ranges;
  };
  const std::vector<Range> ours = ranges_of(some), theirs = ranges_of(others);
  for (auto a = ours.begin(), b = theirs.begin(); a != ours.end() && b != theirs.end();) {
    if (a->first < b->second && b->first < a->second) return true;
    a->second < b->second ? ++a : ++b;
  }
  return false;
}

std::vector<Apart> take_apart(std::vector<Tensor>& tensors, Group& group, const Workbench& bench) {
  if (tensors.size() < 2) return {};
  const std::vector<bool> shared = overlapping(tensors);
  size_t total = 0;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (shared[i]) total += whole_lines(tensors[i].nbytes());
  if (total == 0) return {};
  if (bench.staging) bench.staging->need();
  char* memory = bench.nccl ? bench.nccl->borrow(total) : bench.scratch.get(Scratch::kApart, total);
  std::vector<Apart> apart;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!shared[i]) continue;
    Tensor& t = tensors[i];
    copy_over(memory, t.in, t.nbytes(), group, bench);
    apart.push_back({t.out, memory, t.nbytes()});
    t.in = t.out = memory;
    memory += whole_lines(t.nbytes());
  }
  return apart;
}

void put_back(const std::vector<Apart>& apart, Group& group, const Workbench& bench) {
  for (const Apart& a : apart) copy_over(a.to, a.from, a.nbytes, group, bench);
}

}  // namespace bagua
