#include "kernel/stream.h"

#include <gtest/gtest.h>

#include <vector>

namespace bagua {
namespace {

TEST(Stream, CopiesEveryLengthAtEveryAlignment) {
  std::vector<char> from(3000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7 + 1);
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (!has_isa(static_cast<Isa>(isa))) continue;
    for (const auto copy : {plain_copy, stream_copy})
      for (const size_t nbytes : {0, 1, 63, 64, 65, 128, 700, 1024, 1025, 2111})
        for (size_t to_at = 0; to_at < 65; ++to_at)
          for (const size_t from_at : {0, 1, 16, 61}) {
            std::vector<char> to(2300, 'g'), expected = to;
            std::copy_n(from.begin() + static_cast<long>(from_at), nbytes,
                        expected.begin() + static_cast<long>(to_at));
            copy(to.data() + to_at, from.data() + from_at, nbytes, static_cast<Isa>(isa));
            stream_fence();
            ASSERT_EQ(to, expected) << isa_name(static_cast<Isa>(isa)) << " " << nbytes << " bytes";
          }
  }
}

}  // namespace
}  // namespace bagua
