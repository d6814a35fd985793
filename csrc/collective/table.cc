#include <algorithm>
#include <cstring>

#include "collective/coded.h"
#include "common/errors.h"

namespace bagua {
namespace {

// What was fastest between nodes of one rank each on links of 1 Gbit/s, by `python -m
// benchmarks.network --ranks 1 --hosts 2`, 4, 8 and 16: from so many ranks and bytes on, up to the
// next line. Where rows differ by less than 5 %, of the better of two runs, it is the one that also
// carries 16-bit floats. Of more than kAheadNbytes that has more under way than has a place to go
// to. What may come in other company next time is summed in the order of ranks, whatever that
// costs: its bits must not depend on the company.
struct Fastest {
  int ranks;
  int64_t nbytes;
  const char* name;
};
constexpr Fastest kFastest[] = {
    {0, 0, "gather_reduce"},  {0, 4 << 10, "scatter_reduce"},   {3, kAheadNbytes + 1, "ring"},
    {16, 0, "gather_reduce"}, {16, 32 << 10, "scatter_reduce"}, {16, kLoneNbytes, "halving"},
    {16, 8 << 20, "ring"},
};

bool is_fastest(const char* name, const Job& job) {
  const Fastest* best = kFastest;
  auto nbytes = static_cast<int64_t>(job.nbytes());
  if (job.in_company) nbytes = std::min(nbytes, kLoneNbytes - 1);
  for (const Fastest& line : kFastest)
    if (line.ranks <= job.group.size() && line.nbytes <= nbytes) best = &line;
  return std::strcmp(best->name, name) == 0;
}

bool always(const Job&) { return true; }
bool is_adasum(const Job& job) { return job.op == ReduceOp::kAdasum; }
// Through a codec or not.
bool adds(const Job& job) { return !is_adasum(job); }
bool is_plain(const Job& job) { return !job.coding && job.peers.all(); }
bool is_elementwise(const Job& job) { return adds(job) && is_plain(job); }
bool on_one_node(const Job& job) { return job.group.node() != nullptr; }
bool exact_here(const Job& job) {
  return adds(job) && on_one_node(job) && (is_plain(job) || job.exact_in_nodes);
}
// A ring rounds to the element type at every hop. 16-bit sums must not, and integers only where
// nothing is divided or scaled at the end: a sum that wraps around comes out the same.
bool ring_can(const Job& job) {
  const bool whole = !is_float(job.dtype) && !is_complex(job.dtype);
  const bool half = job.dtype == DType::kF16 || job.dtype == DType::kBF16;
  return is_elementwise(job) && job.group.size() > 1 && (!half || picks(job.op)) &&
         (!whole || job.finish.identity());
}
bool ring_fits(const Job& job) { return ring_can(job) && is_fastest("ring", job); }
bool halving_fits(const Job& job) { return ring_can(job) && is_fastest("halving", job); }
bool hierarchical_can(const Job& job) {
  const bool whole = !is_float(job.dtype) && !is_complex(job.dtype);
  return adds(job) && job.group.size() > 1 && (!whole || job.finish.identity()) &&
         (is_plain(job) || job.exact_in_nodes);
}
bool hierarchical_fits(const Job& job) {
  return hierarchical_can(job) && job.group.on_shared_nodes();
}
bool compressed_can(const Job& job) {
  return job.coding && job.peers.all() && job.group.size() > 1 && is_linear(job.op) &&
         float_like(job.dtype);
}
bool sparse_can(const Job& job) { return compressed_can(job) && job.coding->codec->sparse; }
bool neighbors_can(const Job& job) {
  return !job.coding && !job.peers.all() && job.op == ReduceOp::kAverage && is_float(job.dtype);
}
bool mirrored_can(const Job& job) {
  return job.coding && job.peers.kind == Peers::kRing && job.op == ReduceOp::kAverage &&
         job.dtype == DType::kF32 && job.group.size() > 1;
}
bool gather_fits(const Job& job) { return is_elementwise(job) && is_fastest("gather_reduce", job); }

template <std::unique_ptr<UnderWay> (*begin)(const Jobs&)>
void one(Job& job) {
  begin({&job})->finish();
}

}  // namespace

const std::vector<Collective>& collectives() {
  static const std::vector<Collective> table = {
      {"adasum", OpKind::kAllreduce, is_adasum, is_adasum, adasum},
      {"shared", OpKind::kAllreduce, exact_here, exact_here, shared, false, true},
      {"hierarchical", OpKind::kAllreduce, hierarchical_fits, hierarchical_can, hierarchical},
      {"sparse", OpKind::kAllreduce, sparse_can, sparse_can, one<sparse>, true, false, sparse},
      {"compressed", OpKind::kAllreduce, compressed_can, compressed_can, one<compressed>, true,
       false, compressed},
      {"neighbors", OpKind::kAllreduce, neighbors_can, neighbors_can, neighbors, true},
      {"mirrored", OpKind::kAllreduce, mirrored_can, mirrored_can, one<mirrored>, true, false,
       mirrored},
      {"gather_reduce", OpKind::kAllreduce, gather_fits, is_elementwise, gather_reduce},
      {"ring", OpKind::kAllreduce, ring_fits, ring_can, ring, true},
      {"halving", OpKind::kAllreduce, halving_fits, ring_can, halving, true},
      {"scatter_reduce", OpKind::kAllreduce, is_elementwise, is_elementwise, one<scatter_reduce>,
       true, false, scatter_reduce},
      {"shared_broadcast", OpKind::kBroadcast, on_one_node, on_one_node, shared_broadcast},
      {"broadcast", OpKind::kBroadcast, always, always, broadcast},
      {"shared_allgather", OpKind::kAllgather, on_one_node, on_one_node, shared_allgather},
      {"allgather", OpKind::kAllgather, always, always, allgather},
      {"shared_alltoall", OpKind::kAlltoall, on_one_node, on_one_node, shared_alltoall},
      {"alltoall", OpKind::kAlltoall, always, always, alltoall},
      {"shared_reducescatter", OpKind::kReducescatter, on_one_node, on_one_node,
       shared_reducescatter},
      {"reducescatter", OpKind::kReducescatter, always, always, reducescatter},
  };
  return table;
}

Choice::Choice(const std::string& wanted) : for_all(wanted.substr(0, wanted.find('+'))) {
  if (for_all.size() < wanted.size()) between_nodes = wanted.substr(for_all.size() + 1);
}

const Collective& choose_collective(OpKind kind, const Job& job, std::string_view wanted) {
  const Collective* first = nullptr;
  for (const Collective& row : collectives()) {
    if (row.kind != kind) continue;
    if (wanted == row.name && row.can(job)) return row;
    if (!first && row.fits(job)) first = &row;
  }
  if (!first) throw InternalError(std::string("no collective for ") + kind_name(kind));
  return *first;
}

}  // namespace bagua
