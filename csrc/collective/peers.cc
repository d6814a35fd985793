#include "collective/peers.h"

#include <algorithm>
#include <cstdlib>

#include "common/errors.h"

namespace bagua {
namespace {

// A round-robin tournament over an odd number m of seats: those whose seats add up to the round
// meet. Who would meet itself rests or, if the ranks are even, meets the one without a seat.
int opponent(int64_t round, int n, int me) {
  const int m = n % 2 ? n : n - 1;
  if (m < 1) return me;
  const int sum = static_cast<int>(round % m);
  if (me < m) {
    const int other = (sum - me + m) % m;
    return other != me || m == n ? other : n - 1;
  }
  int at_rest = 0;
  while ((2 * at_rest) % m != sum) ++at_rest;
  return at_rest;
}

}  // namespace

Peers parse_peers(const std::string& text) {
  if (text.empty()) return {};
  const size_t colon = std::min(text.find(':'), text.size());
  const std::string name = text.substr(0, colon);
  const int64_t round = colon < text.size() ? std::atoll(text.c_str() + colon + 1) : 0;
  if (round < 0) throw UsageError(text + ": rounds count from 0");
  if (name == "shift_one") return {Peers::kShiftOne, round};
  if (name == "ring") return {Peers::kRing, round};
  if (name == "exponential") return {Peers::kExponential, round};
  throw UsageError("there are no peers " + text + "; there are shift_one, ring, exponential");
}

Meeting meeting(const Peers& peers, int n, int me) {
  Meeting m;
  const auto at = [&](int distance) { return (me + distance % n + n) % n; };
  if (peers.kind == Peers::kShiftOne) {
    m.give_to = {opponent(peers.round, n, me)};
    m.take_from = m.give_to;
  } else if (peers.kind == Peers::kRing) {
    m.give_to = {at(-1), at(1)};
    m.take_from = m.give_to;
  } else if (peers.kind == Peers::kExponential) {
    int distances = 0;
    while ((1 << distances) < n) ++distances;
    const int distance = distances ? 1 << (peers.round % distances) : 0;
    m.give_to = {at(distance)};
    m.take_from = {at(-distance)};
  }
  for (auto* ranks : {&m.give_to, &m.take_from}) {
    std::sort(ranks->begin(), ranks->end());
    ranks->erase(std::unique(ranks->begin(), ranks->end()), ranks->end());
    ranks->erase(std::remove(ranks->begin(), ranks->end(), me), ranks->end());
  }
  return m;
}

}  // namespace bagua
