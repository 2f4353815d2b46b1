#include "cpu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

namespace tsr {
namespace {

TEST(CpuTest, LevelsEndWithWhatEveryCpuHas) {
  const auto& levels = CpuLevels();
  EXPECT_EQ(levels.back(), CpuLevel::kPortable);
  EXPECT_TRUE(std::ranges::is_sorted(levels, std::ranges::greater()));
}

TEST(CpuTest, EveryLevelIsFoundByItsName) {
  for (const CpuLevel level : CpuLevels()) {
    CpuLevel found{};
    EXPECT_TRUE(ParseCpuLevel(NameOf(level), &found).ok());
    EXPECT_EQ(found, level);
  }
}

TEST(CpuTest, WhatTheCpuLacksIsRefused) {
  for (const std::string_view text : {"", "AVX2", "avx9", "portable "}) {
    CpuLevel found = CpuLevel::kPortable;
    const Status status = ParseCpuLevel(text, &found);
    EXPECT_EQ(status.code(), Code::kInvalid);
    EXPECT_EQ(status.message().find("TSR_CPU is '" + std::string(text) + "', expected "), 0u);
    EXPECT_TRUE(status.message().ends_with("portable"));
  }
}

TEST(CpuTest, UsesTheBestLevelUnlessToldOtherwise) {
  const char* text = std::getenv("TSR_CPU");
  EXPECT_TRUE(CheckCpuLevel().ok());
  EXPECT_EQ(NameOf(UsedCpuLevel()), text != nullptr ? text : NameOf(CpuLevels().front()));
}

}  // namespace
}  // namespace tsr
