#include "transport/mpi.h"

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <numeric>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "common/errors.h"
#include "common/memory.h"
#include "transport/node.h"

namespace bagua {
namespace {

constexpr int kTag = 0x6267;  // of the first track
// MPI counts are ints, so a message above this travels as several; pairs stay in order.
constexpr size_t kMaxMessage = size_t{1} << 30;
constexpr const char* kLate = "not all ranks got as far as shared memory in time (start_timeout_s)";

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw PeerError(std::string(call) + ": " + std::string(text, length));
}

// What every rank of a communicator gives, in their order, if all give something in time.
class RollCall {
 public:
  RollCall(MPI_Comm comm, double deadline_s) : comm_(comm), deadline_s_(deadline_s) {
    int size = 0;
    check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
    counts_.resize(static_cast<size_t>(size));
  }
  RollCall(const RollCall&) = delete;
  // Of whoever gives up MPI may still write to it.
  static std::vector<std::string> of(MPI_Comm comm, const std::string& mine, double deadline_s) {
    const auto call = std::make_shared<RollCall>(comm, deadline_s);
    try {
      return call->exchange(mine);
    } catch (...) {
      keep_for_ever(call);
      throw;
    }
  }

 private:
  std::vector<std::string> exchange(const std::string& mine) {
    mine_ = mine;
    nbytes_ = static_cast<int>(mine_.size());
    MPI_Request request;
    check(MPI_Iallgather(&nbytes_, 1, MPI_INT, counts_.data(), 1, MPI_INT, comm_, &request),
          "MPI_Iallgather");
    complete(request);
    begins_.resize(counts_.size());
    std::partial_sum(counts_.begin(), counts_.end() - 1, begins_.begin() + 1);
    all_.resize(static_cast<size_t>(begins_.back() + counts_.back()));
    check(MPI_Iallgatherv(mine_.data(), nbytes_, MPI_BYTE, all_.data(), counts_.data(),
                          begins_.data(), MPI_BYTE, comm_, &request),
          "MPI_Iallgatherv");
    complete(request);
    std::vector<std::string> parts;
    for (size_t i = 0; i < counts_.size(); ++i)
      parts.push_back(
          all_.substr(static_cast<size_t>(begins_[i]), static_cast<size_t>(counts_[i])));
    return parts;
  }

  void complete(MPI_Request request) const {
    for (int flag = 0;;) {
      check(MPI_Test(&request, &flag, MPI_STATUS_IGNORE), "MPI_Test");
      if (flag) return;
      if (now_s() > deadline_s_) throw PeerError(kLate);
      std::this_thread::yield();
    }
  }

  const MPI_Comm comm_;
  const double deadline_s_;
  std::string mine_, all_;
  int nbytes_ = 0;
  std::vector<int> counts_, begins_;
};

// A communicator of the ranks on this machine, while it is needed. MPI makes none without waiting,
// so a thread does, which is left alone with it when the time is up.
class Local {
 public:
  Local(MPI_Comm comm, int rank, double deadline_s) {
    auto result = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
    std::packaged_task<int()> split([=] {
      return MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, result.get());
    });
    auto code = split.get_future();
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_SERIALIZED) {
      split();  // only this thread may
    } else {
      std::thread(std::move(split)).detach();
    }
    const std::chrono::duration<double> left(deadline_s - now_s());
    if (code.wait_for(left) != std::future_status::ready) throw PeerError(kLate);
    check(code.get(), "MPI_Comm_split_type");
    comm_ = *result;
    MPI_Comm_size(comm_, &size_);
  }
  ~Local() {
    if (std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);  // else somebody is missing
  }
  Local(const Local&) = delete;
  int size() const { return size_; }
  MPI_Comm comm() const { return comm_; }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  int size_ = 0;
};

std::unique_ptr<Node> meet(MPI_Comm comm, int rank, double deadline_s, std::string& why_not) {
  const Local local(comm, rank, deadline_s);
  if (local.size() == 1) return nullptr;
  const auto exchange = [&](const std::string& mine) {
    return RollCall::of(local.comm(), mine, deadline_s);
  };
  std::vector<int> ranks;
  for (const std::string& text : exchange(std::to_string(rank))) ranks.push_back(std::stoi(text));
  return Node::meet(ranks, rank, exchange, why_not);
}

class MpiTransport : public Transport {
 public:
  MpiTransport(MPI_Comm comm, bool shared_memory, double timeout_s, std::string& why_not)
      : comm_(comm) {
    check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
    // Errors come back as codes and become exceptions instead of ending the process.
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    if (!shared_memory) return;
    const double deadline_s = now_s() + timeout_s;
    node_ = meet(comm_, rank_, deadline_s, why_not);
    // A node goes by the first of its ranks.
    const int mine = node_ ? node_->first_rank() : rank_;
    for (const std::string& text : RollCall::of(comm_, std::to_string(mine), deadline_s))
      node_numbers_.push_back(std::stoi(text));
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Node* node() override { return node_.get(); }
  int node_of(int rank) const override {
    return node_numbers_.empty() ? rank : node_numbers_[static_cast<size_t>(rank)];
  }

  Ticket send(int peer, int track, const void* data, size_t nbytes) override {
    return start(peer, nbytes, [&](size_t at, int n, MPI_Request* request) {
      const char* from = static_cast<const char*>(data) + at;
      check(MPI_Isend(from, n, MPI_BYTE, peer, kTag + track, comm_, request), "MPI_Isend");
    });
  }

  Ticket recv(int peer, int track, void* data, size_t nbytes) override {
    return start(peer, nbytes, [&](size_t at, int n, MPI_Request* request) {
      char* to = static_cast<char*>(data) + at;
      check(MPI_Irecv(to, n, MPI_BYTE, peer, kTag + track, comm_, request), "MPI_Irecv");
    });
  }

  bool done(Ticket ticket) override {
    auto& requests = slots_[ticket].requests;
    int flag = 0;
    check(
        MPI_Testall(static_cast<int>(requests.size()), requests.data(), &flag, MPI_STATUSES_IGNORE),
        "MPI_Testall");
    if (!flag) return false;
    requests.clear();
    free_.push_back(ticket);
    return true;
  }

  int peer_of(Ticket ticket) const override { return slots_[ticket].peer; }

  void progress() override {
    int flag = 0;
    check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &flag, MPI_STATUS_IGNORE), "MPI_Iprobe");
  }

  // Requests to a dead peer may never complete and cannot be freed safely: they are let go.
  bool abort() override {
    const bool idle = free_.size() == slots_.size();
    slots_.clear();
    free_.clear();
    if (node_) node_->abandon();
    return idle && !node_;  // others may still be writing into our arenas
  }

 private:
  struct Slot {
    int peer = -1;
    std::vector<MPI_Request> requests;  // more than one only above kMaxMessage
  };

  template <class Start>
  Ticket start(int peer, size_t nbytes, Start&& start_piece) {
    if (free_.empty()) {
      free_.push_back(static_cast<Ticket>(slots_.size()));
      slots_.emplace_back();
    }
    const Ticket ticket = free_.back();
    free_.pop_back();
    slots_[ticket].peer = peer;
    size_t at = 0;
    do {
      const size_t n = std::min(nbytes - at, kMaxMessage);
      MPI_Request request;
      start_piece(at, static_cast<int>(n), &request);
      slots_[ticket].requests.push_back(request);
      at += n;
    } while (at < nbytes);
    return ticket;
  }

  MPI_Comm comm_;
  int rank_ = 0;
  int size_ = 0;
  std::unique_ptr<Node> node_;
  std::vector<int> node_numbers_;  // by rank
  std::vector<Slot> slots_;        // by ticket
  std::vector<Ticket> free_;
};

}  // namespace

std::unique_ptr<Transport> connect_mpi(void* communicator, bool shared_memory, double timeout_s,
                                       std::string& why_not) {
  return std::make_unique<MpiTransport>(*static_cast<MPI_Comm*>(communicator), shared_memory,
                                        timeout_s, why_not);
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
