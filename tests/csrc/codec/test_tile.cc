// What the threads of a GPU's block do with values that are coded one by one, done one thread after
// another: the bytes must be those of CPUs.
#include "codec/tile.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "codec/codec.h"
#include "codec/hard_values.h"

namespace bagua {
namespace {

// Memory that begins `shift` items behind where rows may lie, with marks around it.
template <class T>
struct Shifted {
  Shifted(int64_t count, size_t shift, T mark)
      : all(static_cast<size_t>(count) + 8, mark), shift(shift) {}
  T* data() { return all.data() + shift; }
  char* bytes() { return reinterpret_cast<char*>(data()); }
  bool operator==(const Shifted& other) const {
    return memcmp(all.data(), other.all.data(), all.size() * sizeof(T)) == 0;
  }
  std::vector<T> all;
  size_t shift;
};

// All threads of all tiles.
template <class S, class F>
void run_tiles(int64_t count, bool aligned, F&& f) {
  using T = Tile<S>;
  for (int64_t begin = 0; begin < count; begin += T::kValues)
    for (int thread = 0; thread < T::kThreads; ++thread) T::visit(thread, begin, count, aligned, f);
}

template <class S>
void like_a_cpu(const char* name, int64_t count, size_t shift, bool keeps) {
  using T = Tile<S>;
  using Wire = typename S::Wire;
  const Coding coding = parse_coding(name);
  std::vector<Shifted<Wire>> said;
  for (int i = 0; i < 3; ++i) {
    said.emplace_back(count, shift, Wire());
    const auto values = hard_values(2 + i, static_cast<int>(count));
    coding.encode(values.data(), count, said.back().bytes());
  }
  Shifted<float> out(count, 4, 7), tile_out = out, rest(count, 0, 0.0625f), tile_rest = rest;
  Shifted<Wire> wire(count, shift, Wire()), tile_wire = wire;
  float* const lost = keeps ? rest.data() : nullptr;
  float* const tile_lost = keeps ? tile_rest.data() : nullptr;
  const bool aligned = in_sides(tile_out.data()) && in_sides(tile_wire.data());
  ASSERT_EQ(aligned, shift % 4 == 0);
  const auto expect_same = [&] {
    EXPECT_TRUE(wire == tile_wire);
    EXPECT_TRUE(rest == tile_rest);
    EXPECT_TRUE(out == tile_out);
  };

  coding.decode(said[0].bytes(), count, out.data());
  run_tiles<S>(count, aligned,
               [&](const auto& place) { T::decode(place, said[0].data(), tile_out.data()); });
  expect_same();

  coding.encode_rest(out.data(), lost, count, wire.bytes());
  run_tiles<S>(count, aligned, [&](const auto& place) {
    T::encode(place, tile_out.data(), tile_lost, tile_wire.data());
  });
  expect_same();

  coding.add_up({said[0].bytes(), said[1].bytes(), said[2].bytes()}, {3, 1}, count, out.data());
  coding.encode_rest(out.data(), lost, count, wire.bytes());
  coding.decode(wire.bytes(), count, out.data());
  const auto from = [&](int i) { return said[static_cast<size_t>(i)].data(); };
  const auto finish = [](auto& sums) {
    for (float& sum : sums) sum /= 3;
  };
  run_tiles<S>(count, aligned, [&](const auto& place) {
    T::add_up(place, 3, from, finish, tile_lost, tile_wire.data(), tile_out.data());
  });
  expect_same();
}

template <class S>
void like_a_cpu(const char* name) {
  for (const int64_t count : {1, 7, 2047, 2048, 2 * 2048 + 31})
    for (const size_t shift : {0, 1, 4})
      for (const bool keeps : {false, true}) {
        SCOPED_TRACE(std::string(name) + ", " + std::to_string(count) + " values, " +
                     std::to_string(shift) + " behind");
        like_a_cpu<S>(name, count, shift, keeps);
        if (testing::Test::HasFailure()) return;
      }
}

TEST(Tile, CodesTheSameFloats) { like_a_cpu<Float>("raw"); }
TEST(Tile, CodesTheSameHalves) {
  like_a_cpu<Half>("fp16");
  like_a_cpu<BrainHalf>("bf16");
}

}  // namespace
}  // namespace bagua
