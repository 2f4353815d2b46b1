#include "cast.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace tsr {
namespace {

using enum FloatKind;
constexpr FloatKind kKinds[] = {kF16, kBF16, kF32, kF64, kF8E4M3FN, kF8E5M2};
constexpr FloatKind kSmallKinds[] = {kF16, kBF16, kF8E4M3FN, kF8E5M2};

int ExponentBits(FloatKind kind) { return kind == kBF16 ? 8 : kind == kF8E4M3FN ? 4 : 5; }

// What a small kind's bits mean, by the book.
double Decode(FloatKind kind, uint32_t bits) {
  const int num_bits = static_cast<int>(8 * ItemsizeOf(kind));
  const int mantissa_bits = num_bits - 1 - ExponentBits(kind);
  const int exponent_mask = (1 << ExponentBits(kind)) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits) & exponent_mask;
  const int mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
  const double sign = bits >> (num_bits - 1) ? -1.0 : 1.0;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  if (kind == kF8E4M3FN) {
    if (exponent == exponent_mask && mantissa == 7) return nan;
  } else if (exponent == exponent_mask) {
    return mantissa ? nan : sign * std::numeric_limits<double>::infinity();
  }
  const int bias = exponent_mask / 2;
  const int integer = exponent ? mantissa + (1 << mantissa_bits) : mantissa;
  return sign * std::ldexp(integer, std::max(exponent, 1) - bias - mantissa_bits);
}

template <typename To, typename From>
To CastOne(FloatKind from_kind, From from, FloatKind to_kind) {
  To to{};
  EXPECT_EQ(sizeof from, static_cast<size_t>(ItemsizeOf(from_kind)));
  EXPECT_LE(static_cast<size_t>(ItemsizeOf(to_kind)), sizeof to);
  CastRun(Op::Cast(from_kind, to_kind), reinterpret_cast<const uint8_t*>(&from), sizeof from,
          reinterpret_cast<uint8_t*>(&to), 1);
  return to;
}

bool SameFloat(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b && std::signbit(a) == std::signbit(b);
}

// Edge values of every kind, midpoints between neighbours and what lies right
// beside them.
std::vector<double> Doubles() {
  std::vector<double> values = {
      0.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN(),
      std::numeric_limits<double>::max(), std::numeric_limits<double>::denorm_min(),
      std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min(),
      // Goes the wrong way when it is rounded to f32 on its way to bf16.
      1.0 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40)};
  for (FloatKind kind : kSmallKinds) {
    const uint32_t num_magnitudes = 1u << (8 * ItemsizeOf(kind) - 1);
    const uint32_t step = num_magnitudes > 128 ? 7 : 1;
    for (uint32_t bits = 0; bits + 1 < num_magnitudes; bits += step) {
      const double low = Decode(kind, bits);
      double high = Decode(kind, bits + 1);
      if (!std::isfinite(low)) continue;
      if (!std::isfinite(high)) high = low + (low - Decode(kind, bits - 1));
      const double middle = low + (high - low) / 2;
      for (double value : {low, middle, high}) {
        values.push_back(value);
        values.push_back(std::nextafter(value, 0.0));
        values.push_back(std::nextafter(value, 1e300));
        values.push_back(std::nextafterf(static_cast<float>(value), 0.0f));
        values.push_back(std::nextafterf(static_cast<float>(value), 1e38f));
      }
    }
  }
  std::mt19937_64 random(2);
  for (int i = 0; i < 50'000; ++i) {
    values.push_back(std::bit_cast<double>(random()));
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  }
  const size_t count = values.size();
  for (size_t i = 0; i < count; ++i) values.push_back(-values[i]);
  return values;
}

// The neighbour that is nearest, found among all values of the kind; the even
// one of two.
class Nearest {
 public:
  explicit Nearest(FloatKind kind) : kind_(kind) {
    uint32_t bits = 0;
    while (std::isfinite(Decode(kind, bits))) magnitudes_.push_back(Decode(kind, bits++));
    // Where the next finite number would be, infinity or NaN stands.
    magnitudes_.push_back(2 * magnitudes_[bits - 1] - magnitudes_[bits - 2]);
  }

  double operator()(double value) const {
    if (std::isnan(value)) return value;
    const double magnitude = std::fabs(value);
    const auto above = std::lower_bound(magnitudes_.begin(), magnitudes_.end(), magnitude);
    size_t bits = static_cast<size_t>(above - magnitudes_.begin());
    if (above == magnitudes_.end()) {
      bits = magnitudes_.size() - 1;
    } else if (bits > 0) {
      const double up = *above - magnitude;
      const double down = magnitude - *(above - 1);
      if (down < up || (down == up && bits % 2 == 1)) --bits;
    }
    return std::copysign(1.0, value) * Decode(kind_, static_cast<uint32_t>(bits));
  }

 private:
  FloatKind kind_;
  std::vector<double> magnitudes_;
};

TEST(CastTest, WidensEverySmallNumberExactly) {
  for (FloatKind kind : kSmallKinds) {
    const uint32_t num_numbers = 1u << (8 * ItemsizeOf(kind));
    for (uint32_t bits = 0; bits < num_numbers; ++bits) {
      const double expected = Decode(kind, bits);
      float f32;
      double f64;
      if (ItemsizeOf(kind) == 1) {
        f32 = CastOne<float>(kind, static_cast<uint8_t>(bits), kF32);
        f64 = CastOne<double>(kind, static_cast<uint8_t>(bits), kF64);
      } else {
        f32 = CastOne<float>(kind, static_cast<uint16_t>(bits), kF32);
        f64 = CastOne<double>(kind, static_cast<uint16_t>(bits), kF64);
      }
      ASSERT_TRUE(SameFloat(f32, expected)) << int(kind) << " " << bits << " " << f32;
      ASSERT_TRUE(SameFloat(f64, expected)) << int(kind) << " " << bits << " " << f64;
    }
  }
}

TEST(CastTest, NarrowsToTheNearestEvenNumberWithOneRounding) {
  const std::vector<double> values = Doubles();
  for (FloatKind kind : kSmallKinds) {
    const Nearest nearest(kind);
    for (double f64 : values) {
      const auto f32 = static_cast<float>(f64);
      const double from_f64 = Decode(kind, CastOne<uint16_t>(kF64, f64, kind));
      const double from_f32 = Decode(kind, CastOne<uint16_t>(kF32, f32, kind));
      ASSERT_TRUE(SameFloat(from_f64, nearest(f64))) << int(kind) << " " << f64;
      ASSERT_TRUE(SameFloat(from_f32, nearest(f32))) << int(kind) << " " << f32;
    }
  }
}

TEST(CastTest, MovesBetweenF32AndF64AsTheCpuDoes) {
  for (double f64 : Doubles()) {
    const auto f32 = static_cast<float>(f64);
    ASSERT_TRUE(SameFloat(CastOne<float>(kF64, f64, kF32), f32)) << f64;
    ASSERT_TRUE(SameFloat(CastOne<double>(kF32, f32, kF64), f32)) << f32;
  }
}

TEST(CastTest, MovesBetweenSmallKindsWithOneRounding) {
  for (FloatKind to : kSmallKinds) {
    const Nearest nearest(to);
    for (uint32_t bits = 0; bits < 65'536; ++bits) {
      for (FloatKind from : {kF16, kBF16}) {
        if (from == to) continue;
        const auto cast = CastOne<uint16_t>(from, static_cast<uint16_t>(bits), to);
        ASSERT_TRUE(SameFloat(Decode(to, cast), nearest(Decode(from, bits))))
            << int(from) << " to " << int(to) << ": " << bits;
      }
    }
  }
}

TEST(CastTest, DenseAndStridedRowsAgree) {
  std::mt19937 random(3);
  for (FloatKind from : kKinds) {
    for (FloatKind to : kKinds) {
      if (from == to) continue;
      const int64_t itemsize = ItemsizeOf(from);
      for (int64_t count : {0, 1, 7, 8, 9, 100}) {
        std::vector<uint8_t> dense(static_cast<size_t>(count * itemsize));
        for (uint8_t& byte : dense) byte = static_cast<uint8_t>(random());
        const int64_t stride = 3 * itemsize + 1;
        std::vector<uint8_t> strided(static_cast<size_t>(count * stride + 1));
        for (int64_t i = 0; i < count; ++i) {
          std::memcpy(&strided[1 + i * stride], &dense[i * itemsize], itemsize);
        }
        const auto to_nbytes = static_cast<size_t>(count * ItemsizeOf(to));
        std::vector<uint8_t> a(to_nbytes);
        std::vector<uint8_t> b(to_nbytes);
        CastRun(Op::Cast(from, to), dense.data(), itemsize, a.data(), count);
        CastRun(Op::Cast(from, to), strided.data() + 1, stride, b.data(), count);
        ASSERT_EQ(a, b) << int(from) << " to " << int(to) << ", " << count;
      }
    }
  }
}

// Rows long enough for vectors, whose special values a CPU's own instructions would not all keep.
TEST(CastTest, LongRowsOfF32RoundAsSingleElementsDo) {
  std::vector<uint32_t> floats;
  for (const uint32_t exponent : {0u, 1u, 126u, 253u, 254u, 255u}) {
    for (uint32_t high = 0; high < 128; high += 7) {
      for (const uint32_t low : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
        for (const uint32_t sign : {0u, 1u}) {
          floats.push_back(sign << 31 | exponent << 23 | high << 16 | low);
        }
      }
    }
  }
  const auto* from = reinterpret_cast<const uint8_t*>(floats.data());
  for (const FloatKind to : {kBF16, kF16}) {
    const Op op = Op::Cast(kF32, to);
    std::vector<uint16_t> row(floats.size());
    CastRun(op, from, 4, reinterpret_cast<uint8_t*>(row.data()),
            static_cast<int64_t>(floats.size()));
    for (size_t i = 0; i < floats.size(); ++i) {
      uint16_t single;
      CastRun(op, from + 4 * i, 4, reinterpret_cast<uint8_t*>(&single), 1);
      ASSERT_EQ(row[i], single) << std::hex << floats[i] << " to " << int(to);
    }
  }
}

TEST(OpTest, KnowsWhichCodesAreValid) {
  int num_valid = 0;
  for (int code = 0; code < 256; ++code) num_valid += Op(static_cast<uint8_t>(code)).valid();
  EXPECT_EQ(num_valid, 1 + 6 * 5);
  EXPECT_TRUE(Op().valid());
  EXPECT_TRUE(Op::Cast(kF32, kBF16).valid());
  EXPECT_FALSE(Op::Cast(kF32, kF32).valid());
  EXPECT_FALSE(Op::Cast(kNone, kF32).valid());
  EXPECT_FALSE(Op::Cast(kF32, kNone).valid());
}

}  // namespace
}  // namespace tsr
