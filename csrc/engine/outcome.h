// What ranks try together, and what can end on one of them while the others wait for it: whoever
// fails says so at once, so that all give up, and all come to the same conclusion. The first rank
// of the group gathers and tells: two short messages per rank.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transport/group.h"

namespace bagua {

class Outcome {
 public:
  // On all ranks, before they try.
  explicit Outcome(Group& group);
  ~Outcome();
  Outcome(const Outcome&) = delete;

  // Whether somebody has failed, as far as this rank has heard.
  bool failed();
  // This rank is through: why it has failed, or nothing. Waits for all of them; why one has, which
  // all are told alike, or nothing.
  std::string settle(const std::string& why_not);

 private:
  using Text = std::array<char, 256>;  // empty: it worked
  struct Letter {
    Text text = {};
    Ticket ticket = -1;
    bool arrived = false;
  };
  bool gathers() const { return group_.me() == 0; }
  bool look();
  void tell(const Text& text);
  void say(int to, Letter& letter, const Text& text);

  Group& group_;
  std::unique_ptr<std::vector<Letter>> heard_;  // from the first rank, or from the others, in order
  std::unique_ptr<std::vector<Letter>> said_;   // by whom they go to, as above
  bool told_ = false;                           // by the first rank to the others
  Text conclusion_ = {};
};

}  // namespace bagua
