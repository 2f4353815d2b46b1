// How far ahead a stream asks, on ways of every length, in simulated time.
#include "request_window.h"

#include <gtest/gtest.h>

#include <deque>

namespace tsr {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kLeastNbytes = 256 << 10;

// Chunks of 1 MiB over a line of a rate and a round trip, asked for as the window allows.
class Line {
 public:
  Line(double nbytes_per_s, Clock::duration rtt) : nbytes_per_s_(nbytes_per_s), rtt_(rtt) {}

  // What comes in a while, in bytes per second.
  double Run(Clock::duration duration) {
    const Clock::time_point end = now_ + duration;
    uint64_t came_nbytes = 0;
    while (now_ < end) {
      while (window_.HasRoom(arrivals_.size(), arrivals_.size() * kMiB)) Ask();
      now_ = arrivals_.front();
      arrivals_.pop_front();
      window_.Received(kMiB, now_, [this] { return rtt_; });
      came_nbytes += kMiB;
    }
    return static_cast<double>(came_nbytes) / std::chrono::duration<double>(duration).count();
  }
  void Pause(Clock::duration duration) {
    now_ += duration;
    window_.Resume(now_);
  }
  void set_rate(double nbytes_per_s) { nbytes_per_s_ = nbytes_per_s; }
  size_t num_in_flight() const { return arrivals_.size(); }
  const RequestWindow& window() const { return window_; }

 private:
  void Ask() {
    const auto takes = std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(static_cast<double>(kMiB) / nbytes_per_s_));
    const Clock::time_point last = arrivals_.empty() ? now_ : arrivals_.back();
    arrivals_.push_back(std::max(now_ + rtt_, last) + takes);
  }

  double nbytes_per_s_;
  const Clock::duration rtt_;
  Clock::time_point now_{std::chrono::hours(1)};
  std::deque<Clock::time_point> arrivals_;  // of what has been asked for
  RequestWindow window_{3, kLeastNbytes};
};

TEST(RequestWindowTest, ShortWayIsFullWithAFewRequests) {
  for (const auto rtt : {microseconds(0), microseconds(20), microseconds(100)}) {
    Line line(6e9, rtt);
    EXPECT_GT(line.Run(milliseconds(200)), 0.95 * 6e9);
    EXPECT_LE(line.num_in_flight(), 3u);
  }
}

TEST(RequestWindowTest, LongWayIsFullAfterSomeRoundTrips) {
  for (const auto rtt : {milliseconds(1), milliseconds(20), milliseconds(100)}) {
    Line line(2e9, rtt);
    line.Run(10 * rtt);
    EXPECT_GT(line.Run(50 * rtt), 0.95 * 2e9) << rtt.count();
  }
}

TEST(RequestWindowTest, NoMoreIsAskedForThanComesInTwoRoundTrips) {
  Line line(1e9, milliseconds(20));
  line.Run(milliseconds(1000));
  EXPECT_LE(line.window().nbytes_ahead(), 2.3 * 1e9 * 0.02);
  line.set_rate(1e8);
  line.Run(milliseconds(3000));
  EXPECT_LE(line.window().nbytes_ahead(), 2.8 * 1e8 * 0.02 + 2 * kMiB);
}

TEST(RequestWindowTest, WindowIsBounded) {
  Line line(1e10, milliseconds(100));
  line.Run(milliseconds(5000));
  EXPECT_EQ(line.window().nbytes_ahead(), RequestWindow::kMaxNbytes);
}

TEST(RequestWindowTest, PauseBetweenVersionsIsNoSlowLine) {
  Line line(1e9, milliseconds(20));
  line.Run(milliseconds(1000));
  line.Pause(std::chrono::seconds(100));
  EXPECT_GT(line.Run(milliseconds(200)), 0.85 * 1e9);
}

TEST(RequestWindowTest, SmallRequestsAreManyEvenOnAShortWay) {
  const RequestWindow window(3, kLeastNbytes);
  EXPECT_TRUE(window.HasRoom(63, 63 << 12));
  EXPECT_FALSE(window.HasRoom(64, 64 << 12));
}

}  // namespace
}  // namespace tsr
