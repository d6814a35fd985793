// The ring by itself; test_socket_channel.cc has it between threads.
#include "control/ring.h"

#include <gtest/gtest.h>

#include "common/memory.h"

namespace bagua {
namespace {

constexpr size_t kGuard = 4096;

// A ring, and memory after it that is nobody's.
struct Fenced {
  std::shared_ptr<char> memory = allocate_lines(Ring::kNbytes + kGuard);
  Fenced() { std::memset(memory.get(), 0, Ring::kNbytes + kGuard); }
  char* data() { return memory.get(); }
  bool intact() const {
    const char* guard = memory.get() + Ring::kNbytes;
    return std::all_of(guard, guard + kGuard, [](char c) { return c == 0; });
  }
};

std::string pattern(size_t nbytes) {
  std::string bytes(nbytes, '\0');
  for (size_t i = 0; i < nbytes; ++i) bytes[i] = static_cast<char>(i % 251 + 1);
  return bytes;
}

TEST(Ring, BytesComeOutAsTheyWentInHoweverManyThereIsRoomFor) {
  Fenced fenced;
  Ring writer(fenced.data()), reader(fenced.data());
  const std::string all = pattern(10 * Ring::kNbytes);
  std::string got;
  size_t at = 0;
  for (size_t step = 1; at < all.size(); step = step * 7 % 70001) {
    at += writer.write(all.data() + at, std::min(step, all.size() - at));
    if (step % 2 == 0 || at == all.size()) reader.read(got);
    if (step % 3 == 0) reader.read(got);
  }
  reader.read(got);
  EXPECT_TRUE(reader.empty());
  EXPECT_TRUE(got == all);
  EXPECT_TRUE(fenced.intact());
}

TEST(Ring, TakesNoMoreThanItHolds) {
  Fenced fenced;
  Ring writer(fenced.data());
  const std::string all = pattern(2 * Ring::kNbytes);
  const size_t held = writer.write(all.data(), all.size());
  EXPECT_LT(held, Ring::kNbytes);
  EXPECT_EQ(writer.write(all.data(), 1), 0u);
  EXPECT_TRUE(fenced.intact());
}

// The reader has ended and its memory reads as zeros; who writes may not know it yet.
TEST(Ring, WritesNowhereElseWhenTheReadersEndIsWipedOut) {
  Fenced fenced;
  Ring writer(fenced.data()), reader(fenced.data());
  const std::string all = pattern(Ring::kNbytes);
  std::string got;
  for (int i = 0; i < 5; ++i) {
    writer.write(all.data(), 50000);
    reader.read(got);
  }
  // As by the writer's own count, while the reader's is gone.
  uint64_t written;
  std::memcpy(&written, fenced.data(), sizeof written);
  EXPECT_EQ(written, 250000u);
  std::memset(fenced.data() + 64, 0, Ring::kNbytes - 64);
  EXPECT_EQ(writer.write(all.data(), all.size()), 0u);
  EXPECT_TRUE(fenced.intact());
}

}  // namespace
}  // namespace bagua
