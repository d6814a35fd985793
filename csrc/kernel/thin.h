// Thin matrices, of few rows, and their products: the same bits on every processor, since every
// rank computes by itself what all have to agree on. Rows lie one after the other.
#pragma once

#include <cstdint>

#include "kernel/isa.h"

namespace bagua {

// Makes the rows orthonormal, one after the other; there are at most as many as columns. One that
// those before it span becomes some other direction.
void orthonormalize(float* rows, int64_t count, int64_t columns, Isa isa = best_isa());

// whole becomes the product left' right, of which both have `rank` rows, and lost what the product
// is short of it.
struct Thin {
  const float* left;   // rank times rows
  const float* right;  // rank times columns
  int64_t rank, rows, columns;
};
void expand(const Thin& thin, float* whole, float* lost, Isa isa = best_isa());

}  // namespace bagua
