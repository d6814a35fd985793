#include "transport/mpi.h"

#include <mpi.h>

#include <algorithm>
#include <vector>

#include "common/errors.h"

namespace bagua {
namespace {

constexpr int kTag = 0x6267;
// MPI counts are ints, so a message above this travels as several; pairs stay in order.
constexpr size_t kMaxMessage = size_t{1} << 30;

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw PeerError(std::string(call) + ": " + std::string(text, length));
}

class MpiTransport : public Transport {
 public:
  explicit MpiTransport(MPI_Comm comm) : comm_(comm) {
    check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
    // Errors come back as codes and become exceptions instead of ending the process.
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Ticket send(int peer, const void* data, size_t nbytes) override {
    return start(nbytes, [&](size_t at, int n, MPI_Request* request) {
      const char* from = static_cast<const char*>(data) + at;
      check(MPI_Isend(from, n, MPI_BYTE, peer, kTag, comm_, request), "MPI_Isend");
    });
  }

  Ticket recv(int peer, void* data, size_t nbytes) override {
    return start(nbytes, [&](size_t at, int n, MPI_Request* request) {
      char* to = static_cast<char*>(data) + at;
      check(MPI_Irecv(to, n, MPI_BYTE, peer, kTag, comm_, request), "MPI_Irecv");
    });
  }

  bool done(Ticket ticket) override {
    auto& requests = slots_[ticket];
    int flag = 0;
    check(
        MPI_Testall(static_cast<int>(requests.size()), requests.data(), &flag, MPI_STATUSES_IGNORE),
        "MPI_Testall");
    if (!flag) return false;
    requests.clear();
    free_.push_back(ticket);
    return true;
  }

  // Requests to a dead peer may never complete and cannot be freed safely: they are let go.
  void progress() override {
    int flag = 0;
    check(MPI_Iprobe(MPI_ANY_SOURCE, kTag, comm_, &flag, MPI_STATUS_IGNORE), "MPI_Iprobe");
  }

  bool abort() override {
    const bool idle = free_.size() == slots_.size();
    slots_.clear();
    free_.clear();
    return idle;
  }

 private:
  template <class Start>
  Ticket start(size_t nbytes, Start&& start_piece) {
    if (free_.empty()) {
      free_.push_back(static_cast<Ticket>(slots_.size()));
      slots_.emplace_back();
    }
    const Ticket ticket = free_.back();
    free_.pop_back();
    size_t at = 0;
    do {
      const size_t n = std::min(nbytes - at, kMaxMessage);
      MPI_Request request;
      start_piece(at, static_cast<int>(n), &request);
      slots_[ticket].push_back(request);
      at += n;
    } while (at < nbytes);
    return ticket;
  }

  MPI_Comm comm_;
  int rank_ = 0;
  int size_ = 0;
  std::vector<std::vector<MPI_Request>> slots_;  // by ticket; more than one only above kMaxMessage
  std::vector<Ticket> free_;
};

}  // namespace

std::unique_ptr<Transport> connect_mpi(void* communicator) {
  return std::make_unique<MpiTransport>(*static_cast<MPI_Comm*>(communicator));
}

std::string mpi_compiled() {
#if defined(OMPI_MAJOR_VERSION)
  return "Open MPI " + std::to_string(OMPI_MAJOR_VERSION);
#elif defined(I_MPI_VERSION)
  return "Intel MPI " I_MPI_VERSION;
#elif defined(MPICH_VERSION)
  return "MPICH " MPICH_VERSION;
#else
  return "MPI " + std::to_string(MPI_VERSION) + "." + std::to_string(MPI_SUBVERSION);
#endif
}

}  // namespace bagua
