#include "device/nccl_library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <memory>

namespace bagua {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr int kOldest = 21800;

// Sets each function; the name of one that is missing, or nothing.
std::string fill(NcclLibrary& library, void* handle) {
  std::string missing;
  const auto find_any = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(handle, name));
    return function != nullptr;
  };
  const auto find = [&](auto& function, const char* name) {
    if (!find_any(function, name)) missing = name;
  };
  find(library.error_string, "ncclGetErrorString");
  find(library.get_version, "ncclGetVersion");
  find(library.get_unique_id, "ncclGetUniqueId");
  find(library.init_rank_config, "ncclCommInitRankConfig");
  find(library.get_async_error, "ncclCommGetAsyncError");
  find(library.comm_count, "ncclCommCount");
  find(library.abort, "ncclCommAbort");
  find(library.finalize, "ncclCommFinalize");
  find(library.destroy, "ncclCommDestroy");
  find(library.group_start, "ncclGroupStart");
  find(library.group_end, "ncclGroupEnd");
  find(library.all_reduce, "ncclAllReduce");
  find(library.broadcast, "ncclBroadcast");
  find(library.all_gather, "ncclAllGather");
  find(library.reduce, "ncclReduce");
  find(library.reduce_scatter, "ncclReduceScatter");
  find(library.send, "ncclSend");
  find(library.recv, "ncclRecv");
  find(library.create_scaled_sum, "ncclRedOpCreatePreMulSum");
  find(library.destroy_op, "ncclRedOpDestroy");
  find_any(library.mem_alloc, "ncclMemAlloc");
  find_any(library.mem_free, "ncclMemFree");
  find_any(library.comm_register, "ncclCommRegister");
  find_any(library.comm_deregister, "ncclCommDeregister");
  return missing;
}

const NcclLibrary* load(const std::string& path, std::string& why_not) {
  void* handle = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (!handle && !path.empty()) handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) handle = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    why_not = std::string(::dlerror()) + "; pip install 'bagua[cuda]', for CUDA 13 'bagua[cuda13]'";
    return nullptr;
  }
  auto library = std::make_unique<NcclLibrary>();
  if (const std::string missing = fill(*library, handle); !missing.empty()) {
    why_not = std::string(kName) + " has no " + missing;
    return nullptr;
  }
  if (library->get_version(&library->version) != NcclResult::kSuccess ||
      library->version < kOldest) {
    why_not = "NCCL 2.18 or newer is needed, not " + version_text(*library);
    return nullptr;
  }
  return library.release();  // for as long as the process
}

}  // namespace

const NcclLibrary* find_nccl(const std::string& path, std::string& why_not) {
  static std::string reason;
  static const NcclLibrary* const library = load(path, reason);
  why_not = reason;
  return library;
}

std::string nccl_in_sight(const std::string& path) {
  if (void* own = ::dlopen(kName, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD)) {
    ::dlclose(own);
    return "this process's own";
  }
  return ::access(path.c_str(), R_OK) == 0 ? path : "";
}

std::string version_text(const NcclLibrary& library) {
  const int v = library.version;
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." +
         std::to_string(v % 100);
}

}  // namespace bagua
