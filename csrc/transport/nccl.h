// Ranks with a GPU each, among which NCCL moves tensors. Everything is given to a stream; the host
// waits only while NCCL prepares, and never for the device.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/types.h"
#include "device/device.h"
#include "device/nccl_library.h"

namespace bagua {

class NcclGroup {
 public:
  using Stream = NcclLibrary::Stream;
  // Returns when what it is given holds; throws when waiting on has become pointless.
  using WaitUntil = std::function<void(const std::function<bool()>&)>;
  using Counts = std::vector<int64_t>;  // of elements, by rank
  struct Piece {
    const void* in;
    void* out;
    int64_t count;
  };
  // How values become one. Sums are multiplied by the factor.
  struct How {
    ReduceOp op;
    double factor;
  };

  // The device is where the communicator is to be.
  NcclGroup(const NcclLibrary& library, Device& device, int size, int me, WaitUntil wait_until);
  // Ends what is still under way, unless it has ended well.
  ~NcclGroup() { abort(); }
  NcclGroup(const NcclGroup&) = delete;
  // Called by all of them with one id; nothing waits.
  void begin(const NcclId& id);
  // Waits until it has begun, or `pointless`: why it has not, or nothing. Then it may only end.
  std::string begun(const std::function<bool()>& pointless);
  void abort() { abort({this}); }
  // Of all groups of a device at once: one after another they may wait for each other for ever.
  // False if some have not ended in seconds; nothing waits for them any longer.
  static bool abort(const std::vector<NcclGroup*>& groups);
  int size() const { return size_; }
  int me() const { return me_; }
  // Whether it comes to an end while the process lasts.
  bool ends() const { return comm_ && !captured_; }
  // Nothing comes any more: waits until NCCL's own threads have sent what they still have to, or
  // `hurries`, and for the device; then lets go of what NCCL keeps for it, for which that may wait
  // for other ranks, unless it is the end. The thread calls NCCL for nothing else meanwhile: before
  // 2.26 NCCL keeps with the thread what is to be done.
  void end(const std::atomic<bool>& hurries, bool is_last);

  // Where everything goes from now on. NCCL ends no communicator while there are graphs that
  // captured its work, and would wait for them.
  void use(Stream stream, bool captured) {
    stream_ = stream;
    captured_ = captured_ || captured;
  }
  // Registers memory from nccl_memory(), which NCCL then reaches without a copy of its own. If one
  // rank gives such memory to an operation, all have to, at the same distance from its beginning.
  void register_memory(const std::shared_ptr<char>& memory, size_t nbytes);
  bool has_registered() const { return !registered_.empty(); }
  // Lets go of what nobody else has any more. What was given must be done.
  void forget_unused();
  // Throws a PeerError if NCCL has noticed that a rank, or the way to it, is gone.
  void check();

  static bool can_move(DType dtype);
  static bool can_reduce(DType dtype, ReduceOp op);
  // Factors are numbers of the values' own type, see split_factor.h.
  void allreduce(const std::vector<Piece>& pieces, DType dtype, How how);
  void broadcast(const std::vector<Piece>& pieces, DType dtype, int root);
  void allgather(const char* in, char* out, const Counts& counts, DType dtype);
  void reducescatter(const char* in, char* out, const Counts& counts, DType dtype, How how);
  void alltoall(const char* in, char* out, const Counts& in_counts, const Counts& out_counts,
                DType dtype);
  // The same values to some ranks, and from each of some to a place for them.
  struct Place {
    int rank;
    char* data;
  };
  void meet(const char* in, const std::vector<int>& give_to, const std::vector<Place>& take_from,
            int64_t count, DType dtype);

 private:
  // What a call says that is made where the device is current.
  NcclResult on_device(const std::function<NcclResult()>& call);
  void expect(NcclResult result, const char* what);
  void finish(NcclResult result, const char* what);
  NcclResult state();
  NcclResult join();
  // Together, all that `give` gives; nothing if it throws.
  void together(const std::function<void()>& give);
  // Of those given together; nothing of nothing.
  void send(int rank, const char* data, int64_t count, DType dtype);
  void receive(int rank, char* data, int64_t count, DType dtype);
  // Calls give(operation) with the operation that reduces like this.
  void reducing(DType dtype, How how, const std::function<void(NcclOp)>& give);

  const NcclLibrary& library_;
  Device& device_;
  const int size_, me_;
  Stream stream_ = nullptr;
  const WaitUntil wait_until_;
  // Where NCCL writes the communicator: a thread of NCCL's does so when it has begun, or failed to,
  // which may be after this object is gone. It has ended when the communicator has been aborted.
  std::shared_ptr<NcclLibrary::Comm> place_;
  NcclLibrary::Comm comm_ = nullptr;
  struct Registered {
    std::shared_ptr<char> memory;
    void* handle = nullptr;
  };
  std::map<char*, Registered> registered_;
  NcclResult begun_ = NcclResult::kSuccess;
  bool captured_ = false;
};

// Memory of the device that NCCL can register; null where this version cannot.
std::shared_ptr<char> nccl_memory(const NcclLibrary& library, Device& device, size_t nbytes);

}  // namespace bagua
