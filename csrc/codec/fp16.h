// float16; overflow becomes Inf: 2 bytes a value.
#pragma once

#include "codec/half_wire.h"

namespace bagua {

using Fp16 = HalfWire<DType::kF16>;

}  // namespace bagua
