// Exchanges of tensors that are on a GPU on all ranks, where NCCL can do them. They are given to a
// stream, and done for the engine: the device may be far behind.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/collective.h"
#include "common/config.h"
#include "common/log.h"
#include "device/device.h"
#include "engine/nccl_nodes.h"
#include "engine/request.h"
#include "transport/nccl.h"

namespace bagua {

class NcclExchange {
 public:
  using Tell = std::function<void(LogLevel, const std::string&)>;
  // Gives everyone these numbers of each, in order.
  using TellAll = std::function<std::vector<int64_t>(const std::vector<int64_t>&)>;

  // Without a library or a device it tells the other ranks so, and they do without, too. Two ranks
  // may have one device if they are allowed to, and exchange by NCCL then if that was told so, too.
  NcclExchange(const NcclLibrary* library, Device* device, const Config& config, Tell tell);
  ~NcclExchange();

  // Whether these go by NCCL, which all ranks decide alike: those of the set find out together, the
  // first time, whether they can use it, and whether they may have the devices they have. If so
  // what is run from now on is of these requests.
  bool begin(int32_t set, const std::vector<RequestPtr>& requests, Group& group,
             const TellAll& tell_all);
  // Why those of the set exchange nothing that is on a device, which is empty if they do.
  const std::string& refusal(int32_t set) const;
  void run(OpKind kind, const Job& job);
  // The requests' memory is a matter of their handles from then on.
  void end(const std::vector<RequestPtr>& requests);

  // Memory for a result.
  std::shared_ptr<char> allocate(size_t nbytes, const Device::User& user) {
    return device_->lend(nbytes, user);
  }
  // Memory for values that others have in registered memory; null if there is none.
  std::shared_ptr<char> allocate_registered(size_t nbytes);
  // Memory that stays as long as the exchange needs it.
  char* borrow(size_t nbytes);
  void copy(char* to, const char* from, size_t nbytes) { device_->copy(to, from, nbytes, on_); }

  // Whether something is still under way on the device.
  bool under_way() const noexcept;
  // Whether there are graphs that may do what they captured at any time.
  bool captures() const { return captured_ != nullptr; }
  // When the last of it was given.
  double given_s() const { return given_s_; }
  // Throws a PeerError if NCCL has noticed a failure.
  void check();
  // Something broke: ends what is under way, whoever it waits for, and waits for that. False if it
  // has not ended in seconds: then its memory, which is this object's, too, must stay.
  bool abort() noexcept;
  // A process set is gone. What NCCL keeps for it goes when nothing is under way any more: as long
  // as some is left, tidy() should be called from time to time. It never waits.
  void forget(int32_t set);
  bool has_left() const;
  void tidy();
  // Nothing comes any more. What was given must be done. Whether what that began is under way: for
  // seconds, as NCCL's threads may still have something for other ranks.
  void finish();
  bool ends();
  Device* device() const { return device_; }

 private:
  // What the ranks of a process set have agreed on.
  struct Agreed {
    std::string refusal;             // why not even by the host's memory
    std::unique_ptr<NcclGroup> all;  // null where it cannot be
    bool has_kernels = true;         // false: a rank's GPU cannot run ours
    // For codecs that are exact inside nodes: null until they are asked for, and where they cannot
    // be.
    std::unique_ptr<NcclNodes> nodes;
    bool nodes_known = false;
  };

  std::shared_ptr<char> lend(size_t nbytes);
  void end_left(bool is_last);
  void end_last();
  void agree(int32_t set, const TellAll& tell_all);
  // Ranks of a set, by index, ascending.
  using Members = std::vector<int>;
  bool is_first(const Members& members) const;
  bool give_id(NcclId& id);
  std::unique_ptr<NcclGroup> connect(const Members& members, const NcclId& id,
                                     std::string& why_not);
  std::unique_ptr<NcclGroup> connect(const Members& members, const TellAll& tell_all,
                                     std::string& why_not);
  // Calls each(group), which may be taken, for all groups of a set.
  template <class Each>
  static void for_each_group(Agreed& agreed, Each&& each);
  template <class Give>
  void reduce(const Job& job, const std::vector<NcclGroup::Piece>& results, Give&& give);
  bool takes_kernels(const Description& d) const;
  bool is_special(const Description& d) const;
  void make_nodes(Agreed& agreed, const TellAll& tell_all);
  void see_to_registered(const std::vector<RequestPtr>& requests);

  const NcclLibrary* const library_;
  Device* const device_;
  const bool wanted_, shares_, allowed_;
  const Tell tell_;
  const Device::Stream stream_;
  Device::Stream captured_ = nullptr;  // where others capture our work
  std::map<int32_t, Agreed> sets_;
  std::vector<std::unique_ptr<NcclGroup>> left_;  // that nobody gives anything to
  // Those of them that are being ended, each by a thread.
  struct Ending {
    std::atomic<int> count{0};
    std::atomic<bool> hurries{false};
  };
  const std::shared_ptr<Ending> ending_ = std::make_shared<Ending>();
  NcclId id_;  // that nobody has used
  bool has_id_ = false;
  Device::Mark last_;
  double given_s_ = 0, finished_s_ = 0;
  // Of the device, for the exchange at hand; and by size, of earlier ones, which the next may use
  // though they are under way: what is given to our stream is done in order.
  std::vector<std::pair<size_t, std::shared_ptr<char>>> borrowed_;
  std::multimap<size_t, std::shared_ptr<char>> returned_;

  // Of the exchange at hand.
  Group* group_ = nullptr;
  NcclGroup* nccl_ = nullptr;
  bool special_ = false;        // see is_special()
  NcclNodes* nodes_ = nullptr;  // if it is exact inside them
  Device::Stream on_ = nullptr;
};

}  // namespace bagua
