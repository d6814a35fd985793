// float lo, float step, 512 codes: 520 bytes for 2048.
#pragma once

#include "codec/minmax.h"

namespace bagua {

using MinMaxU8 = MinMax<8, 512>;

}  // namespace bagua
