// Settings of one engine. Plain data: Python parses and checks (bagua/common/config.py), C++ obeys.
#pragma once

#include <cstdint>
#include <string>

namespace bagua {

struct Config {
  std::string allreduce = "auto";  // "auto", or names of rows in the collective table
  int64_t fusion_nbytes = 16 << 20;
  double stall_warn_s = 60;
  double stall_fail_s = 0;    // 0: never
  double peer_timeout_s = 5;  // 0: never
  double start_timeout_s = 60;
  double spin_us = 50;
  bool nccl = true;               // where it can be
  std::string nccl_path;          // of its library, where no other copy is loaded
  bool nccl_shares_gpu = false;   // it was told that several ranks may have one
  bool allow_shared_gpu = false;  // so were we
  bool inline_drive = true;
  int helpers = 0;                   // threads that reduce along while a caller waits
  bool shared_memory = true;         // where the system lets the ranks of a machine
  bool needs_shared_memory = false;  // and fail where it does not
  std::string carriers = "auto";     // always, never: whether one rank of a machine carries
  std::string network_interfaces;
  std::string log_level = "warning";
};

}  // namespace bagua
