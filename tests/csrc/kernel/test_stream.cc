#include "kernel/stream.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "kernel/row.h"

namespace bagua {
namespace {

TEST(Stream, CopiesEveryLengthAtEveryAlignment) {
  std::vector<size_t> lengths(131);
  std::iota(lengths.begin(), lengths.end(), size_t{0});
  lengths.insert(lengths.end(), {191, 192, 193, 700, 1023, 1024, 1025, 1087, 1088, 2111});
  std::vector<char> bytes(2111);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + 1);
  const std::vector<char> nothing(bytes.size(), '\x5a');
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (!has_isa(static_cast<Isa>(isa))) continue;
    for (const auto copy : {plain_copy, stream_copy})
      for (const size_t nbytes : lengths) {
        Row to(nbytes), from(nbytes, '\x3c');
        for (const size_t from_at : {0, 1, 16, 61})
          for (size_t to_at = 0; to_at < kLineNbytes; ++to_at) {
            to.place(to_at, nothing.data(), nbytes);
            copy(to.at(), from.place(from_at, bytes.data(), nbytes), nbytes, static_cast<Isa>(isa));
            stream_fence();
            ASSERT_TRUE(to.is(bytes.data()) && to.intact_around())
                << isa_name(static_cast<Isa>(isa)) << ", " << nbytes << " bytes from " << from_at
                << " to " << to_at;
          }
      }
  }
}

// plain_copy leaves so many bytes to the library.
TEST(Stream, CopiesAroundTheMostThatIsCopiedByLines) {
  constexpr size_t kMost = 8 << 20;
  std::vector<char> bytes(kMost + 1);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + i / 4096);
  Row to(bytes.size());
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (!has_isa(static_cast<Isa>(isa))) continue;
    for (const size_t nbytes : {kMost - 1, kMost, kMost + 1}) {
      std::memset(to.place(3, bytes.data(), nbytes), 0x5a, nbytes);
      plain_copy(to.at(), bytes.data(), nbytes, static_cast<Isa>(isa));
      ASSERT_TRUE(to.is(bytes.data()) && to.intact_around()) << nbytes;
    }
  }
}

}  // namespace
}  // namespace bagua
