// Which of two ways to do the same is the faster one here and now: known only by trying, since it
// depends on where the ranks run, and that may change.
#pragma once

#include <algorithm>

namespace bagua {

class Pace {
 public:
  // The faster way so far, 0 or 1; at times, ever more seldom, the other, to see whether it still
  // is slower.
  int choose() {
    const int faster = cost_[1] < cost_[0] ? 1 : 0;
    for (const int way : {0, 1})
      if (cost_[way] == 0) return way;
    if (++uses_ < interval_) return faster;
    uses_ = 0;
    interval_ = std::min(2 * interval_, kLongestInterval);
    return 1 - faster;
  }
  // The way that was taken last.
  int last() const { return last_; }
  // What it cost this time, for as much work each time: seconds per byte.
  void took(int way, double cost) {
    last_ = way;
    double& known = cost_[way];
    // A single slow time says little, a fast one a lot.
    known = known == 0 || cost < known ? cost : known + kTrust * (cost - known);
  }

 private:
  static constexpr int kLongestInterval = 64;
  static constexpr double kTrust = 0.25;
  double cost_[2] = {0, 0};
  int uses_ = 0, interval_ = 2, last_ = 0;
};

}  // namespace bagua
