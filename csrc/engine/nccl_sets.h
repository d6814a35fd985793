// What the ranks of each process set have agreed on for their GPUs: whether NCCL moves what is
// there, and the communicators it has for that, from their beginning to their end.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/config.h"
#include "common/log.h"
#include "device/device.h"
#include "engine/nccl_nodes.h"
#include "transport/group.h"
#include "transport/nccl.h"

namespace bagua {

class NcclSets {
 public:
  using Tell = std::function<void(LogLevel, const std::string&)>;
  // Gives everyone these numbers of each, in order.
  using TellAll = std::function<std::vector<int64_t>(const std::vector<int64_t>&)>;
  struct Agreed {
    std::string refusal;             // why not even by the host's memory
    std::unique_ptr<NcclGroup> all;  // null where it cannot be
    bool has_kernels = true;         // false: a rank's GPU cannot run ours
    // For codecs that are exact inside nodes: null until they are asked for, and where they cannot
    // be.
    std::unique_ptr<NcclNodes> nodes;
    bool nodes_known = false;
  };

  // Without a library or a device it tells the other ranks so, and they do without, too. Two ranks
  // may have one device if they are allowed to, and exchange by NCCL then if that was told so, too.
  NcclSets(const NcclLibrary* library, Device* device, const Config& config, Tell tell);

  // What those of the set, which are the group's, have agreed on; null if that is nothing yet. The
  // first time they find it out together, unless nobody can be told anything now: tell_all is null
  // then. Until the next call whoever waits in a communicator waits as the group does.
  Agreed* of(int32_t set, Group& group, const TellAll* tell_all);
  // The same for what is exact inside nodes; null where that does not go by NCCL, and all know.
  NcclNodes* nodes_of(Agreed& agreed, const TellAll* tell_all);
  // Why those of the set exchange nothing that is on a device, which is empty if they do.
  const std::string& refusal(int32_t set) const;

  // Throws a PeerError if NCCL has noticed a failure.
  void check();
  // Ends all at once, whoever they wait for. False if some have not ended in seconds.
  bool abort() noexcept;
  // A process set is gone. What NCCL keeps for it goes when nothing is under way any more: as long
  // as some is left, tidy() should be called from time to time. It never waits.
  void forget(int32_t set);
  bool has_left() const;
  void tidy() { end_left(/*is_last=*/false); }
  // Nothing comes any more. What was given must be done. Whether what that began is under way: for
  // seconds, as NCCL's threads may still have something for other ranks.
  void finish();
  bool ends();
  // Ends what has been left so far, and gives that its moment. Who ends this object calls it
  // before, and then abort(), which ends all at once.
  void end_now();

 private:
  // Ranks of a set, by index, ascending.
  using Members = std::vector<int>;

  void agree(int32_t set, const TellAll& tell_all);
  void make_nodes(Agreed& agreed, const TellAll& tell_all);
  bool is_first(const Members& members) const;
  bool give_id(NcclId& id);
  std::unique_ptr<NcclGroup> connect(const Members& members, const NcclId& id,
                                     std::string& why_not);
  std::unique_ptr<NcclGroup> connect(const Members& members, const TellAll& tell_all,
                                     std::string& why_not);
  // Calls each(group), which may be taken, for all groups of a set.
  template <class Each>
  static void for_each_group(Agreed& agreed, Each&& each);
  void end_left(bool is_last);
  void end_last();

  const NcclLibrary* const library_;
  Device* const device_;
  const bool wanted_, shares_, allowed_;
  const Tell tell_;
  Group* group_ = nullptr;  // of the exchange at hand
  std::map<int32_t, Agreed> sets_;
  NcclId id_;  // that nobody has used
  bool has_id_ = false;
  std::vector<std::unique_ptr<NcclGroup>> left_;  // that nobody gives anything to
  // Those of them that are being ended, each by a thread.
  struct Ending {
    std::atomic<int> count{0};
    std::atomic<bool> hurries{false};
  };
  const std::shared_ptr<Ending> ending_ = std::make_shared<Ending>();
  double finished_s_ = 0;
};

}  // namespace bagua
