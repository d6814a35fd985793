// NCCL's functions, found when they are first needed: nothing is linked, and a machine may have any
// version from 2.18 on, or none. Types are those of NCCL's interface,
// https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html (make test-nccl-releases).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bagua {

enum class NcclResult : int {
  kSuccess = 0,
  kSystemError = 2,
  kInternalError = 3,
  kRemoteError = 6,
  kInProgress = 7,
};
enum class NcclType : int {
  kI8 = 0,
  kU8 = 1,
  kI32 = 2,
  kI64 = 4,
  kF16 = 6,
  kF32 = 7,
  kF64 = 8,
  kBF16 = 9,
};
enum class NcclOp : int { kSum = 0, kProduct = 1, kMax = 2, kMin = 3, kAverage = 4 };
constexpr int kNcclOnHost = 1;  // where a scalar is, which is read at once

struct NcclId {
  char bytes[128];
};

// As of 2.18; later versions fill in what they added.
struct NcclConfig {
  static constexpr int kUnset = INT32_MIN;
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeefu;
  unsigned version = 21800;
  int blocking = 0;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;
};

struct NcclLibrary {
  using Comm = struct NcclCommunicator*;
  using Stream = void*;

  int version = 0;  // 22304 is 2.23.4
  const char* (*error_string)(NcclResult) = nullptr;
  NcclResult (*get_version)(int*) = nullptr;
  NcclResult (*get_unique_id)(NcclId*) = nullptr;
  NcclResult (*init_rank_config)(Comm*, int nranks, NcclId, int rank, NcclConfig*) = nullptr;
  NcclResult (*get_async_error)(Comm, NcclResult*) = nullptr;
  NcclResult (*comm_count)(Comm, int*) = nullptr;
  NcclResult (*abort)(Comm) = nullptr;
  NcclResult (*finalize)(Comm) = nullptr;
  NcclResult (*destroy)(Comm) = nullptr;
  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_end)() = nullptr;
  NcclResult (*all_reduce)(const void* in, void* out, size_t count, NcclType, NcclOp, Comm,
                           Stream) = nullptr;
  NcclResult (*broadcast)(const void* in, void* out, size_t count, NcclType, int root, Comm,
                          Stream) = nullptr;
  NcclResult (*all_gather)(const void* in, void* out, size_t count, NcclType, Comm,
                           Stream) = nullptr;
  NcclResult (*reduce)(const void* in, void* out, size_t count, NcclType, NcclOp, int root, Comm,
                       Stream) = nullptr;
  NcclResult (*reduce_scatter)(const void* in, void* out, size_t count, NcclType, NcclOp, Comm,
                               Stream) = nullptr;
  NcclResult (*send)(const void* in, size_t count, NcclType, int to, Comm, Stream) = nullptr;
  NcclResult (*recv)(void* out, size_t count, NcclType, int from, Comm, Stream) = nullptr;
  NcclResult (*create_scaled_sum)(NcclOp*, void* scalar, NcclType, int residence, Comm) = nullptr;
  NcclResult (*destroy_op)(NcclOp, Comm) = nullptr;

  // Since 2.19, else null: memory that NCCL reaches without a copy of its own, once a communicator
  // knows it.
  NcclResult (*mem_alloc)(void** memory, size_t nbytes) = nullptr;
  NcclResult (*mem_free)(void* memory) = nullptr;
  NcclResult (*comm_register)(Comm, void* memory, size_t nbytes, void** handle) = nullptr;
  NcclResult (*comm_deregister)(Comm, void* handle) = nullptr;
  bool registers() const { return mem_alloc && mem_free && comm_register && comm_deregister; }
};

// The library that the process has loaded already, as torch does; else the one at `path`, unless it
// is empty; else the system's. Null, and why, if there is none that will do. The first call counts.
const NcclLibrary* find_nccl(const std::string& path, std::string& why_not);
// Where it would be found, as far as can be told without loading it: others may load theirs first.
std::string nccl_in_sight(const std::string& path);
// As 2.23.4.
std::string version_text(const NcclLibrary& library);

}  // namespace bagua
