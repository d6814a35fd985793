// How errors and warnings name ranks.
#pragma once

#include <string>
#include <vector>

namespace bagua {

// "rank 3", or "ranks 0, 3".
inline std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

}  // namespace bagua
