// bfloat16: 2 bytes a value.
#pragma once

#include "codec/half_wire.h"

namespace bagua {

using Bf16 = HalfWire<DType::kBF16>;

}  // namespace bagua
