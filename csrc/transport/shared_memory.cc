#include "transport/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "common/errors.h"
#include "common/memory.h"
#include "transport/memory_limit.h"

namespace bagua {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMinSegment = size_t{16} << 20;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// A limit ends who writes to more than it allows, and not who asks.
bool may_have(size_t nbytes) {
  try {
    refuse_beyond_limits(nbytes);
  } catch (const UsageError&) {
    return false;
  }
  return true;
}

std::string limit_text(int resource, const char* flag) {
  rlimit limit{};
  ::getrlimit(resource, &limit);
  if (limit.rlim_cur == RLIM_INFINITY)
    return " (the memory of the machine or container is used up)";
  return std::string(" (see ulimit ") + flag + ", " + std::to_string(limit.rlim_cur) + ")";
}

[[noreturn]] void fail(const char* what, size_t nbytes, int error) {
  std::string text = "cannot " + std::string(what) + " " + std::to_string(nbytes) +
                     " bytes of shared memory: " + std::strerror(error);
  if (error == EMFILE) text += limit_text(RLIMIT_NOFILE, "-n");
  if (error == EFBIG) text += limit_text(RLIMIT_FSIZE, "-f");
  if (error == ENOMEM || error == ENOSPC) text += limit_text(RLIMIT_AS, "-v");
  throw UsageError(text + "; transport='mpi' does without");
}

}  // namespace

Segment::Segment(size_t nbytes, size_t wanted)
    : nbytes_(round_up(std::max<size_t>(nbytes, 1), kPage)) {
  refuse_beyond_limits(std::min(nbytes_, wanted));
  const int fd = ::memfd_create("bagua", MFD_CLOEXEC);
  if (fd < 0) fail("make", nbytes_, errno);
  if (::ftruncate(fd, static_cast<off_t>(nbytes_)) != 0) {
    const int error = errno;
    ::close(fd);
    fail("make", nbytes_, error);
  }
  try {
    map(fd);
  } catch (...) {
    ::close(fd);
    throw;
  }
  fd_ = fd;
  Forked<Segment>::all().add(this);
}

Segment::Card Segment::card() const {
  struct stat file{};
  ::fstat(fd_, &file);
  return {fd_, nbytes_, file.st_dev, file.st_ino};
}

Segment::Segment(int pid, const Card& card) : nbytes_(card.nbytes) {
  if (pid == ::getpid())
    Forked<Segment>::all().each([&](const Segment& own) {
      if (own.fd_ == card.fd) data_ = own.data_;
    });
  if (data_) return;
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(card.fd);
  // In another container, or when it is gone, the same numbers may name anything.
  const auto another = [&] {
    return PeerError("what process " + std::to_string(pid) +
                     " of this container has open is not the memory that was meant");
  };
  const int mine = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (mine < 0 && errno == ENXIO) throw another();  // a socket
  if (mine < 0 && (errno == ENOENT || errno == ESRCH))
    throw PeerError("process " + std::to_string(pid) + " is gone, or of another container");
  if (mine < 0) fail("open another process's", nbytes_, errno);
  try {
    struct stat file{};
    if (::fstat(mine, &file) != 0 || file.st_dev != card.device || file.st_ino != card.inode ||
        static_cast<size_t>(file.st_size) < nbytes_)
      throw another();
    map(mine);
  } catch (...) {
    ::close(mine);
    throw;
  }
  ::close(mine);
}

// On an address that huge pages can begin on, where the kernel gives them.
void Segment::map(int fd) {
  const size_t slack = nbytes_ >= kHugePage ? kHugePage : 0;
  void* room = ::mmap(nullptr, nbytes_ + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) fail("map", nbytes_, errno);
  auto* const begin = static_cast<char*>(room);
  const auto address = reinterpret_cast<size_t>(room);
  char* const data = slack ? begin + (round_up(address, kHugePage) - address) : begin;
  if (::mmap(data, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    ::munmap(room, nbytes_ + slack);
    fail("map", nbytes_, error);
  }
  const auto before = static_cast<size_t>(data - begin);
  if (before > 0) ::munmap(begin, before);
  if (before < slack) ::munmap(data + nbytes_, slack - before);
  ::madvise(data, nbytes_, MADV_HUGEPAGE);
  data_ = {data, [nbytes = nbytes_](char* p) { ::munmap(p, nbytes); }};
}

Segment::~Segment() {
  if (fd_ >= 0) Forked<Segment>::all().remove(this, [this] { ::close(fd_); });
}

// Calls look(begin, end) for what was not taken back.
template <class Look>
void Segment::each_shared(size_t begin, size_t end, Look look) const {
  for (const auto& [own_begin, own_end] : own_) {
    if (own_begin >= end) break;
    if (own_end <= begin) continue;
    if (begin < own_begin) look(begin, own_begin);
    begin = own_end;
  }
  if (begin < end) look(begin, end);
}

// What this process writes there is its own from now on, and what it has written it sees as others
// leave it until then.
bool Segment::make_own(size_t begin, size_t end) {
  return ::mmap(data() + begin, end - begin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd_,
                static_cast<off_t>(begin)) != MAP_FAILED;
}

bool Segment::take_back(size_t offset, size_t nbytes) {
  bool all = true;
  Forked<Segment>::all().meanwhile([&] {
    std::vector<std::pair<size_t, size_t>> parts;
    const size_t end = std::min(round_up(offset + nbytes, kPage), nbytes_);
    each_shared(offset / kPage * kPage, end,
                [&](size_t from, size_t to) { parts.emplace_back(from, to); });
    for (const auto& [from, to] : parts) {
      if (!may_have(to - from) || !make_own(from, to)) {
        all = false;
        continue;
      }
      own_[from] = to;
      // A page is this process's own once it is written to, if only what it had held.
      for (char* page = data() + from; page < data() + to; page += kPage) {
        char held = __atomic_load_n(page, __ATOMIC_RELAXED);
        __atomic_compare_exchange_n(page, &held, held, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
      }
    }
  });
  return all;
}

// What a child writes or frees is its own. What it has not written it sees as its parent leaves it,
// which may take pages back: it must not count on what it finds. Where the system refuses that, it
// must not touch any of it.
void Segment::in_child() {
  each_shared(0, nbytes_, [&](size_t begin, size_t end) {
    if (make_own(begin, end)) return;
    constexpr char kText[] =
        "bagua: the system refuses a forked child its copy of memory that ranks share (ulimit -d, "
        "or overcommit): it must not touch tensors in it\n";
    static bool told = false;
    if (!told) told = ::write(2, kText, sizeof kText - 1) > 0;
    ::mmap(data() + begin, end - begin, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  });
}

Arenas::Arenas() : pid_(::getpid()) {}

std::shared_ptr<char> Arenas::allocate(size_t nbytes) {
  const Piece piece = take(whole_lines(std::max<size_t>(nbytes, 1)));
  return {data_of(piece), [self = shared_from_this(), piece](char*) { self->give_back(piece); }};
}

std::shared_ptr<char> Arenas::allocate_for_good(size_t nbytes) {
  return {shared_from_this(), data_of(take(whole_lines(nbytes)))};
}

char* Arenas::data_of(const Piece& piece) {
  std::lock_guard<std::mutex> lock(mutex_);
  return segments_[piece.segment].memory->data() + piece.offset;
}

Arenas::Piece Arenas::take(size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto take_from = [&](uint32_t number, std::map<size_t, size_t>::iterator it) {
    auto& free = segments_[number].free;
    const Piece piece{number, it->first, nbytes};
    const size_t left = it->second - nbytes;
    free.erase(it);
    if (left > 0) free[piece.offset + nbytes] = left;
    return piece;
  };
  for (uint32_t number = 0; number < segments_.size(); ++number) {
    auto& free = segments_[number].free;
    for (auto it = free.begin(); it != free.end(); ++it)
      if (it->second >= nbytes) return take_from(number, it);
  }
  const uint32_t number = add_segment(std::max(nbytes, kMinSegment), nbytes);
  return take_from(number, segments_[number].free.begin());
}

uint32_t Arenas::add_segment(size_t nbytes, size_t wanted) {
  uint32_t number = 0;
  while (number < segments_.size() && segments_[number].memory) ++number;
  if (number == kMaxSegments)
    throw UsageError("there are " + std::to_string(kMaxSegments) +
                     " segments of shared memory in use already; let go of some tensors of "
                     "empty_shared(), or make fewer and larger ones");
  auto memory = std::make_unique<Segment>(nbytes, wanted);
  if (number == segments_.size()) segments_.emplace_back();
  Owned& owned = segments_[number];
  owned.memory = std::move(memory);
  ++owned.generation;
  owned.free = {{0, owned.memory->nbytes()}};
  return number;
}

void Arenas::give_back(const Piece& piece) {
  if (::getpid() != pid_) return;  // a child's copy: the parent goes on using it
  std::lock_guard<std::mutex> lock(mutex_);
  Owned& owned = segments_[piece.segment];
  // The pages go back to the system; what is taken again reads as zeros.
  const size_t begin = round_up(piece.offset, kPage);
  const size_t end = (piece.offset + piece.nbytes) / kPage * kPage;
  char* data = owned.memory->data();
  if (end > begin) {
    if (::madvise(data + begin, end - begin, MADV_REMOVE) != 0)
      std::memset(data + begin, 0, end - begin);
    std::memset(data + piece.offset, 0, begin - piece.offset);
    std::memset(data + end, 0, piece.offset + piece.nbytes - end);
  } else {
    std::memset(data + piece.offset, 0, piece.nbytes);
  }
  auto it = owned.free.emplace(piece.offset, piece.nbytes).first;
  const auto next = std::next(it);
  if (next != owned.free.end() && it->first + it->second == next->first) {
    it->second += next->second;
    owned.free.erase(next);
  }
  if (it != owned.free.begin()) {
    const auto before = std::prev(it);
    if (before->first + before->second == it->first) {
      before->second += it->second;
      owned.free.erase(it);
    }
  }
  // One unused segment of the usual size is kept for what comes next.
  const auto spare = [&](const Owned& other) { return &other != &owned && other.unused(); };
  if (owned.unused() && (owned.memory->nbytes() > kMinSegment ||
                         std::any_of(segments_.begin(), segments_.end(), spare))) {
    owned.memory.reset();
    owned.free.clear();
  }
}

Place Arenas::find(const void* data, size_t nbytes) const {
  const char* begin = static_cast<const char*>(data);
  std::lock_guard<std::mutex> lock(mutex_);
  for (uint32_t number = 0; number < segments_.size(); ++number) {
    const Owned& owned = segments_[number];
    if (!owned.memory) continue;
    const char* from = owned.memory->data();
    if (begin >= from && begin + nbytes <= from + owned.memory->nbytes())
      return {number, owned.generation, static_cast<uint64_t>(begin - from)};
  }
  return {};
}

Arenas::Mapping Arenas::mapping(uint32_t number) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Owned& owned = segments_.at(number);
  return {owned.generation, owned.memory->card()};
}

bool Arenas::take_back(const void* data, size_t nbytes) {
  const Place place = find(data, nbytes);
  if (place.nowhere() || nbytes == 0) return true;
  std::lock_guard<std::mutex> lock(mutex_);
  return segments_[place.segment].memory->take_back(place.offset, nbytes);
}

size_t Arenas::segment_count() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<size_t>(std::count_if(segments_.begin(), segments_.end(),
                                           [](const Owned& owned) { return !!owned.memory; }));
}

}  // namespace bagua
