// How long a rail is busy.
#include "rail_stats.h"

#include <gtest/gtest.h>

namespace tsr {
namespace {

void Pass(Clock::duration time) {
  for (const Clock::time_point began = Clock::now(); Clock::now() - began < time;) continue;
}

TEST(BusyTimeTest, RailIsBusyWhileAnyOfItsStreamsIs) {
  BusyTime time;
  Pass(std::chrono::milliseconds(1));
  EXPECT_EQ(time.total(), Clock::duration(0));
  const Clock::time_point began = Clock::now();
  {
    BusyStream one(&time);
    BusyStream other(&time);
    one.Set(true);
    one.Set(true);
    other.Set(true);
    one.Set(false);
    Pass(std::chrono::milliseconds(1));
    EXPECT_GE(time.total(), std::chrono::milliseconds(1));  // the other one still is
  }
  const Clock::duration total = time.total();
  EXPECT_LE(total, Clock::now() - began);
  Pass(std::chrono::milliseconds(1));
  EXPECT_EQ(time.total(), total);
}

}  // namespace
}  // namespace tsr
