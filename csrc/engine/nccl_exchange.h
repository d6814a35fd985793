// Exchanges of tensors that are on a GPU on all ranks, where NCCL can do them. They are given to a
// stream, and done for the engine: the device may be far behind.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.h"
#include "common/config.h"
#include "device/device.h"
#include "engine/loans.h"
#include "engine/nccl_sets.h"
#include "engine/request.h"
#include "transport/nccl.h"

namespace bagua {

class NcclExchange {
 public:
  // As for NcclSets.
  NcclExchange(const NcclLibrary* library, Device* device, const Config& config,
               NcclSets::Tell tell);
  ~NcclExchange();

  // Whether these go by NCCL, which all ranks decide alike: those of the set find out together, the
  // first time, whether they can use it, and whether they may have the devices they have. If so
  // what is run from now on is of these requests.
  bool begin(int32_t set, const std::vector<RequestPtr>& requests, Group& group,
             const NcclSets::TellAll& tell_all);
  void run(OpKind kind, const Job& job);
  // The requests' memory is a matter of their handles from then on.
  void end(const std::vector<RequestPtr>& requests);

  // Memory for a result.
  std::shared_ptr<char> allocate(size_t nbytes, const Device::User& user) {
    return device_->lent_to(user, loans_.lend(nbytes, on_));
  }
  // Memory for values that others have in registered memory; null if there is none.
  std::shared_ptr<char> allocate_registered(size_t nbytes);
  // Memory that stays as long as the exchange needs it.
  char* borrow(size_t nbytes) { return loans_.borrow(nbytes, on_); }
  void copy(char* to, const char* from, size_t nbytes) { device_->copy(to, from, nbytes, on_); }

  // Whether something is still under way on the device.
  bool under_way() const noexcept;
  // Whether there are graphs that may do what they captured at any time.
  bool captures() const { return captured_ != nullptr; }
  // When the last of it was given.
  double given_s() const { return given_s_; }
  // Something broke: ends what is under way, whoever it waits for, and waits for that. False if it
  // has not ended in seconds: then its memory, which is this object's, too, must stay.
  bool abort() noexcept;
  NcclSets& sets() { return sets_; }
  Device* device() const { return device_; }

 private:
  template <class Give>
  void reduce(const Job& job, const std::vector<NcclGroup::Piece>& results, Give&& give);
  bool takes_kernels(const Description& d) const;
  bool is_special(const Description& d) const;
  void see_to_registered(const std::vector<RequestPtr>& requests);

  const NcclLibrary* const library_;
  Device* const device_;
  const Device::Stream stream_;
  Device::Stream captured_ = nullptr;  // where others capture our work
  NcclSets sets_;
  Loans loans_;
  Device::Mark last_;
  double given_s_ = 0;

  // Of the exchange at hand.
  Group* group_ = nullptr;
  NcclGroup* nccl_ = nullptr;
  bool special_ = false;        // see is_special()
  NcclNodes* nodes_ = nullptr;  // if it is exact inside them
  Device::Stream on_ = nullptr;
};

}  // namespace bagua
