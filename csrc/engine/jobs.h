// Jobs of an exchange: which row of the table does one, and how its elements get there and back.
#pragma once

#include "engine/exchange.h"

namespace bagua {

// The row that does a job, and what the job has to know for it.
const Collective& choose(OpKind kind, Job& job, const Workbench& bench);
// A single tensor becomes the job's data: where it is, or brought to where its result goes, unless
// the row takes that from one place to the other itself.
void place_single(Job& job, const Collective& row);
// Elements that come from a device do so while the exchange goes on with others, if it can.
void connect(Job& job, const Collective& row, Staging& staging);

// For what wants a job's fragments in one place: brings them there.
void gather(Job& job, char* place);
// And takes the results from there.
void scatter(const Job& job);

void carry_out(const Collective& row, Job& job, const Workbench& bench, Staging* staging);
void run_on_host(OpKind kind, Job& job, const Workbench& bench, Staging* staging);

}  // namespace bagua
