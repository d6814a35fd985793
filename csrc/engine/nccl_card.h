// What ranks show each other before they use NCCL together, and what they conclude from it: all of
// them the same, for all see the same cards.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "device/nccl_library.h"

namespace bagua {

struct NcclCard {
  int32_t version = 0;  // negative: of a rank without a device, 0: without NCCL
  int32_t shares = 0;   // its GPU with others
  int64_t kernels = 0;  // whether its GPU runs ours
  char gpu[16] = {};
  NcclId id = {};  // of those who begin a communicator the first one's counts
};
using NcclCards = std::vector<NcclCard>;

constexpr size_t kCardNumbers = sizeof(NcclCard) / sizeof(int64_t);
static_assert(sizeof(NcclCard) % sizeof(int64_t) == 0);

inline std::vector<int64_t> numbers_of(const NcclCard& card) {
  std::vector<int64_t> numbers(kCardNumbers);
  std::memcpy(numbers.data(), &card, sizeof card);
  return numbers;
}
inline NcclCards cards_of(const std::vector<int64_t>& numbers) {
  NcclCards cards(numbers.size() / kCardNumbers);
  std::memcpy(static_cast<void*>(cards.data()), numbers.data(), cards.size() * sizeof(NcclCard));
  return cards;
}

// A rank that has joined before it had anything on a device may have one later.
inline bool undecided(const NcclCards& cards) {
  return std::any_of(cards.begin(), cards.end(),
                     [](const NcclCard& card) { return card.version < 0; });
}

inline bool all_have(const NcclCards& cards, int64_t NcclCard::* what) {
  return std::all_of(cards.begin(), cards.end(),
                     [&](const NcclCard& card) { return card.*what != 0; });
}

// Two who have one GPU, of whom `minds` holds, or nobody.
template <class Minds>
std::pair<size_t, size_t> sharers(const NcclCards& cards, Minds&& minds) {
  for (size_t j = 0; j < cards.size(); ++j)
    for (size_t i = 0; i < j; ++i)
      if (std::memcmp(cards[i].gpu, cards[j].gpu, sizeof cards[i].gpu) == 0 &&
          minds(cards[i], cards[j]))
        return {i, j};
  return {};
}
inline std::pair<size_t, size_t> sharers(const NcclCards& cards) {
  return sharers(cards, [](const NcclCard&, const NcclCard&) { return true; });
}

// Why not, or nothing.
inline std::string obstacle(const NcclCards& cards) {
  const auto [i, j] = sharers(
      cards, [](const NcclCard& a, const NcclCard& b) { return a.shares == 0 || b.shares == 0; });
  if (i != j)
    return "two ranks have one GPU, which takes NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1";
  for (const NcclCard& card : cards) {
    if (card.version == 0) return "not all ranks have it, or it does not work on one";
    if (card.version != cards[0].version) return "ranks have different versions of it";
  }
  return "";
}

}  // namespace bagua
