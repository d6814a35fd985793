// Compiled against the header of one of NCCL's releases, of which ours is a part; run with the path
// of its library it tells what it found there. See nccl_releases.py.
#include <nccl.h>

#include <cstddef>
#include <cstdio>
#include <string>
#include <type_traits>

#include "device/nccl_library.h"

namespace bagua {
namespace {

template <class Ours, class Theirs>
constexpr bool same(Ours ours, Theirs theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}
static_assert(same(NcclResult::kSuccess, ncclSuccess));
static_assert(same(NcclResult::kSystemError, ncclSystemError));
static_assert(same(NcclResult::kInternalError, ncclInternalError));
static_assert(same(NcclResult::kRemoteError, ncclRemoteError));
static_assert(same(NcclResult::kInProgress, ncclInProgress));
static_assert(same(NcclType::kI8, ncclInt8));
static_assert(same(NcclType::kU8, ncclUint8));
static_assert(same(NcclType::kI32, ncclInt32));
static_assert(same(NcclType::kI64, ncclInt64));
static_assert(same(NcclType::kF16, ncclFloat16));
static_assert(same(NcclType::kF32, ncclFloat32));
static_assert(same(NcclType::kF64, ncclFloat64));
static_assert(same(NcclType::kBF16, ncclBfloat16));
static_assert(same(NcclOp::kSum, ncclSum));
static_assert(same(NcclOp::kProduct, ncclProd));
static_assert(same(NcclOp::kMax, ncclMax));
static_assert(same(NcclOp::kMin, ncclMin));
static_assert(same(NcclOp::kAverage, ncclAvg));
static_assert(same(kNcclOnHost, ncclScalarHostImmediate));
static_assert(sizeof(NcclId) == sizeof(ncclUniqueId));

// What 2.18 had of it lies where it did.
#define AT(ours, theirs) static_assert(offsetof(NcclConfig, ours) == offsetof(ncclConfig_t, theirs))
AT(size, size);
AT(magic, magic);
AT(version, version);
AT(blocking, blocking);
AT(cga_cluster_size, cgaClusterSize);
AT(min_ctas, minCTAs);
AT(max_ctas, maxCTAs);
AT(net_name, netName);
AT(split_share, splitShare);
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));

template <class Ours, class Theirs>
struct Calls;
template <class R, class... Ours, class S, class... Theirs>
struct Calls<R (*)(Ours...), S (*)(Theirs...)> {
  static_assert(sizeof...(Ours) == sizeof...(Theirs));
  static constexpr bool alike = sizeof(R) == sizeof(S) &&
                                ((sizeof(Ours) == sizeof(Theirs)) && ...) &&
                                ((std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>) && ...);
};
#define CALLS(ours, theirs) \
  static_assert(Calls<decltype(NcclLibrary::ours), decltype(&theirs)>::alike)
CALLS(error_string, ncclGetErrorString);
CALLS(get_version, ncclGetVersion);
CALLS(get_unique_id, ncclGetUniqueId);
CALLS(init_rank_config, ncclCommInitRankConfig);
CALLS(get_async_error, ncclCommGetAsyncError);
CALLS(comm_count, ncclCommCount);
CALLS(abort, ncclCommAbort);
CALLS(finalize, ncclCommFinalize);
CALLS(destroy, ncclCommDestroy);
CALLS(group_start, ncclGroupStart);
CALLS(group_end, ncclGroupEnd);
CALLS(all_reduce, ncclAllReduce);
CALLS(broadcast, ncclBroadcast);
CALLS(all_gather, ncclAllGather);
CALLS(reduce, ncclReduce);
CALLS(reduce_scatter, ncclReduceScatter);
CALLS(send, ncclSend);
CALLS(recv, ncclRecv);
CALLS(create_scaled_sum, ncclRedOpCreatePreMulSum);
CALLS(destroy_op, ncclRedOpDestroy);
constexpr bool kRegisters = NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)
CALLS(mem_alloc, ncclMemAlloc);
CALLS(mem_free, ncclMemFree);
CALLS(comm_register, ncclCommRegister);
CALLS(comm_deregister, ncclCommDeregister);
#endif

int look(const char* path) {
  std::string why_not;
  const NcclLibrary* library = find_nccl(path, why_not);
  if (!library) {
    std::fprintf(stderr, "%s\n", why_not.c_str());
    return 1;
  }
  NcclId id;
  const bool gives_ids = library->get_unique_id(&id) == NcclResult::kSuccess;
  std::printf("NCCL %s: %s\n", version_text(*library).c_str(),
              library->registers() ? "registers memory" : "registers no memory");
  return library->version == NCCL_VERSION_CODE && gives_ids && library->registers() == kRegisters
             ? 0
             : 1;
}

}  // namespace
}  // namespace bagua

int main(int argc, char** argv) { return argc == 2 ? bagua::look(argv[1]) : 2; }
