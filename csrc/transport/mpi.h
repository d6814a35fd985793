// Messages over MPI point-to-point calls on a communicator that is the engine's alone.
#pragma once

#include <memory>
#include <string>

#include "transport/transport.h"

namespace bagua {

// `communicator` points at an MPI_Comm; the caller keeps it alive and frees it.
// With shared memory between the ranks of a machine where they can see it; else `why_not` says why.
std::unique_ptr<Transport> connect_mpi(void* communicator, bool shared_memory, double timeout_s,
                                       std::string& why_not);

// The library this was compiled against, "Open MPI 5" say.
std::string mpi_compiled();

}  // namespace bagua
