#include "collective/collective.h"
#include "common/memory.h"

namespace bagua {

char* Scratch::get(Lane lane, size_t nbytes) {
  Memory& memory = lanes_[lane];
  if (memory.nbytes < nbytes) {
    memory = {};  // let go before asking for more
    const bool seen = arenas_ && (lane == kFusion || lane == kShare);
    memory = {seen ? arenas_->allocate(nbytes) : allocate_lines(nbytes), nbytes};
  }
  return memory.data.get();
}

}  // namespace bagua
