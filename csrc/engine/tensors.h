// The tensors of an exchange, and the jobs they become: stretches of elements of one type.
#pragma once

#include <functional>
#include <vector>

#include "engine/exchange.h"

namespace bagua {

// One of a request, where it is on this rank.
struct Tensor {
  DType dtype;
  const char* in;
  char* out;
  int64_t count;
  Kept kept;  // of its first value
  size_t nbytes() const { return static_cast<size_t>(count) * dtype_nbytes(dtype); }
};

// Non-empty tensors of all requests, element types together, otherwise in order.
std::vector<Tensor> tensors_by_dtype(const std::vector<RequestPtr>& requests);

// Calls run on jobs of one tensor or several, which are their fragments.
void for_jobs(const std::vector<Tensor>& tensors, Group& group, const Workbench& bench, bool fuse,
              const std::function<void(Job&)>& run);

// Whether memory of the one's tensors is also that of the other's.
bool overlap(const std::vector<RequestPtr>& some, const std::vector<RequestPtr>& others);

// Tensors that share memory, in copies, and where their results go from there.
struct Apart {
  char* to;
  const char* from;
  size_t nbytes;
};
// Tied weights, or a tensor and its view: all are read before any is written, though several travel
// at once. Which tensors make a job does not change, since other ranks may see no overlap.
std::vector<Apart> take_apart(std::vector<Tensor>& tensors, Group& group, const Workbench& bench);
void put_back(const std::vector<Apart>& apart, Group& group, const Workbench& bench);

}  // namespace bagua
