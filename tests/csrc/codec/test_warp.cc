// What a GPU's warps do with blocks, done by threads of the host that stand for their lanes: the
// bytes must be those of CPUs.
#include "codec/warp.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "codec/fp8_e4m3.h"
#include "codec/gpu_kernels.h"
#include "codec/hard_values.h"
#include "codec/host_warp.h"
#include "codec/minmax_u4.h"
#include "codec/minmax_u8.h"
#include "codec/sign1.h"
#include "codec/singles.h"
#include "kernel/reduce.h"

namespace bagua {
namespace {

template <class C>
struct Format {
  using Type = C;
};

template <class T>
class WarpTest : public ::testing::Test {
 protected:
  using C = typename T::Type;
  static const char* name() {
    if constexpr (std::is_same_v<C, MinMaxU8>) return "minmax_u8";
    if constexpr (std::is_same_v<C, MinMaxU4>) return "minmax_u4";
    if constexpr (std::is_same_v<C, Fp8E4M3>) return "fp8_e4m3";
    return "sign1";
  }
  static std::vector<int> sizes() {
    return {1, 2, 7, 8, 31, 33, C::kBlock / 2 + 3, C::kBlock - 1, C::kBlock};
  }
  // Room for a block, with marks behind it.
  static std::vector<uint32_t> room() { return std::vector<uint32_t>(C::kBlock + 16, 0xa5a5a5a5u); }
  const Coding coding = parse_coding(name());
};
using Formats =
    ::testing::Types<Format<MinMaxU8>, Format<MinMaxU4>, Format<Fp8E4M3>, Format<Sign1>>;
TYPED_TEST_SUITE(WarpTest, Formats);

TYPED_TEST(WarpTest, EncodesTheSameBytes) {
  using C = typename TypeParam::Type;
  for (int kind = 0; kind < kKinds; ++kind)
    for (const int n : this->sizes())
      for (const bool keeps : {false, true}) {
        const std::vector<float> in = hard_values(kind, n);
        std::vector<float> rest(in.size(), 0.0625f), warp_rest = rest, warp_said(in.size());
        auto wire = this->room(), warp_wire = wire;
        char* to = reinterpret_cast<char*>(wire.data());
        if (keeps) {
          this->coding.encode_rest(in.data(), rest.data(), n, to);
        } else {
          this->coding.encode(in.data(), n, to);
        }
        run_warp([&](const HostWarp& warp) {
          Values<C> values = {};
          load<C>(warp, in.data(), n, values);
          if (keeps) load_on_top<C>(warp, warp_rest.data(), n, values);
          encode_block<C>(warp, values, n, reinterpret_cast<uint8_t*>(warp_wire.data()),
                          warp_said.data(), keeps ? warp_rest.data() : nullptr);
        });
        ASSERT_EQ(wire, warp_wire) << "kind " << kind << ", " << n << " values";
        std::vector<float> said(in.size());
        this->coding.decode(to, n, said.data());
        ASSERT_TRUE(same_bits(said, warp_said)) << "kind " << kind << ", " << n << " values";
        ASSERT_TRUE(same_bits(rest, warp_rest)) << "kind " << kind << ", " << n << " values";
      }
}

TYPED_TEST(WarpTest, DecodesTheSameValues) {
  using C = typename TypeParam::Type;
  for (int kind = 0; kind < kKinds; ++kind)
    for (const int n : this->sizes())
      for (const size_t shift : {0, 1}) {  // a place without whole vectors
        const std::vector<float> in = hard_values(kind, n);
        auto wire = this->room();
        char* bytes = reinterpret_cast<char*>(wire.data());
        this->coding.encode(in.data(), n, bytes);
        std::vector<float> out(in.size() + 8, 7), warp_out = out, sum = out, warp_sum = out;
        this->coding.decode(bytes, n, out.data() + shift);
        this->coding.decode_add(bytes, n, sum.data() + shift);
        run_warp([&](const HostWarp& warp) {
          const auto* from = reinterpret_cast<const uint8_t*>(wire.data());
          Values<C> values = {};
          decode_block<C, false>(warp, from, n, values);
          store<C>(warp, values, n, warp_out.data() + shift);
          load<C>(warp, warp_sum.data() + shift, n, values);
          decode_block<C, true>(warp, from, n, values);
          store<C>(warp, values, n, warp_sum.data() + shift);
        });
        ASSERT_TRUE(same_bits(out, warp_out)) << "kind " << kind << ", " << n << " values";
        ASSERT_TRUE(same_bits(sum, warp_sum)) << "kind " << kind << ", " << n << " values";
      }
}

// What is added up may be any NaN where it is one: processors do not agree on the bits.
TYPED_TEST(WarpTest, AddsUpToTheSameBytes) {
  using C = typename TypeParam::Type;
  for (const uint32_t nan : {0u, 0x7fffffffu, 0xffc00000u, 0xff800001u})
    for (int kind = 0; kind < kKinds; ++kind)
      for (const int n : {33, C::kBlock - 1, C::kBlock}) {
        const int64_t nbytes = this->coding.wire_nbytes(n), stride = (nbytes + 3) / 4 * 4;
        std::vector<uint32_t> wires(static_cast<size_t>(3 * stride / 4));
        std::vector<const char*> said_by;
        for (int i = 0; i < 3; ++i) {  // the last one has blocks without a NaN
          char* to = reinterpret_cast<char*>(wires.data()) + i * stride;
          this->coding.encode(hard_values(i == 2 ? 0 : kind + i, n).data(), n, to);
          said_by.push_back(to);
        }
        std::vector<float> sum(static_cast<size_t>(n)), rest(sum.size(), 0.0625f);
        std::vector<float> warp_said(sum.size()), warp_rest = rest;
        auto wire = this->room(), warp_wire = wire;
        this->coding.add_up(said_by, {4, 1}, n, sum.data());
        this->coding.encode_rest(sum.data(), rest.data(), n, reinterpret_cast<char*>(wire.data()));
        this->coding.decode(reinterpret_cast<const char*>(wire.data()), n, sum.data());
        run_warp([&](const HostWarp& warp) {
          Values<C> values = {};
          for (const char* one : said_by)
            decode_block<C, true>(warp, reinterpret_cast<const uint8_t*>(one), n, values);
          for (float& x : values.of) x *= 0.25f;
          load_on_top<C>(warp, warp_rest.data(), n, values);
          for (float& x : values.of)
            if (std::isnan(x) && nan != 0) x = bits_float(nan);
          encode_block<C>(warp, values, n, reinterpret_cast<uint8_t*>(warp_wire.data()),
                          warp_said.data(), warp_rest.data());
        });
        ASSERT_EQ(wire, warp_wire) << "kind " << kind << ", " << n << " values";
        ASSERT_TRUE(same_bits(sum, warp_said)) << "kind " << kind << ", " << n << " values";
        ASSERT_TRUE(same_bits(rest, warp_rest)) << "kind " << kind << ", " << n << " values";
      }
}

// How GPUs go from codes to floats, and CPUs.
TEST(Warp, CodesBecomeTheSameFloats) {
  std::mt19937 random(7);
  for (int i = 0; i < 1 << 16; ++i) {
    const auto word = static_cast<uint32_t>(random());
    for (int j = 0; j < 4; ++j) {
      const uint32_t code = code_in<8>(word, j);
      ASSERT_EQ(float_by_sum<8>(word, j), static_cast<float>(code));
      ASSERT_EQ(float_by_sum<4>(word, j), static_cast<float>(code_in<4>(word, j)));
      ASSERT_EQ(float_bits(Fp8E4M3::by_product(word, j)), float_bits(Fp8E4M3::by_choice(code)));
    }
  }
}

// A thread's part of gpu_scale, and what the host does.
template <class S>
void expect_scaled_alike(DType dtype) {
  std::vector<typename S::Wire> all(1 << 16);
  for (const double factor : {4.0 / 3, -1.7, 1e-3, 700.0, 0.0}) {
    for (size_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<uint16_t>(i);
    scale(dtype, all.data(), static_cast<int64_t>(all.size()), factor);
    for (size_t i = 0; i < all.size(); ++i) {
      const auto mine = scaled<S>({static_cast<uint16_t>(i)}, static_cast<float>(factor));
      if (std::isnan(to_float(mine)) && std::isnan(to_float(all[i]))) continue;
      ASSERT_EQ(mine.bits, all[i].bits) << i << " x " << factor;
    }
  }
}

TEST(Warp, ShortFloatsAreScaledAlike) {
  expect_scaled_alike<Half>(DType::kF16);
  expect_scaled_alike<BrainHalf>(DType::kBF16);
}

}  // namespace
}  // namespace bagua
