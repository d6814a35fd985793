// Tensors on a device, exchanged in memory of the host: they come there in chunks, and their
// results go back, while the exchange goes on with other chunks.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "engine/request.h"
#include "transport/group.h"
#include "transport/shared_memory.h"

namespace bagua {

class Staging {
 public:
  using Warn = std::function<void(const std::string&)>;

  // What ranks of this machine may look at comes from `arenas`, where there are any.
  Staging(Device& device, std::shared_ptr<Arenas> arenas, Warn warn);
  ~Staging();
  Staging(const Staging&) = delete;

  // Starts to bring what the requests give, unless only results matter here, and makes their parts
  // places in the host's memory.
  void begin(const std::vector<RequestPtr>& requests, Group& group, bool brings);
  // Where in the host's memory a result is to be made whose size only the exchange tells, and which
  // is then given to memory on the device.
  char* place_for(char* result, size_t nbytes);
  std::shared_ptr<char> allocate(size_t nbytes, const Device::User& user) {
    return device_.lent_to(user, device_.lend(nbytes));
  }
  // Whether these values are brought, or results that will be given.
  bool holds(const char* data) const;
  // Waits until these bytes are there; all of them, without an argument.
  void need(const char* data, size_t nbytes);
  void need();
  // These bytes of a result are final. Of a result all bytes are given like this, or none.
  void give(const char* data, size_t nbytes);
  // Gives the other results, and marks for whoever waits for the handles where all of them are.
  // Once: others may read the marks from then on.
  void end();
  // Something broke: waits for results that are on their way, if the device still works. False if
  // they have not come in seconds: what they follow may never end.
  bool settle() noexcept { return device_.drains_in_time(out_); }

 private:
  // One tensor.
  struct Result {
    const char* from;
    char* to;  // on the device
    size_t nbytes;
    bool given = false;
  };
  struct Chunk {
    const char* end;  // in the host's memory
    Device::Mark mark;
  };
  struct Memory {
    std::shared_ptr<char> data;
    size_t nbytes = 0;
    Device::Mark given;  // what was in it last has left
  };
  char* room_in(Memory& memory, size_t nbytes, bool host_writes_first);
  std::vector<Result>::iterator after(const char* place);
  void bring(char* to, const char* from, size_t nbytes);

  Device& device_;
  const std::shared_ptr<Arenas> arenas_;
  const Warn warn_;
  const Device::Stream in_, out_;
  Memory memories_[2];               // one is left while the other is entered
  std::deque<Memory> of_places_[2];  // of results one by one, likewise
  int turn_ = 0;

  // Of the exchange at hand.
  Group* group_ = nullptr;
  std::vector<RequestPtr> requests_;
  std::vector<std::shared_ptr<void>> keepalives_;  // of what is brought
  std::vector<Chunk> chunks_;                      // as they come, and as they lie in memory
  size_t chunks_there_ = 0;
  std::vector<Result> results_;  // as they lie in memory
  size_t places_ = 0;            // of them
  size_t tensors_ = 0;           // that get one
  bool ended_ = true;
  bool warned_ = false;
};

}  // namespace bagua
