// What a GPU's warps do with chunks of topk, done by threads of the host that stand for their
// lanes: the bytes must be those of CPUs.
#include "codec/warp_topk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "codec/fp8_e4m3.h"
#include "codec/hard_values.h"
#include "codec/host_warp.h"
#include "codec/minmax_u4.h"
#include "codec/minmax_u8.h"
#include "codec/singles.h"

namespace bagua {
namespace {

template <class V>
struct TopKLikeACpu {
  explicit TopKLikeACpu(const char* values_codec, int kept, int n, size_t shift = 0)
      : coding(parse_coding("topk:" + std::to_string(kept) + ":" + values_codec)),
        n(n),
        shift(shift),
        part(part_of(coding, n)),
        room_nbytes(static_cast<size_t>(Desk::nbytes(part_of(coding, kChunk)))),
        memory(room_nbytes + 32, 'x') {}
  static KeptPart part_of(const Coding& coding, int n) {
    const int64_t kept = TopK::kept_of(coding, n);
    return {static_cast<int>(kept), static_cast<int>(coding.values->wire_nbytes(coding, kept))};
  }
  // In the memory of a whole chunk, which a kernel has, whatever the length of the last one.
  char* desk_memory() {
    void* begin = memory.data();
    size_t room = memory.size();
    return static_cast<char*>(std::align(16, room_nbytes, begin, room));
  }
  Desk desk() { return Desk(desk_memory(), part); }
  void expect_nothing_behind_the_desk() {
    for (char* at = desk_memory() + room_nbytes; at < memory.data() + memory.size(); ++at)
      ASSERT_EQ(*at, 'x');
  }
  // A wire that begins anywhere.
  std::vector<char> room() const {
    return std::vector<char>(static_cast<size_t>(coding.wire_nbytes(n)) + 8, 'x');
  }
  // Values that begin in whole rows, or not.
  std::vector<float> values(float value) const {
    return std::vector<float>(static_cast<size_t>(n) + 4, value);
  }
  float* at(std::vector<float>& x) const { return x.data() + shift; }
  static const uint8_t* said(const std::vector<char>& wire) {
    return reinterpret_cast<const uint8_t*>(wire.data() + 1);
  }

  void encode(const std::vector<float>& in) {
    for (const bool keeps : {false, true}) {
      std::vector<float> rest = values(0.0625f), warp_rest = rest, x = values(9);
      std::vector<float> out = values(7), warp_out = out;
      std::copy(in.begin(), in.end(), at(x));
      std::vector<char> wire = room(), warp_wire = wire;
      if (keeps) {
        coding.encode_rest(at(x), at(rest), n, wire.data() + 1);
      } else {
        coding.encode(at(x), n, wire.data() + 1);
      }
      coding.decode(wire.data() + 1, n, at(out));
      const Desk mine = desk();
      run_warp([&](const HostWarp& warp) {
        ChunkValues all;
        float* lost = keeps ? at(warp_rest) : nullptr;
        load_chunk(warp, mine, at(x), lost, n, all);
        auto* to = reinterpret_cast<uint8_t*>(warp_wire.data() + 1);
        encode_chunk<V>(warp, mine, all, n, to, nullptr, lost);
        decode_chunk<V>(warp, mine, to, n, at(warp_out));
      });
      expect_nothing_behind_the_desk();
      ASSERT_EQ(wire, warp_wire);
      ASSERT_TRUE(same_bits(rest, warp_rest));
      ASSERT_TRUE(same_bits(out, warp_out));
    }
  }

  void add_up(const std::vector<std::vector<float>>& ins) {
    std::vector<std::vector<char>> wires(ins.size(), room());
    std::vector<const char*> from;
    for (size_t i = 0; i < ins.size(); ++i) {
      coding.encode(ins[i].data(), n, wires[i].data() + 1);
      from.push_back(wires[i].data() + 1);
    }
    std::vector<float> sum = values(7), warp_sum = sum, rest = values(0.0625f), warp_rest = rest;
    std::vector<char> wire = room(), warp_wire = wire;
    coding.add_up(from, {1, 1}, n, at(sum));
    coding.encode_rest(at(sum), at(rest), n, wire.data() + 1);
    std::vector<float> out = values(8), warp_out = out;
    coding.decode(wire.data() + 1, n, at(out));
    const Desk mine = desk();
    run_warp([&](const HostWarp& warp) {
      ChunkValues all;
      const auto wire_of = [&](int i) { return said(wires[static_cast<size_t>(i)]); };
      add_up_chunk<V>(warp, mine, static_cast<int>(wires.size()), wire_of, n, all);
      store_chunk(warp, mine, all, n, at(warp_sum));
      load_on_top<TopKChunk>(warp, at(warp_rest), n, all);
      auto* to = reinterpret_cast<uint8_t*>(warp_wire.data() + 1);
      encode_chunk<V>(warp, mine, all, n, to, at(warp_out), at(warp_rest));
    });
    expect_nothing_behind_the_desk();
    ASSERT_TRUE(same_bits(out, warp_out));
    ASSERT_TRUE(same_bits(sum, warp_sum));
    ASSERT_TRUE(same_bits(rest, warp_rest));
    ASSERT_EQ(wire, warp_wire);
  }

  const Coding coding;
  const int n;
  const size_t shift;
  const KeptPart part;
  const size_t room_nbytes;
  std::vector<char> memory;
};

// Thirty-two threads take turns: everything is tried with one codec, the hard things with all.
template <class V>
void topk_like_a_cpu(const char* values_codec) {
  const bool all = std::string(values_codec) == "raw";
  for (const int kept : all ? std::vector<int>{1, 41, 768, 1500, 4096} : std::vector<int>{41, 600})
    for (const int n : {5, 777, 4096})
      for (int kind = 0; kind < (all ? kKinds : 4); ++kind) {
        TopKLikeACpu<V> topk(values_codec, kept, n, static_cast<size_t>(kind % 2));
        topk.encode(hard_values(kind, n));
        if (kind % 3 == 0)
          topk.add_up({hard_values(0, n), hard_values(4, n), hard_values(5, n), hard_values(0, n),
                       hard_values(6, n), hard_values(7, n)});
        ASSERT_FALSE(::testing::Test::HasFatalFailure())
            << kept << " of " << n << ", kind " << kind << ", " << values_codec;
      }
}

TEST(WarpTopK, KeepsTheSameValues) { topk_like_a_cpu<KeptSingles<Float>>("raw"); }
TEST(WarpTopK, KeepsTheSameHalves) {
  topk_like_a_cpu<KeptSingles<Half>>("fp16");
  topk_like_a_cpu<KeptSingles<BrainHalf>>("bf16");
}
TEST(WarpTopK, KeepsTheSameBlocks) {
  topk_like_a_cpu<KeptBlocks<MinMaxU8>>("minmax_u8");
  topk_like_a_cpu<KeptBlocks<MinMaxU4>>("minmax_u4");
  topk_like_a_cpu<KeptBlocks<Fp8E4M3>>("fp8_e4m3");
}

// Which of equal values are kept, where there are more of them than fit.
TEST(WarpTopK, OfEqualValuesTheFirstAreKept) {
  std::mt19937 random(3);
  for (const int distinct : {1, 2, 3, 17}) {
    std::vector<float> in(4096);
    for (float& x : in) x = static_cast<float>(random() % 2 ? 1 : -1) * (random() % distinct);
    for (const int kept : {1, 100, 1000, 4095}) {
      TopKLikeACpu<KeptSingles<Float>> topk("raw", kept, 4096);
      topk.encode(in);
      ASSERT_FALSE(::testing::Test::HasFatalFailure()) << kept << ", " << distinct;
    }
  }
}

// A short chunk, of which all values may be kept, in the memory that a whole one has.
TEST(WarpTopK, TheLastChunkHasRoom) {
  for (const char* values : {"raw", "fp16", "minmax_u8", "minmax_u4"})
    for (int kept = 1; kept <= kChunk; kept += kept < 512 ? 1 : 97) {
      const Coding coding = parse_coding("topk:" + std::to_string(kept) + ":" + values);
      const auto part = [&](int n) { return TopKLikeACpu<KeptSingles<Float>>::part_of(coding, n); };
      const int whole = Desk::nbytes(part(kChunk));
      for (int n = 1; n < kChunk; n += 61)
        ASSERT_LE(Desk::nbytes(part(n)), whole) << kept << " of " << n << ", " << values;
      ASSERT_LE(whole, 99 << 10);  // what each GPU has, from 8.0 on
    }
  for (const int kept : {100, 123, 205})
    for (const int n : {1500, 2600, 3277})
      TopKLikeACpu<KeptSingles<Float>>("raw", kept, n)
          .encode(std::vector<float>(static_cast<size_t>(n)));
}

// Whatever bits they have, which processors do not agree on.
TEST(WarpTopK, OfNaNsTheFirstAreKept) {
  std::vector<float> in(777, 1.0f);
  const std::vector<size_t> places = {5, 9, 20, 700};
  for (size_t i = 0; i < places.size(); ++i)
    in[places[i]] = bits_float((i % 2 ? 0xffc00000u : 0x7fc00000u) + static_cast<uint32_t>(i));
  TopKLikeACpu<KeptSingles<Float>> topk("raw", 11, 777);  // three of so many
  topk.encode(in);
  std::vector<char> wire = topk.room();
  topk.coding.encode(in.data(), 777, wire.data());
  uint16_t first[3];
  memcpy(first, wire.data(), sizeof first);
  EXPECT_EQ(std::vector<size_t>(first, first + 3), (std::vector<size_t>{5, 9, 20}));
}

// Values that all lie in one lane, whose column is the longest that there can be.
TEST(WarpTopK, AllOfALane) {
  for (const int lane : {0, 31}) {
    std::vector<float> in(4096, 0.5f);
    for (int k = 0; k < ChunkLanes::kEach; ++k)
      in[static_cast<size_t>(ChunkLanes::place(lane, k))] = 2.0f + static_cast<float>(k);
    TopKLikeACpu<KeptSingles<Float>>("raw", 128, 4096).encode(in);
  }
}

// More are kept than reach what is the greatest of some side.
TEST(WarpTopK, OneLargeValueOfEachSide) {
  for (const int kept : {41, 768, 1025, 1500}) {
    std::vector<float> in(4096, 0.25f);
    for (size_t i = 0; i < in.size(); i += kSideBySide) in[i] = 1.0f + static_cast<float>(i);
    TopKLikeACpu<KeptSingles<Float>>("raw", kept, 4096).encode(in);
  }
}

// A wire that is not what it should be changes nothing past the values.
TEST(WarpTopK, PlacesPastTheEndAreIgnored) {
  TopKLikeACpu<KeptSingles<Float>> topk("raw", 41, 777);
  std::vector<char> wire = topk.room();
  for (int i = 0; i < topk.part.count; ++i) {
    const auto place = static_cast<uint16_t>(i % 2 ? 777 : 0xffff);
    memcpy(wire.data() + 1 + 2 * i, &place, sizeof place);
  }
  std::vector<float> out = topk.values(7);
  const Desk desk = topk.desk();
  run_warp([&](const HostWarp& warp) {
    decode_chunk<KeptSingles<Float>>(warp, desk, topk.said(wire), topk.n, out.data());
  });
  std::vector<float> expected(777, 0);
  expected.resize(out.size(), 7);
  EXPECT_EQ(out, expected);
}

}  // namespace
}  // namespace bagua
