#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace bagua {

// Values that are hard in some way, from a seed.
inline std::vector<float> hard_values(int kind, int n) {
  std::mt19937 random(static_cast<unsigned>(kind * 1000 + n));
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& x : values) x = normal(random);
  auto& some = values[random() % values.size()];
  switch (kind) {
    case 1:
      std::fill(values.begin(), values.end(), -0.375f);
      break;
    case 2:
      some = NAN;
      break;
    case 3:
      some = -INFINITY;
      break;
    case 4:
      for (float& x : values) x *= 1e-42f;
      break;
    case 5:
      for (float& x : values) x = x * 1e-3f + 4e6f;
      break;
    case 6:
      for (float& x : values) x *= 3e37f;
      break;
    case 7:  // zeros of both signs
      for (float& x : values) x = random() % 2 ? 0.0f : -0.0f;
      break;
    default:
      break;
  }
  return values;
}

constexpr int kKinds = 8;

}  // namespace bagua
