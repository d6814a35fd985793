// Thin matrices against plain loops in double: every instruction set gives the same bits.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernel/thin.h"

namespace bagua {
namespace {

using Values = std::vector<float>;

Values drawn(int64_t count, unsigned seed, double scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, scale);
  Values values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(normal(random));
  return values;
}

double dot(const Values& rows, int64_t columns, int64_t a, int64_t b) {
  double sum = 0;
  for (int64_t j = 0; j < columns; ++j)
    sum += static_cast<double>(rows[static_cast<size_t>(a * columns + j)]) *
           rows[static_cast<size_t>(b * columns + j)];
  return sum;
}

void expect_orthonormal(const Values& rows, int64_t count, int64_t columns) {
  for (int64_t a = 0; a < count; ++a)
    for (int64_t b = 0; b <= a; ++b)
      ASSERT_NEAR(dot(rows, columns, a, b), a == b, 1e-6) << a << " and " << b;
}

// How much of a row of `before` is not in what the rows of `after` span.
double left_over(const Values& before, const Values& after, int64_t count, int64_t columns,
                 int64_t row) {
  std::vector<double> rest(before.begin() + row * columns, before.begin() + (row + 1) * columns);
  for (int64_t i = 0; i < count; ++i) {
    double part = 0;
    const float* axis = after.data() + i * columns;
    for (int64_t j = 0; j < columns; ++j) part += rest[static_cast<size_t>(j)] * axis[j];
    for (int64_t j = 0; j < columns; ++j) rest[static_cast<size_t>(j)] -= part * axis[j];
  }
  double sum = 0;
  for (const double x : rest) sum += x * x;
  return std::sqrt(sum / dot(before, columns, row, row));
}

template <class F>
void with_each_isa(F&& f) {
  for (int i = 0; i < kIsaCount; ++i)
    if (has_isa(static_cast<Isa>(i))) f(static_cast<Isa>(i));
}

TEST(Thin, RowsBecomeOrthonormalAndSpanTheSame) {
  for (const double scale : {1.0, 1e-42, 1e-20, 1e30})
    for (const int64_t columns : {1, 2, 3, 31, 1000})
      for (const int64_t count : {1, 2, 3, 8}) {
        if (count > columns) continue;
        // Of denormal numbers little more than a direction is left.
        const double near = scale < 1e-38 ? 0.1 : 1e-5;
        const Values before = drawn(count * columns, static_cast<unsigned>(columns), scale);
        Values first;
        with_each_isa([&](Isa isa) {
          Values rows = before;
          orthonormalize(rows.data(), count, columns, isa);
          expect_orthonormal(rows, count, columns);
          for (int64_t i = 0; count < columns && i < count; ++i)
            ASSERT_LT(left_over(before, rows, count, columns, i), near) << scale;
          if (first.empty()) first = rows;
          ASSERT_EQ(rows, first) << isa_name(isa);
        });
      }
}

TEST(Thin, WhatSpansLessGetsOtherDirections) {
  constexpr int64_t kColumns = 40;
  Values rows(4 * kColumns);  // zeros, a row, the same row twice as long, nearly zeros
  const Values row = drawn(kColumns, 1);
  for (size_t j = 0; j < kColumns; ++j) {
    rows[kColumns + j] = row[j];
    rows[2 * kColumns + j] = 2 * row[j];
  }
  rows[3 * kColumns] = 1e-45f;
  const Values before = rows;
  orthonormalize(rows.data(), 4, kColumns);
  expect_orthonormal(rows, 4, kColumns);
  EXPECT_LT(left_over(before, rows, 4, kColumns, 1), 1e-6);
}

TEST(Thin, AsManyRowsAsColumns) {
  for (const bool zeros : {false, true}) {
    Values rows = zeros ? Values(25) : drawn(25, 2);
    orthonormalize(rows.data(), 5, 5);
    expect_orthonormal(rows, 5, 5);
  }
}

TEST(Thin, ExpandsAndTellsWhatIsLost) {
  for (const int64_t rows : {1, 3, 50})
    for (const int64_t columns : {1, 7, 16, 133})
      for (const int64_t rank : {1, 2, 4}) {
        const Values left = drawn(rank * rows, 3), right = drawn(rank * columns, 4);
        const Values before = drawn(rows * columns, 5);
        with_each_isa([&](Isa isa) {
          Values whole = before, lost(before.size());
          expand({left.data(), right.data(), rank, rows, columns}, whole.data(), lost.data(), isa);
          for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) {
              const auto at = static_cast<size_t>(i * columns + j);
              float sum = 0;
              for (int64_t k = 0; k < rank; ++k) {
                const float product = left[static_cast<size_t>(k * rows + i)] *
                                      right[static_cast<size_t>(k * columns + j)];
                sum += product;
              }
              ASSERT_EQ(whole[at], sum) << isa_name(isa);
              ASSERT_EQ(lost[at], before[at] - sum) << isa_name(isa);
            }
        });
      }
}

}  // namespace
}  // namespace bagua
