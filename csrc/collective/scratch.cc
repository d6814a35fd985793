#include "collective/collective.h"

namespace bagua {

char* Scratch::get(Lane lane, size_t nbytes) {
  auto& memory = lanes_[lane];
  if (memory.size() < nbytes) {
    std::vector<char>().swap(memory);  // let go before asking for more
    memory.resize(nbytes);
  }
  return memory.data();
}

}  // namespace bagua
