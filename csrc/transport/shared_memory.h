// Memory that the processes of one machine share. Every process makes its own segments, as
// anonymous files that vanish with it whatever kills it, and maps those of the others. What a
// forked child writes to segments its parent made is its own.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/forked.h"

namespace bagua {

// One mapped anonymous file.
class Segment {
 public:
  // Makes one, of which so many bytes are wanted now; its pages read as zeros and take memory once
  // they are touched.
  explicit Segment(size_t nbytes, size_t wanted = SIZE_MAX);
  // How others map it.
  struct Card {
    int fd = -1;
    size_t nbytes = 0;
    uint64_t device = 0, inode = 0;  // which no other file has
  };
  Card card() const;
  // Maps one that another process has made. One of this process, whose ranks are threads then, is
  // at the same addresses for all of them, so that ThreadSanitizer sees who reads what others
  // write.
  Segment(int pid, const Card& card);
  ~Segment();
  Segment(const Segment&) = delete;

  char* data() const { return data_.get(); }
  size_t nbytes() const { return nbytes_; }
  // Of one that this process has made: what others write there from now on does not show here. They
  // may be at it still when this rank has given them up. False if the system refused it.
  bool take_back(size_t offset, size_t nbytes);

 private:
  friend class Forked<Segment>;
  void map(int fd);
  void in_child();
  bool make_own(size_t begin, size_t end);
  template <class Look>
  void each_shared(size_t begin, size_t end, Look look) const;

  size_t nbytes_;
  std::shared_ptr<char> data_;
  int fd_ = -1;                   // of a mapped one
  std::map<size_t, size_t> own_;  // what was taken back: begin -> end, never overlapping
};

// Where memory lies, in a way that other processes understand.
struct Place {
  static constexpr uint32_t kNowhere = ~uint32_t{0};
  uint32_t segment = kNowhere;  // one of kMaxSegments
  uint32_t generation = 0;      // the how-many-eth segment of this number
  uint64_t offset = 0;
  bool nowhere() const { return segment == kNowhere; }
};

// Hands out pieces of segments that it makes as they are needed. Any thread.
class Arenas : public std::enable_shared_from_this<Arenas> {
 public:
  static constexpr int kMaxSegments = 1024;
  Arenas();

  // Zeros, aligned to a cache line; never null. Throws when the system has no more.
  std::shared_ptr<char> allocate(size_t nbytes);
  // The same, for what others may write to though nobody here has it any more: it is nothing else's
  // as long as there are these arenas.
  std::shared_ptr<char> allocate_for_good(size_t nbytes);
  // Where [data, data + nbytes) lies, or nowhere if not in one of the arenas.
  Place find(const void* data, size_t nbytes) const;
  // Segment::take_back() for memory in one of the arenas; elsewhere there is nothing to do.
  bool take_back(const void* data, size_t nbytes);
  // How others map a segment, for as long as anything in it is in use.
  struct Mapping {
    uint32_t generation = 0;
    Segment::Card card;
  };
  Mapping mapping(uint32_t number) const;
  size_t segment_count() const;

 private:
  struct Piece {
    uint32_t segment;
    size_t offset, nbytes;
  };
  struct Owned {
    std::unique_ptr<Segment> memory;  // null: the number is free
    uint32_t generation = 0;
    std::map<size_t, size_t> free;  // offset -> bytes, never adjacent
    bool unused() const {
      return memory && free.size() == 1 && free.begin()->second == memory->nbytes();
    }
  };
  Piece take(size_t nbytes);
  char* data_of(const Piece& piece);
  uint32_t add_segment(size_t nbytes, size_t wanted);
  void give_back(const Piece& piece);

  const int pid_;
  mutable std::mutex mutex_;
  std::vector<Owned> segments_;
};

}  // namespace bagua
