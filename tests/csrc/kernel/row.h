// Memory of a test at a chosen distance from a cache line, with bytes around it that must stay.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "common/memory.h"

namespace bagua {

class Row {
 public:
  // Rows of one operation want unlike sentinels, so that what is made of them is none.
  explicit Row(size_t most_nbytes, char sentinel = '\xa5')
      : sentinels_(most_nbytes + 2 * kAround, sentinel) {
    memory_ = allocate_lines(sentinels_.size());
  }

  // So many bytes of `content`, beginning less than a line and a half behind the start of a line.
  // What was here before is forgotten.
  char* place(size_t offset, const void* content, size_t nbytes) {
    std::memcpy(memory_.get(), sentinels_.data(), sentinels_.size());
    at_ = memory_.get() + kAround / 2 + offset;
    nbytes_ = nbytes;
    if (nbytes > 0) std::memcpy(at_, content, nbytes);
    return at_;
  }
  char* at() const { return at_; }

  bool is(const void* content) const {
    return nbytes_ == 0 || std::memcmp(at_, content, nbytes_) == 0;
  }
  bool intact_around() const {
    const auto before = static_cast<size_t>(at_ - memory_.get()), after = before + nbytes_;
    return std::memcmp(memory_.get(), sentinels_.data(), before) == 0 &&
           std::memcmp(memory_.get() + after, sentinels_.data(), sentinels_.size() - after) == 0;
  }

 private:
  static constexpr size_t kAround = 4 * kLineNbytes;
  std::vector<char> sentinels_;
  std::shared_ptr<char> memory_;
  char* at_ = nullptr;
  size_t nbytes_ = 0;
};

}  // namespace bagua
