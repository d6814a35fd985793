// An allreduce of several requests: the jobs that they become, in batches of what travels together.
#pragma once

#include <list>
#include <memory>
#include <vector>

#include "engine/exchange.h"
#include "engine/tensors.h"

namespace bagua {

class Allreduce {
 public:
  // Requests, group and bench must outlive it.
  Allreduce(const std::vector<RequestPtr>& requests, Group& group, const Workbench& bench);
  Allreduce(const Allreduce&) = delete;

  // Lets go what others wait for at first, if that takes no waiting, and nothing of it is to come
  // from a device: so that links are busy while this rank still waits for something else.
  void begin();
  // Once begun: goes on, as far as that takes no waiting either.
  void advance() {
    if (under_way_) under_way_->advance();
  }
  // All of it, or the rest.
  void run();

 private:
  // Jobs that a row begins together, or a single one; on one rank, and by NCCL, without a row.
  struct Batch {
    const Collective* row;
    bool begins;
    Jobs jobs;
    size_t nbytes = 0;
  };

  void add(Job& job, const Collective* row);
  static bool has_room(const Batch& batch, const Collective& row, const Job& job);
  std::unique_ptr<UnderWay> begin(Batch& batch);
  void run_alone(const Collective* row, Job& job);
  void prescale(Job& job);

  Group& group_;
  const Workbench& bench_;
  const Description& d_;
  Coding coding_;
  std::vector<Tensor> tensors_;
  const std::vector<Apart> apart_;
  std::list<Job> jobs_;  // whose callbacks refer to them
  std::vector<Batch> batches_;
  std::unique_ptr<UnderWay> under_way_;  // of the first batch, if it was begun ahead
};

// Sums may be scaled once, at the end and before rounding; other reductions are prescaled first.
Finish finish_of(const Description& d, int nranks);

}  // namespace bagua
