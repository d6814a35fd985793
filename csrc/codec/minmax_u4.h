// float lo, float step, 128 codes, the even one of two in the low half of a byte: 72 bytes for 512.
#pragma once

#include "codec/minmax.h"

namespace bagua {

using MinMaxU4 = MinMax<4, 128>;

}  // namespace bagua
