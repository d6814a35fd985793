// How far a rank moves that tells its neighbors so through a codec: see mirrored.cc.
#pragma once

#include "collective/collective.h"

namespace bagua {

// Of its values, and of the copies of its left and its right neighbor's and of its own, which is
// taken away.
struct Shares {
  float x, l, r, w;
};
// `left`, `me` and `right` are indices among those that meet.
Shares shares_of(const Job& job, int left, int me, int right);

}  // namespace bagua
