// How ranks of one node exchange memory that others cannot see: each copies what they need into its
// *stage*, all step forward together, and each takes what it needs out of the others' stages.
#pragma once

#include <vector>

#include "collective/collective.h"
#include "common/scaled.h"

namespace bagua {

class Stage {
 public:
  // So much of a stage is used by a thread at a time: it should stay in a core's cache.
  static constexpr size_t kNbytes = scaled(1 << 20);

  Stage(Job& job, size_t nbytes);

  char* mine() const { return mine_; }
  const char* of(int index) const { return bases_[static_cast<size_t>(index)]; }
  // Everyone has come this far: what they wrote before can be read, what they read overwritten.
  void step();
  // The first step; the largest of the numbers that the ranks give.
  int64_t first_step(int64_t number = 0);
  // The last step, which nobody waits for now: this rank does not touch the others' stages any
  // more.
  void leave();

 private:
  Group& group_;
  char* mine_;
  std::vector<const char*> bases_;
};

}  // namespace bagua
