// What a rank makes of its own values and those that it is given by peers: see neighbors.cc.
#pragma once

#include <vector>

#include "collective/collective.h"

namespace bagua {

struct Mean {
  struct Source {
    int rank;
    double factor = 1;  // of its values
  };
  std::vector<Source> sources;  // in the order of ranks, this one among them
  double divisor = 0;           // of their sum
  bool scaled = false;          // whether factors are others than 1
};
// `me` is this rank's index among those that meet.
Mean mean_of(const Job& job, const Meeting& meet, int me);

}  // namespace bagua
