#include "engine/outcome.h"

#include <algorithm>
#include <utility>

#include "common/memory.h"

namespace bagua {

Outcome::Outcome(Group& group)
    : group_(group),
      heard_(std::make_unique<std::vector<Letter>>(gathers() ? group.size() - 1 : 1)),
      said_(std::make_unique<std::vector<Letter>>(heard_->size())) {
  for (size_t i = 0; i < heard_->size(); ++i) {
    Letter& letter = (*heard_)[i];
    const int from = gathers() ? static_cast<int>(i) + 1 : 0;
    letter.ticket = group_.recv(from, letter.text.data(), sizeof letter.text);
  }
}

// What a transport may still write to or read stays for ever.
Outcome::~Outcome() {
  const auto under_way = [](const Letter& letter) { return letter.ticket >= 0; };
  for (auto* letters : {&heard_, &said_})
    if (std::any_of((*letters)->begin(), (*letters)->end(), under_way))
      keep_for_ever(std::shared_ptr<std::vector<Letter>>(std::move(*letters)));
}

bool Outcome::failed() {
  look();
  return conclusion_[0] != 0;
}

// Takes note of what has come, and tells of the first failure. True when nothing is missing.
bool Outcome::look() {
  bool all = true;
  for (auto* letters : {&heard_, &said_})
    for (Letter& letter : **letters) {
      if (letter.ticket >= 0 && group_.done(letter.ticket)) {
        letter.ticket = -1;
        letter.arrived = true;
      }
      all = all && letter.ticket < 0;
    }
  for (const Letter& letter : *heard_)
    if (letter.arrived && letter.text[0] != 0 && conclusion_[0] == 0) {
      conclusion_ = letter.text;
      if (gathers()) tell(conclusion_);
    }
  return all;
}

void Outcome::say(int to, Letter& letter, const Text& text) {
  letter.text = text;
  letter.ticket = group_.send(to, letter.text.data(), sizeof letter.text);
}

void Outcome::tell(const Text& text) {
  if (told_) return;
  told_ = true;
  for (size_t i = 0; i < said_->size(); ++i) say(static_cast<int>(i) + 1, (*said_)[i], text);
}

std::string Outcome::settle(const std::string& why_not) {
  Text text = {};
  std::copy_n(why_not.begin(), std::min(why_not.size(), text.size() - 1), text.begin());
  if (!gathers()) {
    say(0, said_->front(), text);
  } else if (text[0] != 0 && conclusion_[0] == 0) {
    conclusion_ = text;
    tell(text);
  }
  group_.wait_until([&] { return look(); });
  if (gathers()) {
    tell(conclusion_);
    group_.wait_until([&] { return look(); });
  }
  return conclusion_.data();
}

}  // namespace bagua
