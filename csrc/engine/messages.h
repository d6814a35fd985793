// What ranks tell rank 0 (reports) and what rank 0 tells them (decisions), and their bytes.
#pragma once

#include <string>
#include <vector>

#include "common/bytes.h"
#include "engine/request.h"

namespace bagua {

enum class MessageType : uint8_t {
  kReport,    // to rank 0: requests that are ready here
  kDecision,  // from rank 0: what all members of a process set do next, in this order
  kAwait,     // to rank 0: I am waiting; is everyone alive?
  kPing,      // answered with kPong by any rank whose process runs
  kPong,      // with Traffic, if all this rank does is wait
  kFault,     // a failure nobody survives: poison the engine with this text
  kBye,       // I shut down on purpose; rank 0 answers with it after its last decision
  kLeaving,   // to rank 0, straight: my kBye is on its way by another rank
};

// Identifies a request across ranks: a name, or the position among the unnamed ones. A join has
// neither.
struct Key {
  std::string name;
  uint64_t seq = 0;
  bool is_join() const { return name.empty() && seq == 0; }
  bool operator<(const Key& other) const {
    return seq != other.seq ? seq < other.seq : name < other.name;
  }
};

// Requests of one process set that became ready on one rank. A request seen for the first time
// travels whole; afterwards it is one bit, or for an unnamed one its position and id.
struct Report {
  struct Full {
    Key key;
    std::string description;  // encoded
    std::string refusal;      // not empty: this rank cannot take part, and why
    bool for_good = false;    // nor ever in anything whose name begins so
  };
  struct Again {
    uint64_t seq;
    int32_t id;
  };
  int32_t set = 0;
  std::vector<int32_t> ids;  // named and known; travel as a bit-vector
  std::vector<Again> unnamed;
  std::vector<Full> full;
  bool join = false;
  bool last = false;  // the set is removed here, and this rank says no more of it

  bool empty() const { return ids.empty() && unnamed.empty() && full.empty() && !join && !last; }
  void clear();
  void encode(Writer& w) const;
  static Report decode(Reader& r);
};

struct Decision {
  // The id of a request that is agreed without being remembered: there are too many already. Its
  // definition and its place among the agreed come in the same order.
  static constexpr int32_t kForgotten = -1;
  struct Definition {
    int32_t id;
    std::string name;  // empty for an unnamed request
    std::string description;
  };
  struct Agreed {
    int32_t id;
    uint64_t seq;  // 0 for a named request
    bool as_bit() const { return seq == 0 && id != kForgotten; }
  };
  struct Rejection {
    Key key;
    ErrorKind kind;
    std::string text;
    // Ranks whose open request this ends. Another rank may by now have one of the same name that
    // the rejection does not mean.
    std::vector<int32_t> ranks;
  };
  int32_t set = 0;
  std::vector<Definition> definitions;
  std::vector<Agreed> agreed;
  std::vector<Rejection> rejections;
  int32_t last_joined = -1;  // not negative: every member has joined, this one last

  // Whether it ends joins: who has joined then stands in for nothing more.
  bool ends_joins() const;
  bool empty() const {
    return definitions.empty() && agreed.empty() && rejections.empty() && last_joined < 0;
  }
  void encode(Writer& w) const;
  static Decision decode(Reader& r);
};

// How many messages of each a rank and rank 0 have exchanged, as one of the two knows.
struct Traffic {
  int64_t reports = 0, decisions = 0;
};

std::string text_message(MessageType type, std::string_view text = {});

}  // namespace bagua
