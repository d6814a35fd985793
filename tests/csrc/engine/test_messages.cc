// What goes into a message comes out of it, and what is cut short is noticed.
#include "engine/messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace bagua {
namespace {

class Dice {
 public:
  explicit Dice(unsigned seed) : random_(seed) {}
  uint32_t below(uint32_t n) { return random_() % n; }
  uint64_t any() { return random_(); }
  std::string text() {
    std::string text(below(4) ? below(20) : 0, ' ');
    for (char& c : text) c = static_cast<char>(random_());
    return text;
  }
  // Ascending and different, as ids in a report are.
  std::vector<int32_t> ids() {
    std::set<int32_t> ids;
    const uint32_t range = uint32_t{1} << below(17);
    for (uint32_t n = below(40); n > 0; --n) ids.insert(static_cast<int32_t>(below(range)));
    return {ids.begin(), ids.end()};
  }
  Key key() { return {text(), any()}; }

 private:
  std::mt19937_64 random_;
};

Report random_report(Dice& dice) {
  Report r;
  r.set = static_cast<int32_t>(dice.below(5));
  r.join = dice.below(2);
  r.ids = dice.ids();
  for (uint32_t n = dice.below(5); n > 0; --n)
    r.unnamed.push_back({dice.any(), static_cast<int32_t>(dice.below(100))});
  for (uint32_t n = dice.below(5); n > 0; --n)
    r.full.push_back({dice.key(), dice.text(), dice.text()});
  return r;
}

std::string bytes_of(const Report& report) {
  Writer w;
  report.encode(w);
  return w.take();
}

TEST(Messages, ReportsSurvive) {
  Dice dice(1);
  for (int i = 0; i < 2000; ++i) {
    const Report sent = random_report(dice);
    const std::string bytes = bytes_of(sent);
    Reader r(bytes);
    ASSERT_EQ(r.get<MessageType>(), MessageType::kReport);
    const Report got = Report::decode(r);
    EXPECT_TRUE(r.done());
    EXPECT_EQ(got.set, sent.set);
    EXPECT_EQ(got.join, sent.join);
    EXPECT_EQ(got.ids, sent.ids);
    ASSERT_EQ(got.unnamed.size(), sent.unnamed.size());
    for (size_t k = 0; k < sent.unnamed.size(); ++k) {
      EXPECT_EQ(got.unnamed[k].seq, sent.unnamed[k].seq);
      EXPECT_EQ(got.unnamed[k].id, sent.unnamed[k].id);
    }
    ASSERT_EQ(got.full.size(), sent.full.size());
    for (size_t k = 0; k < sent.full.size(); ++k) {
      EXPECT_EQ(got.full[k].key.name, sent.full[k].key.name);
      EXPECT_EQ(got.full[k].key.seq, sent.full[k].key.seq);
      EXPECT_EQ(got.full[k].description, sent.full[k].description);
      EXPECT_EQ(got.full[k].refusal, sent.full[k].refusal);
    }
    if (HasFailure()) return;
  }
}

TEST(Messages, DecisionsSurvive) {
  Dice dice(2);
  for (int i = 0; i < 2000; ++i) {
    Decision sent;
    sent.set = static_cast<int32_t>(dice.below(5));
    sent.last_joined = static_cast<int32_t>(dice.below(3)) - 1;
    for (uint32_t n = dice.below(5); n > 0; --n)
      sent.definitions.push_back(
          {static_cast<int32_t>(dice.below(9)) - 1, dice.text(), dice.text()});
    for (const int32_t id : dice.ids()) sent.agreed.push_back({id, 0});
    for (uint32_t n = dice.below(4); n > 0; --n)
      sent.agreed.push_back({static_cast<int32_t>(dice.below(9)), dice.any() | 1});
    for (uint32_t n = dice.below(4); n > 0; --n)
      sent.agreed.push_back({Decision::kForgotten, dice.below(2)});
    for (uint32_t n = dice.below(4); n > 0; --n)
      sent.rejections.push_back({dice.key(), ErrorKind::kPeer, dice.text(), dice.ids()});
    Writer w;
    sent.encode(w);
    Reader r(w.bytes());
    ASSERT_EQ(r.get<MessageType>(), MessageType::kDecision);
    const Decision got = Decision::decode(r);
    EXPECT_TRUE(r.done());
    EXPECT_EQ(got.set, sent.set);
    EXPECT_EQ(got.last_joined, sent.last_joined);
    ASSERT_EQ(got.agreed.size(), sent.agreed.size());
    for (size_t k = 0; k < sent.agreed.size(); ++k) {
      EXPECT_EQ(got.agreed[k].id, sent.agreed[k].id);
      EXPECT_EQ(got.agreed[k].seq, sent.agreed[k].seq);
    }
    ASSERT_EQ(got.definitions.size(), sent.definitions.size());
    for (size_t k = 0; k < sent.definitions.size(); ++k) {
      EXPECT_EQ(got.definitions[k].id, sent.definitions[k].id);
      EXPECT_EQ(got.definitions[k].name, sent.definitions[k].name);
      EXPECT_EQ(got.definitions[k].description, sent.definitions[k].description);
    }
    ASSERT_EQ(got.rejections.size(), sent.rejections.size());
    for (size_t k = 0; k < sent.rejections.size(); ++k) {
      EXPECT_EQ(got.rejections[k].key.name, sent.rejections[k].key.name);
      EXPECT_EQ(got.rejections[k].kind, sent.rejections[k].kind);
      EXPECT_EQ(got.rejections[k].text, sent.rejections[k].text);
      EXPECT_EQ(got.rejections[k].ranks, sent.rejections[k].ranks);
    }
    if (HasFailure()) return;
  }
}

TEST(Messages, KnownRequestsTakeABitEach) {
  Report report;
  for (int32_t id = 640; id < 640 + 64 * 8; ++id) report.ids.push_back(id);
  EXPECT_LT(bytes_of(report).size(), 64u + 32u);
}

TEST(Messages, WhatIsCutShortIsAnError) {
  Dice dice(3);
  const std::string whole = bytes_of(random_report(dice));
  for (size_t length = 1; length < whole.size(); ++length) {
    Reader r(std::string_view(whole).substr(0, length));
    r.get<MessageType>();
    EXPECT_THROW(Report::decode(r), InternalError) << length;
  }
}

TEST(Messages, LengthsBeyondTheMessageAreAnErrorAndNoAllocation) {
  Writer w;
  w.put(UINT32_MAX);
  EXPECT_THROW(Reader(w.bytes()).get_string(), InternalError);
  EXPECT_THROW(Reader(w.bytes()).get_vector<int64_t>(), InternalError);
}

TEST(Messages, DescriptionsSurvive) {
  Dice dice(4);
  for (int i = 0; i < 1000; ++i) {
    Description sent;
    sent.kind = static_cast<OpKind>(dice.below(kOpKindCount));
    sent.op = static_cast<ReduceOp>(dice.below(6));
    sent.root = static_cast<int32_t>(dice.below(9)) - 1;
    sent.priority = static_cast<int32_t>(dice.below(9)) - 4;
    sent.prescale = dice.below(8) * 0.25;
    sent.postscale = dice.below(8) * 0.25;
    for (uint32_t n = dice.below(4); n > 0; --n) {
      std::vector<int64_t> shape(dice.below(4));
      for (int64_t& extent : shape)
        extent = static_cast<int64_t>(dice.any() >> dice.below(64)) & INT64_MAX;
      sent.add_tensor(static_cast<DType>(dice.below(kDTypeCount)), shape);
    }
    const std::string bytes = sent.encode();
    EXPECT_TRUE(Description::decode(bytes) == sent);
    Description other = sent;
    other.root += 1;
    EXPECT_FALSE(other == sent);
    EXPECT_FALSE(other.encode() == bytes);
  }
}

TEST(Messages, EveryFieldOfADescriptionCounts) {
  const Description usual;
  Description other;
  const auto counts = [&](auto& field, const auto& value) {
    const auto before = field;
    field = value;
    EXPECT_FALSE(other == usual);
    EXPECT_TRUE(Description::decode(other.encode()) == other);
    const Difference d = first_difference(usual, other);
    EXPECT_NE(d.here, d.there) << d.what;
    field = before;
    EXPECT_TRUE(other == usual);
    return d.what;
  };
  // A new one does not compile until it is here, and then has to be counted below.
  auto& [kind, on_device, captured, registered, op, root, prescale, postscale, priority, codec,
         peers, background, exact_in_nodes, earlier, failures, layout] = other;
  const std::vector<std::string> words = {counts(kind, OpKind::kJoin),
                                          counts(on_device, true),
                                          counts(captured, true),
                                          counts(registered, true),
                                          counts(op, ReduceOp::kMax),
                                          counts(root, 7),
                                          counts(prescale, 0.5),
                                          counts(postscale, 0.25),
                                          counts(priority, -1),
                                          counts(codec, std::string("sign1")),
                                          counts(peers, std::string("ring")),
                                          counts(background, true),
                                          counts(exact_in_nodes, true),
                                          counts(earlier, 1),
                                          counts(failures, 1),
                                          counts(layout, std::vector<int64_t>{0, 0})};
  EXPECT_EQ(std::set<std::string>(words.begin(), words.end()).size(), words.size());
}

// No 32-bit number on the way from a shape to a size.
TEST(Messages, SizesAbove32Bits) {
  Description d;
  d.add_tensor(DType::kF64, {int64_t{3} << 31, 5});
  const auto tensors = tensors_of(d);
  ASSERT_EQ(tensors.size(), 1u);
  EXPECT_EQ(tensors[0].count(), (int64_t{3} << 31) * 5);
  EXPECT_EQ(tensors[0].row_count(), 5);
  const Slice last = slice_of((int64_t{1} << 40) + 3, 5, 4);
  EXPECT_EQ(last.begin + last.count, (int64_t{1} << 40) + 3);
}

}  // namespace
}  // namespace bagua
