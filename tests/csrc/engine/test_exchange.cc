// Tensors that travel together end with the bits of one after the other, however many they are.
#include "common/scaled.h"
#include "engine/exchange.h"

#include <gtest/gtest.h>

#include <cmath>

#include "collective/collective.h"
#include "engine/loopback_world.h"

namespace bagua {
namespace {

using Vectors = std::vector<std::vector<float>>;

Vectors values_of(int rank, const std::vector<size_t>& counts) {
  Vectors all;
  for (const size_t count : counts) {
    std::vector<float>& values = all.emplace_back(count);
    for (size_t i = 0; i < count; ++i)
      values[i] = std::sin(static_cast<float>(rank * 7919 + static_cast<int>(i % 100'003)));
  }
  return all;
}

RequestPtr request_of_vectors(const std::string& codec, Vectors& vectors, size_t first, size_t last,
                              float* kept) {
  RequestPtr request =
      request_of(OpKind::kAllreduce, codec + std::to_string(first) + "." + std::to_string(last));
  request->description.codec = codec;
  for (size_t i = first; i < last; ++i) add_vector(*request, vectors[i]);
  if (!codec.empty()) request->kept[0] = kept;
  return request;
}

TEST(Exchange, MoreThanTravelsAtATime) {
  const std::vector<int64_t> sizes = {scaled(5'000'000), scaled(7'000'000) + 1, scaled(40'000),
                                      scaled(6'000'000), scaled(300'000)};
  const std::vector<size_t> counts(sizes.begin(), sizes.end());
  size_t total = 0;
  for (const size_t count : counts) total += count;
  ASSERT_GT(total * sizeof(float), kAheadNbytes);
  for (const std::string codec : {"", "minmax_u8"}) {
    LoopbackWorld world(NodeOf{0, 1});
    world.run([&](int rank) {
      Engine& engine = world[rank];
      Vectors together = values_of(rank, counts), alone = together;
      std::vector<float> kept(total), kept_alone(total);
      for (int round = 0; round < 2; ++round) {
        call(engine, request_of_vectors(codec, together, 0, counts.size(), kept.data()));
        float* lost = kept_alone.data();
        for (size_t i = 0; i < counts.size(); ++i) {
          call(engine, request_of_vectors(codec, alone, i, i + 1, lost));
          lost += counts[i];
        }
      }
      EXPECT_TRUE(together == alone) << codec;
      EXPECT_TRUE(kept == kept_alone) << codec;
      EXPECT_EQ(kept[0] == 0, codec.empty());
    });
  }
}

}  // namespace
}  // namespace bagua
