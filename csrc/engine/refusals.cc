#include "engine/refusals.h"

#include <algorithm>

#include "collective/peers.h"
#include "common/ranks_text.h"

namespace bagua {

std::string refuse(const Request& request) {
  const Description& d = request.description;
  const bool reduces = d.kind == OpKind::kAllreduce || d.kind == OpKind::kReducescatter;
  const bool needs_rows = d.kind == OpKind::kAlltoall || d.kind == OpKind::kReducescatter;
  std::string problem;
  for_each_tensor(d, [&](DType dtype, const int64_t*, size_t ndim) {
    if (needs_rows && ndim == 0)
      problem = std::string(kind_name(d.kind)) + " needs at least one dimension";
    if (!reduces) return;
    if (d.op == ReduceOp::kAdasum && !is_float(dtype))
      problem = std::string("Adasum needs a floating-point tensor, not ") + dtype_name(dtype);
    if (is_complex(dtype) && (d.op == ReduceOp::kMin || d.op == ReduceOp::kMax))
      problem = std::string(op_name(d.op)) + " has no meaning for " + dtype_name(dtype);
    if (!d.codec.empty() && dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16)
      problem = std::string("codecs carry floats of 32 and 16 bits, not ") + dtype_name(dtype);
    if (!d.peers.empty() && !is_float(dtype))
      problem = std::string("peers average floats, not ") + dtype_name(dtype);
    if (dtype == DType::kBool && d.op == ReduceOp::kAverage)
      problem = "average has no meaning for bool; use Sum (any) or Product (all)";
  });
  if (d.kind == OpKind::kReducescatter && d.op == ReduceOp::kAdasum)
    problem = "reducescatter cannot use Adasum";
  const bool adds = d.op == ReduceOp::kSum || d.op == ReduceOp::kAverage;
  if (!d.codec.empty() && !adds) problem = std::string(op_name(d.op)) + " cannot use a codec";
  if (!d.peers.empty() && d.op != ReduceOp::kAverage)
    problem = std::string("peers can be averaged only, not ") + op_name(d.op);
  if (!d.codec.empty() && !d.peers.empty() && parse_peers(d.peers).kind != Peers::kRing)
    problem = "a codec goes with all peers or a ring, not with " + d.peers;
  return problem;
}

std::string refuse_in(const Request& request, const std::vector<int>& ranks, int world_size) {
  const Description& d = request.description;
  const int n = static_cast<int>(ranks.size());
  if (d.kind == OpKind::kBroadcast && std::find(ranks.begin(), ranks.end(), d.root) == ranks.end())
    return "root " + std::to_string(d.root) + " is not in the process set of " + ranks_text(ranks);
  if (d.kind == OpKind::kAddProcessSet) {
    for (size_t i = 0; i < d.layout.size(); ++i) {
      if (d.layout[i] < 0 || d.layout[i] >= world_size)
        return "rank " + std::to_string(d.layout[i]) + " does not exist in a world of " +
               std::to_string(world_size);
      if (i > 0 && d.layout[i] == d.layout[i - 1])
        return "rank " + std::to_string(d.layout[i]) + " is named twice";
    }
    if (d.layout.empty()) return "a process set needs at least one rank";
  }
  if (d.kind == OpKind::kAlltoall) {
    int64_t sum = 0;
    for (const int64_t rows : request.splits) {
      if (rows < 0) return "splits has a negative number";
      if (rows > request.rows[0] - sum)  // which no sum overflows
        return "splits add up to more than the tensor's " + std::to_string(request.rows[0]) +
               " rows";
      sum += rows;
    }
    if (static_cast<int>(request.splits.size()) != n)
      return "splits has " + std::to_string(request.splits.size()) + " numbers for " +
             std::to_string(n) + " ranks";
    if (sum != request.rows[0])
      return "splits add up to " + std::to_string(sum) + " but the tensor has " +
             std::to_string(request.rows[0]) + " rows";
  }
  return "";
}

}  // namespace bagua
