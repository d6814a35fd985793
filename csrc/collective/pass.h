// One step of an allreduce that goes from peer to peer: a chunk leaves for one while another
// comes from one, in segments, so that adding one overlaps with the next one's journey.
#pragma once

#include "collective/collective.h"

namespace bagua {

// Elements of a job's data.
struct Chunk {
  char* data;
  int64_t count;
  bool raw = false;    // nobody has looked at them yet
  bool final = false;  // when they have come in

  Chunk as_raw(bool is = true) const {
    Chunk same = *this;
    same.raw = is;
    return same;
  }
  Chunk as_final(bool is = true) const {
    Chunk same = *this;
    same.final = is;
    return same;
  }
};

// What is done with a chunk that comes in.
enum class Landing { kReplace, kReduce };

// Sends `out` to `to` and receives `in` from `from`: over what is there, or reduced with it and
// finished. Calls the job's prepare for what is raw and arrived for what is final.
void pass(Job& job, int to, Chunk out, int from, Chunk in, Landing landing, Finish finish = {});

}  // namespace bagua
