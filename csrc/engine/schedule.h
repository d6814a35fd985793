// The order of exchanges and what is fused: a pure function of what was agreed, so every rank
// computes the same.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/request.h"

namespace bagua {

// One agreed request as the scheduler sees it.
struct Candidate {
  const Description* description;
  int64_t nbytes;
};

// Indices of candidates, in groups that are exchanged one after the other. Higher priority goes
// first, then the agreed order. Allreduces with equal op and scales share a group up to
// fusion_nbytes, those of the host's tensors through one codec up to kAheadNbytes.
std::vector<std::vector<int>> schedule(const std::vector<Candidate>& candidates,
                                       int64_t fusion_nbytes);

}  // namespace bagua
