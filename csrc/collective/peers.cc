#include "collective/peers.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <sstream>

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

// Sebastiano Vigna's splitmix64: the i-th number of a seed.
uint64_t draw(uint64_t seed, uint64_t i) {
  uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// All ranks are shuffled, and neighbors in that order meet, two by two.
int drawn(const Peers& peers, int n, int me) {
  const uint64_t seed = draw(static_cast<uint64_t>(peers.seed), static_cast<uint64_t>(peers.round));
  std::vector<int> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  for (size_t left = order.size(); left > 1; --left)
    std::swap(order[left - 1], order[draw(seed, left) % left]);
  const auto place = std::find(order.begin(), order.end(), me) - order.begin();
  const auto other = static_cast<size_t>(place ^ 1);
  return other < order.size() ? order[other] : me;
}

}  // namespace

Peers parse_peers(const std::string& text) {
  if (text.empty()) return {};
  std::istringstream words(text);
  std::string name, round_text, seed_text;
  std::getline(std::getline(std::getline(words, name, ':'), round_text, ':'), seed_text);
  const int64_t round = std::atoll(round_text.c_str()), seed = std::atoll(seed_text.c_str());
  if (round < 0) throw UsageError(text + ": rounds count from 0");
  if (name == "shift_one") return {Peers::kShiftOne, round};
  if (name == "ring") return {Peers::kRing, round};
  if (name == "exponential") return {Peers::kExponential, round};
  if (name == "random") return {Peers::kRandom, round, seed};
  throw UsageError("there are no peers " + text +
                   "; there are shift_one, random, ring, exponential");
}

Meeting meeting(const Peers& peers, int n, int me) {
  Meeting m;
  const auto at = [&](int distance) { return (me + distance % n + n) % n; };
  if (peers.kind == Peers::kShiftOne || peers.kind == Peers::kRandom) {
    const bool drawn_anew = peers.kind == Peers::kRandom;
    m.give_to = {drawn_anew ? drawn(peers, n, me) : opponent(peers.round, n, me)};
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
