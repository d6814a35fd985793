// How long a thread that waits should spin before it sleeps. A wake-up may take longer than what is
// waited for, and then the others wait for the sleeper and fall asleep too: so after a short wait
// the next one is expected to be short, and is spun through; after a long one, not.
#pragma once

#include <algorithm>

namespace bagua {

class Patience {
 public:
  // `least_us` is what it spins without experience; with 0 it never does.
  explicit Patience(double least_us) : least_us_(least_us), spin_us_(least_us) {}
  double spin_us() const { return spin_us_; }
  // A wait is over that took so long, spun or slept.
  void waited(double us) {
    if (least_us_ <= 0) return;
    spin_us_ = us < kShortUs ? std::clamp(2 * us, least_us_, kShortUs) : least_us_;
  }

 private:
  static constexpr double kShortUs = 1000;
  const double least_us_;
  double spin_us_;
};

}  // namespace bagua
