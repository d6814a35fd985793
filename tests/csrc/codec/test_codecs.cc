// What collectives do with codecs: add up what arrives, and keep what encoding loses for the next
// time. The bytes themselves are checked from Python, by tests/common/test_codecs.py.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "common/errors.h"
#include "common/scaled.h"
#include "kernel/stream.h"

namespace bagua {
namespace {

using Numbers = std::vector<float>;

std::vector<Coding> codings() {
  std::vector<Coding> all;
  for (const Codec& codec : codecs()) all.push_back(parse_coding(codec.name));
  all.push_back(parse_coding("topk:600:minmax_u8"));
  return all;
}

// Calls f(coding, isa) for every codec and instruction set, until something fails.
template <class F>
void for_all(F&& f) {
  for (const Coding& coding : codings()) {
    for (int i = 0; i < kIsaCount; ++i) {
      const auto isa = static_cast<Isa>(i);
      if (!has_isa(isa)) continue;
      SCOPED_TRACE(std::string(coding.codec->name) + " " + std::to_string(coding.kept) + " " +
                   isa_name(isa));
      f(coding, isa);
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Around a block, and around 4096, by which values are worked on.
std::set<int64_t> counts(const Coding& coding) {
  const int64_t block = coding.block();
  return {0,    1,    2,    7,        block - 1,        block,      block + 1,
          4095, 4096, 4097, 3 * 4096, 2 * 4096 + block, 8192 + 5000};
}

Numbers normal(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  Numbers x(static_cast<size_t>(count));
  for (float& value : x) value = distribution(random);
  return x;
}

// `count` items, no more aligned than they must be, between two guards that nobody may write to.
template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t count, const T* from = nullptr)
      : nbytes_(static_cast<size_t>(count) * sizeof(T)),
        memory_(2 * kGuard + sizeof(T) + nbytes_, kUntouched) {
    if (from && count) std::memcpy(data(), from, nbytes_);
  }
  T* data() { return reinterpret_cast<T*>(memory_.data() + kGuard + sizeof(T)); }
  std::vector<T> copy() {
    std::vector<T> items(nbytes_ / sizeof(T));
    if (nbytes_) std::memcpy(items.data(), data(), nbytes_);
    return items;
  }
  bool intact() const {
    const auto untouched = [](char c) { return c == kUntouched; };
    const auto begin = memory_.begin() + kGuard + sizeof(T);
    return std::all_of(memory_.begin(), begin, untouched) &&
           std::all_of(begin + static_cast<int64_t>(nbytes_), memory_.end(), untouched);
  }

 private:
  static constexpr int kGuard = 64;
  static constexpr char kUntouched = 0x5a;
  size_t nbytes_;
  std::vector<char> memory_;
};

// So that 0 is not -0, and a NaN equals itself.
std::vector<uint32_t> bits(const Numbers& x) {
  std::vector<uint32_t> all(x.size());
  if (!x.empty()) std::memcpy(all.data(), x.data(), 4 * x.size());
  return all;
}

// Coded at once, not by tiles.
std::vector<char> encoded(const Coding& coding, const Numbers& x, Isa isa) {
  const auto count = static_cast<int64_t>(x.size());
  std::vector<char> wire(static_cast<size_t>(coding.wire_nbytes(count)));
  coding.encode(x.data(), count, wire.data(), isa);
  return wire;
}
Numbers decoded(const Coding& coding, const std::vector<char>& wire, int64_t count, Isa isa) {
  Numbers x(static_cast<size_t>(count));
  coding.decode(wire.data(), count, x.data(), isa);
  return x;
}

TEST(Codecs, EncodeRestKeepsWhatTheWireDoesNotSay) {
  for_all([](const Coding& coding, Isa isa) {
    for (const int64_t count : counts(coding)) {
      const Numbers in = normal(count, 1), rest = normal(count, 2);
      Numbers whole(in);
      for (size_t i = 0; i < whole.size(); ++i) whole[i] += rest[i];
      const std::vector<char> expected = encoded(coding, whole, isa);
      const Numbers said = decoded(coding, expected, count, isa);
      Numbers left(whole);
      for (size_t i = 0; i < left.size(); ++i) left[i] -= said[i];

      Guarded<float> residual(count, rest.data());
      Guarded<char> wire(coding.wire_nbytes(count));
      coding.encode_rest(in.data(), residual.data(), count, wire.data(), isa);
      ASSERT_EQ(wire.copy(), expected) << count;
      ASSERT_EQ(bits(residual.copy()), bits(left)) << count;
      ASSERT_TRUE(wire.intact() && residual.intact()) << count;
    }
  });
}

TEST(Codecs, NoRestOfACodecThatLosesNothing) {
  const Numbers in = normal(5000, 1);
  Numbers residual(in.size());
  std::vector<char> wire(4 * in.size());
  parse_coding("raw").encode_rest(in.data(), residual.data(), 5000, wire.data());
  EXPECT_EQ(residual, Numbers(in.size()));
}

TEST(Codecs, DecodeAddAddsWhatDecodeSays) {
  for_all([](const Coding& coding, Isa isa) {
    for (const int64_t count : counts(coding)) {
      const std::vector<char> plain = encoded(coding, normal(count, 1), isa);
      const Numbers said = decoded(coding, plain, count, isa);
      const Numbers before = normal(count, 2);
      Numbers expected(before);
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += said[i];

      Guarded<char> wire(static_cast<int64_t>(plain.size()), plain.data());
      Guarded<float> sum(count, before.data());
      coding.decode_add(wire.data(), count, sum.data(), isa);
      ASSERT_EQ(bits(sum.copy()), bits(expected)) << count;
      ASSERT_EQ(wire.copy(), plain) << count;
      ASSERT_TRUE(sum.intact()) << count;
    }
  });
}

TEST(Codecs, PastTheCachesItSaysTheSame) {
  for_all([](const Coding& coding, Isa isa) {
    std::set<int64_t> all = counts(coding);
    all.insert(scaled(2 << 20) + 4097);  // goes there by itself
    for (const int64_t count : all) {
      const std::vector<char> wire = encoded(coding, normal(count, 1), isa);
      Numbers said(static_cast<size_t>(count));
      coding.codec->decode(coding, wire.data(), count, said.data(), isa);
      Guarded<float> past(count);
      coding.decode_past(wire.data(), count, past.data(), isa);
      ASSERT_EQ(bits(past.copy()), bits(said)) << count;
      ASSERT_TRUE(past.intact()) << count;
      ASSERT_EQ(bits(decoded(coding, wire, count, isa)), bits(said)) << count;
    }
  });
}

TEST(Codecs, ALargeWireIsWrittenOnceAndWhole) {
  const int64_t count = scaled(16 << 20) + 4097;
  const Numbers in = normal(count, 1);
  for (const char* name : {"minmax_u8", "minmax_u4", "fp8_e4m3"}) {
    const Coding coding = parse_coding(name);
    ASSERT_GE(static_cast<size_t>(coding.wire_nbytes(count)), kStreamNbytes) << name;
    std::vector<char> pieces;
    for (int64_t at = 0; at < count; at += 1 << 16) {
      const auto begin = in.begin() + at;
      const std::vector<char> piece = encoded(
          coding, Numbers(begin, begin + std::min<int64_t>(1 << 16, count - at)), best_isa());
      pieces.insert(pieces.end(), piece.begin(), piece.end());
    }
    for (const int64_t misplaced : {0, 1, 63}) {
      Guarded<char> wire(static_cast<int64_t>(pieces.size()) + misplaced);
      coding.encode(in.data(), count, wire.data() + misplaced);
      const std::vector<char> all = wire.copy();
      EXPECT_TRUE(std::equal(pieces.begin(), pieces.end(), all.begin() + misplaced)) << name;
      EXPECT_TRUE(wire.intact()) << name;
    }
  }
}

// A bucket is cut for its receivers at multiples of a block, so the pieces must be the whole.
TEST(Codecs, BlocksAreCodedAlone) {
  for_all([](const Coding& coding, Isa isa) {
    const Numbers in = normal(5 * coding.block() + 3, 1);
    const int64_t cut = 2 * coding.block();
    std::vector<char> pieces = encoded(coding, Numbers(in.begin(), in.begin() + cut), isa);
    const std::vector<char> rest = encoded(coding, Numbers(in.begin() + cut, in.end()), isa);
    pieces.insert(pieces.end(), rest.begin(), rest.end());
    EXPECT_EQ(pieces, encoded(coding, in, isa));
  });
}

// The root mean square error of the mean of what was said in so many rounds, the input being the
// same.
double error_of_mean(const Coding& coding, int rounds, bool feedback) {
  const int64_t count = 4096 + 700;
  const Numbers in = normal(count, 3);
  Numbers residual(in.size()), sum(in.size());
  std::vector<char> wire(static_cast<size_t>(coding.wire_nbytes(count)));
  for (int round = 0; round < rounds; ++round) {
    if (!feedback) std::fill(residual.begin(), residual.end(), 0.0f);
    coding.encode_rest(in.data(), residual.data(), count, wire.data());
    coding.decode_add(wire.data(), count, sum.data());
  }
  double squares = 0;
  for (size_t i = 0; i < in.size(); ++i)
    squares += std::pow(sum[i] / static_cast<float>(rounds) - in[i], 2);
  return std::sqrt(squares / static_cast<double>(count));
}

// The error of the mean is what is left at last over the number of rounds. That falls like 1 /
// rounds where what is left is bounded, and more slowly for sign1, whose outliers wait long for
// their turn.
TEST(Codecs, WithFeedbackTheMeanApproachesTheInput) {
  for (const Coding& coding : codings()) {
    if (!coding.codec->lossy) continue;
    SCOPED_TRACE(coding.codec->name);
    const double once = error_of_mean(coding, 1, true);
    const double late = error_of_mean(coding, 1000, true);
    EXPECT_NEAR(error_of_mean(coding, 1000, false), once, 0.01 * once);  // feedback is what helps
    EXPECT_LT(late, once / 15);
    EXPECT_LT(late, error_of_mean(coding, 100, true) / 2);
  }
}

TEST(Codecs, ACodingIsReadFromText) {
  const Coding plain = parse_coding("topk");
  EXPECT_EQ(plain.codec, find_codec("topk"));
  EXPECT_EQ(plain.kept, 41);
  EXPECT_EQ(plain.values, find_codec("raw"));
  const Coding chosen = parse_coding("topk:7:fp16");
  EXPECT_EQ(chosen.kept, 7);
  EXPECT_EQ(chosen.values, find_codec("fp16"));
  for (const char* text :
       {"", "gzip", "topk:0", "topk:4097", "topk:x", "topk:7:gzip", "topk:7:topk"})
    EXPECT_THROW(parse_coding(text), UsageError) << text;
}

TEST(Codecs, TheTableSaysWhoNeedsFeedback) {
  std::set<std::string> names;
  for (const Codec& codec : codecs())
    if (codec.needs_feedback) names.insert(codec.name);
  EXPECT_EQ(names, (std::set<std::string>{"sign1", "topk"}));
}

// Tiles of 4096 values are coded one by one: a block must not reach over their edge.
// NaNs of all bits are the largest magnitude there is.
TEST(Codecs, TopkOfNothingButTheLargestMagnitude) {
  std::vector<float> in(5000);
  std::memset(in.data(), 0xff, in.size() * sizeof(float));
  const Coding coding = parse_coding("topk:7");
  std::vector<char> wire(static_cast<size_t>(coding.wire_nbytes(5000)));
  std::vector<float> out(in.size());
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (!has_isa(static_cast<Isa>(isa))) continue;
    coding.encode(in.data(), 5000, wire.data(), static_cast<Isa>(isa));
    coding.decode(wire.data(), 5000, out.data(), static_cast<Isa>(isa));
    for (size_t i = 0; i < 7; ++i) EXPECT_TRUE(std::isnan(out[i])) << i;
    for (size_t i = 7; i < 4096; ++i) ASSERT_EQ(out[i], 0) << i;
  }
}

// Which sign a NaN has that arithmetic has made is the processor's choice.
TEST(Codecs, BlocksDoNotTellTheSignOfANan) {
  for_all([](const Coding& coding, Isa isa) {
    if (coding.block() == 1 || coding.codec->sparse) return;
    for (const int64_t count : {int64_t{7}, coding.block()}) {
      std::vector<char> wires[2];
      for (int i = 0; i < 2; ++i) {
        Numbers in = normal(count, 1);
        in[3] = std::copysign(NAN, i == 0 ? 1.0f : -1.0f);
        wires[i].resize(static_cast<size_t>(coding.wire_nbytes(count)));
        coding.encode(in.data(), count, wires[i].data(), isa);
      }
      EXPECT_EQ(wires[0], wires[1]);
    }
  });
}

TEST(Codecs, BlocksDivideATile) {
  for (const Codec& codec : codecs()) EXPECT_EQ(4096 % codec.block, 0) << codec.name;
}

}  // namespace
}  // namespace bagua
