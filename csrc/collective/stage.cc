#include "collective/stage.h"

#include <algorithm>

namespace bagua {

Stage::Stage(Job& job, size_t nbytes)
    : group_(job.group), bases_(static_cast<size_t>(job.group.size())) {
  group_.settle();
  mine_ = group_.node()->stage(std::max<size_t>(nbytes, 1));
}

int64_t Stage::first_step(int64_t number) {
  const auto notes = group_.step({group_.node()->arenas()->find(mine_, 1), number});
  for (int i = 0; i < group_.size(); ++i) {
    const auto at = static_cast<size_t>(i);
    bases_[at] = i == group_.me() ? mine_ : group_.at(i, notes[at].place);
    number = std::max(number, notes[at].number);
  }
  return number;
}

void Stage::step() { group_.step(); }

void Stage::leave() { group_.leave(); }

}  // namespace bagua
