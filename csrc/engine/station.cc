#include "engine/station.h"

#include <utility>

#include "transport/node.h"

namespace bagua {

Station::Station(const Config& config, std::unique_ptr<Transport> transport,
                 std::unique_ptr<Channel> channel, std::vector<std::string> names)
    : config(config),
      transport(std::move(transport)),
      channel(std::move(channel)),
      names(std::move(names)),
      rank(this->transport->rank()),
      size(this->transport->size()),
      log(rank, config.log_level) {}

std::string Station::name_of(int rank) const {
  const auto r = static_cast<size_t>(rank);
  return "rank " + std::to_string(rank) + (r < names.size() ? " (" + names[r] + ")" : "");
}

std::shared_ptr<Arenas> Station::arenas() const {
  Node* node = transport->node();
  return node ? node->arenas() : nullptr;
}

}  // namespace bagua
