// One thread that drives many non-blocking connections.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "deadline.h"
#include "fd_io.h"
#include "status.h"

namespace tsr {

// How often a loop looks, within the time that a peer may be silent, for those that are.
inline constexpr int kTicksPerTimeout = 8;

// A connection as its loop sees it. Used on the loop's thread alone. An object that has closed its
// descriptor stays alive until the loop has dealt with every event it fetched together.
class Pollable {
 public:
  explicit Pollable(UniqueFd fd) : fd_(std::move(fd)) {}
  virtual ~Pollable() = default;
  Pollable(const Pollable&) = delete;
  Pollable& operator=(const Pollable&) = delete;

  // `events` are epoll's. Moves what can be moved at once, but not for ever: the others wait.
  virtual void OnReady(uint32_t events) = 0;
  // Called now and then; the place for timeouts.
  virtual void OnTick(Clock::time_point now) = 0;

  bool closed() const { return fd_.get() < 0; }
  int fd() const { return fd_.get(); }

 protected:
  void CloseFd();

 private:
  friend class EventLoop;

  UniqueFd fd_;
  int epoll_ = -1;  // of the loop that it was added to
  uint32_t interest_ = 0;
};

// Owns its thread and its connections. Thread-safe where nothing else is said.
class EventLoop {
 public:
  // kSystem where the kernel gives no descriptor or thread.
  static Status Start(Clock::duration tick, std::unique_ptr<EventLoop>* out);
  ~EventLoop() { Stop(); }
  // Runs what has been posted, closes the connections, joins and gives back its descriptors. Not
  // from the loop's own thread.
  void Stop();

  // Has `task` run on the loop's thread, after those posted before. False, and it never runs, where
  // the loop has stopped.
  bool Post(std::function<void()> task);
  // The same, and returns when it has run. Not from the loop's own thread.
  bool PostAndWait(std::function<void()> task);

  // On the loop's thread only.
  Status Add(std::unique_ptr<Pollable> pollable, uint32_t interest);
  void SetInterest(Pollable* pollable, uint32_t interest);
  template <typename T, typename Visit>
  void ForEach(Visit visit) {
    for (size_t i = 0; i < pollables_.size(); ++i) {
      if (!pollables_[i]->closed()) visit(static_cast<T&>(*pollables_[i]));
    }
  }

 private:
  EventLoop(Clock::duration tick, UniqueFd epoll, UniqueFd wake)
      : tick_(tick), epoll_(std::move(epoll)), wake_(std::move(wake)) {}

  void Run();
  std::vector<std::function<void()>> TakeTasks(bool last);
  void Tick();

  const Clock::duration tick_;
  UniqueFd epoll_;
  UniqueFd wake_;  // written with mutex_ held
  std::vector<std::unique_ptr<Pollable>> pollables_;
  bool stop_ = false;  // on the loop's thread

  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;  // guarded by mutex_
  bool stopped_ = false;                      // guarded by mutex_: takes no more tasks

  std::once_flag stop_once_;
  std::thread thread_;
};

}  // namespace tsr
