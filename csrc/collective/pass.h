// One step of an allreduce that goes from peer to peer: a piece leaves for one while another
// comes from one, in segments, so that adding one overlaps with the next one's journey.
#pragma once

#include "collective/collective.h"

namespace bagua {

// Elements of a job's data.
struct Piece {
  char* data;
  int64_t count;
  bool raw = false;    // nobody has looked at them yet
  bool final = false;  // when they have come in

  Piece as_raw(bool is = true) const {
    Piece same = *this;
    same.raw = is;
    return same;
  }
  Piece as_final(bool is = true) const {
    Piece same = *this;
    same.final = is;
    return same;
  }
};

// What is done with a piece that comes in.
enum class Landing { kReplace, kReduce };

// Sends `out` to `to` and receives `in` from `from`: over what is there, or reduced with it and
// finished. Calls the job's prepare for what is raw and arrived for what is final.
void pass(Job& job, int to, Piece out, int from, Piece in, Landing landing, Finish finish = {});

}  // namespace bagua
