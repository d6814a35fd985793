// Carries out one scheduled exchange: brings the tensors of its requests into the shape a
// collective wants, runs it, and brings the results back.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "collective/collective.h"
#include "engine/nccl_exchange.h"
#include "engine/request.h"
#include "engine/staging.h"

namespace bagua {

// What the engine lends to an exchange.
struct Workbench {
  Scratch& scratch;
  const Choice& allreduce;
  int64_t fusion_nbytes;
  Crew* crew;  // null without helpers
  std::function<void(const Collective&, const Job&)>
      chosen;                          // told which row does a job, before it does
  std::function<void()> values_final;  // of all requests, though the exchange goes on
  Staging* staging = nullptr;    // where tensors on a device are brought; null: there are none
  NcclExchange* nccl = nullptr;  // where all tensors are on devices, and stay there
};

// Lets every rank know what the others will send: `in` has one number per rank and tensor for an
// alltoall, one per tensor for an allgather. The memory is the engine's, as that of all messages:
// after a failure one of them may still be under way.
std::vector<int64_t> exchange_counts(OpKind kind, const std::vector<int64_t>& in, int64_t per_rank,
                                     Group& group, const Workbench& bench);

// Whether a rank alone has its result already, where it belongs and from its start on.
bool stays_alone(const Request& request);

// Requests of one kind, alike in everything but their tensors, in agreed order. `ranks` are the
// process set's. Results and outputs are in the requests' memory and handles afterwards.
void run_exchange(const std::vector<RequestPtr>& requests, Group& group,
                  const std::vector<int>& ranks, const Workbench& bench);

}  // namespace bagua
