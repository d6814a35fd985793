#include "transport/node.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>

#include "common/bytes.h"
#include "common/clock.h"
#include "common/errors.h"
#include "common/memory.h"
#include "common/random.h"

namespace bagua {

// A rank's words to one peer. The notes take turns, so that one is never written while read.
struct alignas(64) Node::Word {
  std::atomic<uint32_t> count{kFirstCount};
  Note notes[2];
};

// What a rank shows to the others; they only read, but for the bell.
struct Node::Board {
  uint64_t token;  // proves that this is the memory that was meant
  alignas(64) std::atomic<uint32_t> bell{kFirstCount};
  std::atomic<uint32_t> sleeping{0};
  Arenas::Mapping segments[Arenas::kMaxSegments];
  alignas(64) Word words[1];  // one per peer

  static size_t nbytes(size_t peers) { return sizeof(Board) + peers * sizeof(Word); }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "words must work between processes");

namespace {

long futex(std::atomic<uint32_t>& word, int op, uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op, value, timeout, nullptr, 0);
}

}  // namespace

Node::Node(const std::vector<int>& ranks, int me)
    : ranks_(ranks),
      me_(me),
      board_memory_(Board::nbytes(ranks.size())),
      board_(new (board_memory_.data()) Board),
      peers_(ranks.size()) {
  for (size_t i = 1; i < ranks.size(); ++i) new (&board_->words[i]) Word;
}

std::string Node::card_of(const Segment& board, uint64_t token) {
  Writer w;
  w.put<int64_t>(::getpid());
  w.put(board.card());
  w.put<uint64_t>(token);
  return std::string(w.bytes());
}

void Node::enter(int peer, const std::string& card) {
  Reader r(card);
  Peer& p = peers_[static_cast<size_t>(peer)];
  p.pid = static_cast<int>(r.get<int64_t>());
  const auto board = r.get<Segment::Card>();
  const auto token = r.get<uint64_t>();
  if (peer == me_) {
    p.board = board_;
    return;
  }
  p.board_memory = std::make_unique<Segment>(p.pid, board);
  p.board = reinterpret_cast<Board*>(p.board_memory->data());
  if (p.board->token != token)
    throw InternalError("process " + std::to_string(p.pid) +
                        " of this container is not the one that was meant");
}

std::unique_ptr<Node> Node::meet(const std::vector<int>& ranks, int rank, const Exchange& exchange,
                                 std::string& why_not) {
  const auto me = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  std::unique_ptr<Node> node;
  std::string card, problem;
  try {
    node.reset(new Node(ranks, static_cast<int>(me)));
    fill_randomly(&node->board_->token, sizeof(uint64_t));
    card = card_of(node->board_memory_, node->board_->token);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  const std::vector<std::string> cards = exchange(card);
  try {
    // Who has no card will say why.
    for (size_t i = 0; i < cards.size() && problem.empty(); ++i)
      if (!cards[i].empty()) node->enter(static_cast<int>(i), cards[i]);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  // All of them or none.
  const std::vector<std::string> problems = exchange(problem);
  for (size_t i = 0; i < problems.size() && why_not.empty(); ++i)
    if (!problems[i].empty()) why_not = "rank " + std::to_string(ranks[i]) + ": " + problems[i];
  if (!why_not.empty()) node.reset();
  return node;
}

Node::~Node() {
  const double deadline_s = now_s() + patience_s_;
  for (size_t peer = 0; peer < peers_.size(); ++peer)
    while (peers_[peer].owes && !abandoned_ && now_s() < deadline_s)
      if (heard(static_cast<int>(peer))) {
        peers_[peer].owes = false;
      } else {
        sleep(1000);
      }
  const auto reads = [](const Peer& peer) { return peer.owes; };
  if (std::any_of(peers_.begin(), peers_.end(), reads)) abandon();
}

void Node::abandon() {
  abandoned_ = true;
  if (stage_) keep_for_ever(stage_);
}

bool Node::take_back(const void* data, size_t nbytes) {
  const auto is_other = [](const Peer& peer) { return peer.pid != ::getpid(); };
  if (std::none_of(peers_.begin(), peers_.end(), is_other)) return true;
  return arenas_->take_back(data, nbytes);
}

int Node::index_of(int rank) const {
  const auto it = std::lower_bound(ranks_.begin(), ranks_.end(), rank);
  return it != ranks_.end() && *it == rank ? static_cast<int>(it - ranks_.begin()) : -1;
}

bool Node::alive(int peer) const {
  return ::kill(peers_[static_cast<size_t>(peer)].pid, 0) == 0 || errno != ESRCH;
}

void Node::tell(int peer, const Note& note) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  // Whoever hears of a place must find out how to map it. Nobody reads the old entry any more: a
  // number is used again when nothing of its segment is in use.
  if (!note.place.nowhere()) {
    Arenas::Mapping& entry = board_->segments[note.place.segment];
    if (entry.generation != note.place.generation) entry = arenas_->mapping(note.place.segment);
  }
  Word& word = board_->words[peer];
  const uint32_t count = ++p.told;
  word.notes[count % 2] = note;
  // Either we see that the peer sleeps, or it sees this word before it does.
  word.count.store(count, std::memory_order_seq_cst);
  if (p.board->sleeping.load(std::memory_order_seq_cst) == 0) return;
  p.board->bell.fetch_add(1, std::memory_order_relaxed);
  futex(p.board->bell, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Node::heard(int peer) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  asked_ = peer;
  if (p.board->words[me_].count.load(std::memory_order_acquire) == p.heard) return false;
  ++p.heard;
  return true;
}

Note Node::note_of(int peer) const {
  const Peer& p = peers_[static_cast<size_t>(peer)];
  return p.board->words[me_].notes[p.heard % 2];
}

char* Node::at(int peer, const Place& place) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  if (place.segment >= Arenas::kMaxSegments)
    throw InternalError("a peer names a segment that cannot be");
  if (p.segments.size() <= place.segment) p.segments.resize(place.segment + 1);
  Peer::Mapped& mapped = p.segments[place.segment];
  if (!mapped.memory || mapped.generation != place.generation) {
    const Arenas::Mapping& entry = p.board->segments[place.segment];
    mapped.memory.reset();
    mapped.memory = std::make_unique<Segment>(p.pid, entry.card);
    mapped.generation = place.generation;
  }
  return mapped.memory->data() + place.offset;
}

char* Node::stage(size_t nbytes) {
  if (stage_nbytes_ < nbytes) {
    stage_.reset();
    stage_ = arenas_->allocate(nbytes);
    stage_nbytes_ = nbytes;
  }
  return stage_.get();
}

void Node::sleep(int timeout_us) {
  const uint32_t bell = board_->bell.load(std::memory_order_relaxed);
  board_->sleeping.store(1, std::memory_order_seq_cst);
  const Peer& p = peers_[static_cast<size_t>(asked_)];
  if (p.board->words[me_].count.load(std::memory_order_seq_cst) == p.heard) {
    const timespec timeout{timeout_us / 1000000, timeout_us % 1000000 * 1000L};
    futex(board_->bell, FUTEX_WAIT, bell, &timeout);
  }
  board_->sleeping.store(0, std::memory_order_relaxed);
}

}  // namespace bagua
