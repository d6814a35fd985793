// Messages over MPI point-to-point calls on a communicator that is the engine's alone.
#pragma once

#include <memory>
#include <string>

#include "transport/transport.h"

namespace bagua {

// `communicator` points at an MPI_Comm; the caller keeps it alive and frees it.
std::unique_ptr<Transport> connect_mpi(void* communicator);

// The library this was compiled against, "Open MPI 5" say.
std::string mpi_compiled();

}  // namespace bagua
