#include "event_loop.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>

namespace tsr {
namespace {

std::unique_ptr<EventLoop> MakeLoop(Clock::duration tick = std::chrono::seconds(20)) {
  std::unique_ptr<EventLoop> loop;
  EXPECT_TRUE(EventLoop::Start(tick, &loop).ok());
  return loop;
}

// Counts its events, and closes itself at the first.
class Counting : public Pollable {
 public:
  Counting(UniqueFd fd, std::atomic<int>* num_events, std::atomic<int>* num_ticks)
      : Pollable(std::move(fd)), num_events_(num_events), num_ticks_(num_ticks) {}

  void OnReady(uint32_t) override {
    ++*num_events_;
    CloseFd();
  }
  void OnTick(Clock::time_point) override { ++*num_ticks_; }

 private:
  std::atomic<int>* const num_events_;
  std::atomic<int>* const num_ticks_;
};

TEST(EventLoopTest, TasksRunInTheirOrderOnOneOtherThread) {
  const auto loop = MakeLoop();
  std::vector<int> order;
  std::thread::id thread;
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(loop->Post([&, i] { order.push_back(i); }));
  EXPECT_TRUE(loop->PostAndWait([&] { thread = std::this_thread::get_id(); }));
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
  EXPECT_NE(thread, std::this_thread::get_id());
}

TEST(EventLoopTest, StoppedLoopRunsWhatCameBeforeAndTakesNoMore) {
  const auto loop = MakeLoop();
  std::atomic<int> num_run = 0;
  for (int i = 0; i < 10; ++i) loop->Post([&] { ++num_run; });
  loop->Stop();
  EXPECT_EQ(num_run, 10);
  EXPECT_FALSE(loop->Post([&] { ++num_run; }));
  EXPECT_FALSE(loop->PostAndWait([&] { ++num_run; }));
  loop->Stop();
  EXPECT_EQ(num_run, 10);
}

TEST(EventLoopTest, TasksFromManyThreadsAreNeitherLostNorRunAfterTheStop) {
  auto loop = MakeLoop();
  std::atomic<int> num_accepted = 0;
  std::atomic<int> num_run = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 500; ++n) {
        if (loop->PostAndWait([&] { ++num_run; })) ++num_accepted;
      }
    });
  }
  while (num_run < 100) std::this_thread::yield();
  loop->Stop();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_run, num_accepted);
}

TEST(EventLoopTest, StoppedLoopKeepsNoDescriptor) {
  // Whoever holds a closed end for long, in a cycle of references say, holds none of them either.
  const auto num_open = [] {
    const std::filesystem::directory_iterator fds("/proc/self/fd");
    return std::distance(begin(fds), end(fds));
  };
  const auto num_before = num_open();
  const auto loop = MakeLoop();
  EXPECT_GT(num_open(), num_before);
  loop->Stop();
  EXPECT_EQ(num_open(), num_before);
}

TEST(EventLoopTest, ConnectionIsDrivenUntilItCloses) {
  const auto loop = MakeLoop(std::chrono::milliseconds(1));
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  UniqueFd theirs(fds[1]);
  std::atomic<int> num_events = 0;
  std::atomic<int> num_ticks = 0;
  loop->PostAndWait([&] {
    auto counting = std::make_unique<Counting>(UniqueFd(fds[0]), &num_events, &num_ticks);
    EXPECT_TRUE(loop->Add(std::move(counting), EPOLLIN).ok());
  });
  while (num_ticks == 0) std::this_thread::yield();
  EXPECT_EQ(num_events, 0);
  ASSERT_EQ(::send(theirs.get(), "x", 1, 0), 1);
  char byte;
  EXPECT_LE(::recv(theirs.get(), &byte, 1, 0), 0);
  EXPECT_EQ(num_events, 1);
  loop->PostAndWait([&] { loop->ForEach<Counting>([](Counting&) { FAIL() << "still there"; }); });
}

TEST(EventLoopTest, ClosedConnectionIsOverWhoeverElseHasItsDescriptor) {
  // A child process that was forked meanwhile has it, too: to the kernel it is then still open.
  const auto loop = MakeLoop();
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  const UniqueFd theirs(fds[1]);
  const UniqueFd inherited(::dup(fds[0]));
  std::atomic<int> num_events = 0;
  std::atomic<int> num_ticks = 0;
  loop->PostAndWait([&] {
    auto counting = std::make_unique<Counting>(UniqueFd(fds[0]), &num_events, &num_ticks);
    EXPECT_TRUE(loop->Add(std::move(counting), EPOLLIN).ok());
  });
  ASSERT_EQ(::send(theirs.get(), "x", 1, 0), 1);
  char byte;
  EXPECT_LE(::recv(theirs.get(), &byte, 1, 0), 0);
  // ASan sees an event of an object that is gone.
  for (int i = 0; i < 10; ++i) loop->PostAndWait([] {});
  EXPECT_EQ(num_events, 1);
}

TEST(EventLoopTest, DescriptorThatCanNotBePolledIsRefused) {
  const auto loop = MakeLoop();
  std::atomic<int> unused = 0;
  loop->PostAndWait([&] {
    const Status status =
        loop->Add(std::make_unique<Counting>(UniqueFd(), &unused, &unused), EPOLLIN);
    EXPECT_EQ(status.message(), "epoll_ctl: Bad file descriptor");
  });
}

}  // namespace
}  // namespace tsr
