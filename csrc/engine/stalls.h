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
// Of those the ones that no time will end, most likely since calls differ: each lacks a rank that
// is stuck, for it has said nothing for so long, `waits` says that all it does is wait, and all
// that it has asked for is as hopeless. So ranks wait for each other in a circle, and who waits for
// those.
Stalls hopeless_stalls_in(const Ledger& ledger, double now_s, double age_s,
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
