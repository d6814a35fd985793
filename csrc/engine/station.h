// What the parts of a rank's engine have in common: who it is, its ways to the others, and its
// voice.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/config.h"
#include "common/log.h"
#include "control/channel.h"
#include "transport/transport.h"

namespace bagua {

class Arenas;

struct Station {
  // `names` says where each rank runs, for errors: "rank 2 (host b, pid 17)".
  Station(const Config& config, std::unique_ptr<Transport> transport,
          std::unique_ptr<Channel> channel, std::vector<std::string> names);
  Station(const Station&) = delete;

  std::string name_of(int rank) const;
  std::shared_ptr<Arenas> arenas() const;  // null without ranks that share memory

  const Config config;
  const std::unique_ptr<Transport> transport;
  const std::unique_ptr<Channel> channel;
  const std::vector<std::string> names;
  const int rank;
  const int size;
  const Log log;
};

}  // namespace bagua
