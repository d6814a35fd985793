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
    kRandom,       // one peer, drawn each round by all ranks from one seed
    kExponential,  // gives to the one 2^i places on, and is given by the one as far behind
  };
  Kind kind = kAll;
  int64_t round = 0;
  int64_t seed = 0;  // of random ones

  bool all() const { return kind == kAll; }
};

// "kind", "kind:round", where counting begins, or "random:round:seed"; nothing for everyone.
// Throws a UsageError.
Peers parse_peers(const std::string& text);

// Ranks of a group, each once and without this one; none for a rank that rests.
struct Meeting {
  std::vector<int> give_to;
  std::vector<int> take_from;  // ascending
};
Meeting meeting(const Peers& peers, int n, int me);

}  // namespace bagua
