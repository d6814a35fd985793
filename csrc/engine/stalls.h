// What there is to say about requests that some ranks have made and others have not.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/ledger.h"

namespace bagua {

using Stalls = std::vector<Ledger::Stall>;

// Those open for so long that anybody waits for.
Stalls stalls_in(const Ledger& ledger, double now_s, double age_s);
// Of those the ones in which ranks wait for each other, each in another one and perhaps by way of
// more ranks, who have said nothing for so long and of which `waits` says that a thread waits: most
// likely their calls differ, and no time will mend that.
Stalls mutual_stalls_in(const Ledger& ledger, double now_s, double age_s,
                        const std::function<bool(int)>& waits);

// What a rank that others wait for has called instead of what they have: then the calls differ.
class Instead {
 public:
  explicit Instead(const Stalls& open);
  // In words that go on a sentence; empty if there is nothing.
  std::string of(const Ledger::Stall& stall) const;

 private:
  std::map<int, std::set<std::string>> called_;  // by rank
};

}  // namespace bagua
