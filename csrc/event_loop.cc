#include "event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <future>
#include <string>
#include <system_error>
#include <utility>

namespace tsr {
namespace {

Status SystemError(const char* call) {
  return Status(Code::kSystem, std::string(call) + ": " + ::strerrordesc_np(errno));
}

}  // namespace

void Pollable::CloseFd() {
  // Where a child process inherited the descriptor, closing it alone ends neither the connection
  // nor the events, which would then name an object that is gone.
  if (epoll_ >= 0 && !closed()) {
    (void)::epoll_ctl(epoll_, EPOLL_CTL_DEL, fd(), nullptr);
    (void)::shutdown(fd(), SHUT_RDWR);
  }
  fd_.Close();
}

Status EventLoop::Start(Clock::duration tick, std::unique_ptr<EventLoop>* out) {
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (epoll.get() < 0) return SystemError("epoll_create1");
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake.get() < 0) return SystemError("eventfd");
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) < 0) {
    return SystemError("epoll_ctl");
  }
  std::unique_ptr<EventLoop> loop(new EventLoop(tick, std::move(epoll), std::move(wake)));
  try {
    loop->thread_ = std::thread([self = loop.get()] { self->Run(); });
  } catch (const std::system_error& error) {
    return Status(Code::kSystem, std::string("this process could start no thread (") +
                                     error.what() +
                                     "): raise `ulimit -u`, or pids.max of its cgroup");
  }
  *out = std::move(loop);
  return Status();
}

void EventLoop::Stop() {
  std::call_once(stop_once_, [this] {
    if (!thread_.joinable()) return;
    Post([this] { stop_ = true; });
    thread_.join();
    std::lock_guard lock(mutex_);  // a Post() of before the last tasks were taken
    epoll_.Close();
    wake_.Close();
  });
}

bool EventLoop::Post(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  if (stopped_) return false;
  tasks_.push_back(std::move(task));
  // Fails only when the counter is full, and then the loop wakes up anyway.
  (void)::eventfd_write(wake_.get(), 1);
  return true;
}

bool EventLoop::PostAndWait(std::function<void()> task) {
  // Shared: the waiter may be gone before set_value() returns.
  const auto ran = std::make_shared<std::promise<void>>();
  const bool posted = Post([ran, &task] {
    task();
    ran->set_value();
  });
  if (posted) ran->get_future().wait();
  return posted;
}

Status EventLoop::Add(std::unique_ptr<Pollable> pollable, uint32_t interest) {
  epoll_event event{.events = interest, .data = {.ptr = pollable.get()}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, pollable->fd(), &event) < 0) {
    return SystemError("epoll_ctl");
  }
  pollable->epoll_ = epoll_.get();
  pollable->interest_ = interest;
  pollables_.push_back(std::move(pollable));
  return Status();
}

void EventLoop::SetInterest(Pollable* pollable, uint32_t interest) {
  if (pollable->interest_ == interest || pollable->closed()) return;
  epoll_event event{.events = interest, .data = {.ptr = pollable}};
  // Can't fail for a descriptor that was added and is open.
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, pollable->fd(), &event);
  pollable->interest_ = interest;
}

void EventLoop::Run() {
  std::array<epoll_event, 64> events;
  Clock::time_point next_tick = Clock::now() + tick_;
  while (!stop_) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_tick - Clock::now());
    const int timeout_ms = static_cast<int>(std::max<int64_t>(left.count(), 0));
    const int n = ::epoll_wait(epoll_.get(), events.data(), events.size(), timeout_ms);
    bool woken = false;
    for (int i = 0; i < n; ++i) {
      auto* pollable = static_cast<Pollable*>(events[i].data.ptr);
      if (pollable == nullptr) {
        woken = true;
      } else if (!pollable->closed()) {
        pollable->OnReady(events[i].events);
      }
    }
    if (woken) {
      eventfd_t count;
      (void)::eventfd_read(wake_.get(), &count);
      for (const auto& task : TakeTasks(/*last=*/false)) task();
    }
    if (Clock::now() >= next_tick) {
      Tick();
      next_tick = Clock::now() + tick_;
    }
    std::erase_if(pollables_, [](const auto& pollable) { return pollable->closed(); });
  }
  for (const auto& task : TakeTasks(/*last=*/true)) task();
  pollables_.clear();
}

std::vector<std::function<void()>> EventLoop::TakeTasks(bool last) {
  std::lock_guard lock(mutex_);
  stopped_ = last;
  return std::exchange(tasks_, {});
}

void EventLoop::Tick() {
  const Clock::time_point now = Clock::now();
  ForEach<Pollable>([&](Pollable& pollable) { pollable.OnTick(now); });
}

}  // namespace tsr
