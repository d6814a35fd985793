// The ranks on one machine, which see each other's arenas and tell each other how far they are
// through words in shared memory instead of messages.
//
// Words: tell() tells a peer that this rank has come one step further, and a note; the peer hears
// it with heard(). Both count, so no word is lost, but a note can be read only until the peer's
// next word but one: the steps of an exchange go in turns, and nobody is two ahead.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/shared_memory.h"

namespace bagua {

// What goes along with a word.
struct Note {
  Place place;
  int64_t number = 0;
};

class Node {
 public:
  // Gives every rank of the node what all of them gave, in order. Called by all of them alike.
  using Exchange = std::function<std::vector<std::string>(const std::string&)>;

  // `ranks` are the node's, as the transport numbers them, ascending; `rank` is this one. Null, on
  // all of them, and why, if they cannot see each other's memory.
  static std::unique_ptr<Node> meet(const std::vector<int>& ranks, int rank,
                                    const Exchange& exchange, std::string& why_not);

  // Waits until the others are through with this rank's memory, unless abandoned. Who is not by
  // then, since it was stopped for example, finds the stage as it was.
  ~Node();
  // For tests: how long it does.
  void set_patience(double s) { patience_s_ = s; }
  // Something broke: there is nobody left to wait for. Who is slow may still read the stage, which
  // therefore stays.
  void abandon();

  // After that: memory that goes on being used, while a rank that was only stopped may come back
  // and write what it was about to. False if the system refused it. Ranks that are threads share
  // it.
  bool take_back(const void* data, size_t nbytes);

  int size() const { return static_cast<int>(ranks_.size()); }
  int first_rank() const { return ranks_.front(); }
  int index_of(int rank) const;  // on this node; -1 if it is elsewhere
  bool alive(int peer) const;    // its process
  int rank_of(int peer) const { return ranks_[static_cast<size_t>(peer)]; }
  const std::shared_ptr<Arenas>& arenas() const { return arenas_; }

  // The rest by the driving thread alone. Peers are indices on this node.
  void tell(int peer, const Note& note = {});
  // True once per word of the peer.
  bool heard(int peer);
  // What came with the last word heard.
  Note note_of(int peer) const;
  // A word of this peer will come that nobody waits for yet: it has to be heard before the next
  // exchange with anyone.
  bool& owes(int peer) { return peers_[static_cast<size_t>(peer)].owes; }
  // The peer's memory; valid as long as the node.
  char* at(int peer, const Place& place);

  // This rank's memory for others to look at during an exchange. It stays until they are through:
  // ask again only when nobody owes a word.
  char* stage(size_t nbytes);

  // Sleeps until the peer asked for last says something, or the time is up.
  void sleep(int timeout_us);

 private:
  // Counts of words soon begin again at zero, so that every program and test tries that.
  static constexpr uint32_t kFirstCount = ~uint32_t{0} - 99;
  struct Word;
  struct Board;
  struct Peer {
    int pid = 0;
    std::unique_ptr<Segment> board_memory;  // none for this rank
    Board* board = nullptr;
    uint32_t told = kFirstCount, heard = kFirstCount;
    bool owes = false;
    struct Mapped {
      uint32_t generation = 0;
      std::unique_ptr<Segment> memory;
    };
    std::vector<Mapped> segments;
  };

  Node(const std::vector<int>& ranks, int me);
  static std::string card_of(const Segment& board, uint64_t token);
  void enter(int peer, const std::string& card);

  const std::vector<int> ranks_;
  const int me_;
  const std::shared_ptr<Arenas> arenas_ = std::make_shared<Arenas>();
  Segment board_memory_;
  Board* board_;
  std::vector<Peer> peers_;
  std::shared_ptr<char> stage_;
  size_t stage_nbytes_ = 0;
  int asked_ = 0;  // the peer that heard() was last called for
  bool abandoned_ = false;
  double patience_s_ = 5;  // with a peer that does not even copy what it was given
};

}  // namespace bagua
