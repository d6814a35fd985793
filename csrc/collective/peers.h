// With whom a rank averages, where that is not everyone: chosen anew each round, alike on all
// ranks, without a message.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bagua {

struct Peers {
  enum Kind : uint8_t {
    kAll,
    kShiftOne,     // one peer, another each round: within n - 1 rounds (n, if odd) every pair meets
    kRing,         // both neighbors
    kExponential,  // gives to the one 2^i places on, and is given by the one as far behind
  };
  Kind kind = kAll;
  int64_t round = 0;

  bool all() const { return kind == kAll; }
};

// "kind" or "kind:round", where counting begins; nothing for everyone. Throws a UsageError.
Peers parse_peers(const std::string& text);

// Ranks of a group, each once and without this one; none for a rank that rests.
struct Meeting {
  std::vector<int> give_to;
  std::vector<int> take_from;  // ascending
};
Meeting meeting(const Peers& peers, int n, int me);

}  // namespace bagua
