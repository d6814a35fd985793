// One step of an allreduce that goes from peer to peer: a piece leaves for one while another
// comes from one, in segments, so that adding one overlaps with the next one's journey.
#pragma once

#include "collective/collective.h"

namespace bagua {

struct Piece {
  char* data;
  int64_t count;
};

// What is done with a piece that comes in.
enum class Landing { kReplace, kReduce };

// Sends `out` to `to` and receives `in` from `from`: over what is there, or reduced with it and
// finished.
void pass(Job& job, int to, Piece out, int from, Piece in, Landing landing, Finish finish = {});

}  // namespace bagua
