// Where wires may begin for a GPU. What it does with them a pretended one does by the CPU's codecs.
#include "codec/gpu.h"

#include <gtest/gtest.h>

#include <vector>

#include "codec/hard_values.h"
#include "common/errors.h"
#include "device/pretend.h"

namespace bagua {
namespace {

TEST(GpuCodecs, HalvesBeginAtMultiplesOfTheirSize) {
  PretendDevice device(0);
  const Device::Stream stream = device.add_stream();
  const int n = 333;
  const std::vector<float> values = hard_values(0, n);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    const Coding coding = half_coding(dtype);
    std::vector<uint16_t> halves(n + 1), expected(n);
    std::vector<float> out(n), said(n);
    coding.encode(values.data(), n, reinterpret_cast<char*>(expected.data()));
    coding.decode(reinterpret_cast<char*>(expected.data()), n, said.data());
    auto* odd = reinterpret_cast<char*>(halves.data() + 1);
    gpu_encode(coding, values.data(), nullptr, n, odd, device, stream);
    gpu_decode(coding, odd, n, out.data(), device, stream);
    device.drain(stream);
    EXPECT_EQ(std::vector<uint16_t>(halves.begin() + 1, halves.end()), expected);
    EXPECT_EQ(out, said);
    EXPECT_THROW(gpu_decode(coding, odd + 1, n, out.data(), device, stream), UsageError);
  }
}

TEST(GpuCodecs, OtherWiresBeginAtMultiplesOfFour) {
  PretendDevice device(0);
  const Device::Stream stream = device.add_stream();
  std::vector<float> values(64, 1), wire(100);
  for (const char* name : {"raw", "minmax_u8", "minmax_u4", "fp8_e4m3", "sign1"}) {
    char* even = reinterpret_cast<char*>(wire.data()) + 2;
    EXPECT_THROW(gpu_encode(parse_coding(name), values.data(), nullptr, 64, even, device, stream),
                 UsageError)
        << name;
  }
}

}  // namespace
}  // namespace bagua
