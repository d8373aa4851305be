// Streams and events of an emulated accelerator: every stream is a host thread that works off its queue in order.
#pragma once

#include <ATen/Parallel.h>
#include <Python.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace emu {

constexpr int kMaxDevices = 8;
constexpr auto kType = c10::DeviceType::PrivateUse1;

// Knobs of the tests.
struct Knobs {
  std::atomic<int> devices{1};
  std::atomic<int64_t> copy_delay_us{0};    // before every copy between host and device
  std::atomic<int64_t> bytes_per_s{0};      // of such a copy; 0: as fast as it goes
  std::atomic<int64_t> operator_delay_us{0};// before every operator
  std::atomic<int64_t> skip_stream_wait{-1};// number of the one wait of a stream that is left out
  std::atomic<int64_t> skip_host_wait{-1};  // the same of the waits of the host for an event
  std::atomic<int64_t> stream_waits{0}, host_waits{0};
  std::atomic<int64_t> fail_copy{-1};       // number of the copy between host and device that fails
  std::atomic<int64_t> copies{0};
  std::atomic<int64_t> host_seeds{0};       // seeds of attention lie in host memory, as with some kernels of CUDA
  std::atomic<int64_t> late_poison{0};      // freed memory becomes NaN when it is handed out again, not before
  std::atomic<int64_t> workspace_bytes{0};  // what the first matrix product on a stream takes for good
};

inline Knobs& knobs() {
  static auto* all = new Knobs();
  return *all;
}

// Let Python go on while this thread waits: what it waits for may need the interpreter.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

// What failed on a device shows at a later call, as on a real one: any stream's, any event's. Raised once.
class Failure {
 public:
  void keep(std::exception_ptr error) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = error;
  }
  void raise() {
    std::unique_lock<std::mutex> lock(mutex_);
    auto error = std::exchange(error_, nullptr);
    lock.unlock();
    if (error) std::rethrow_exception(error);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

inline Failure& failure(int device) {
  static auto* all = new std::array<Failure, kMaxDevices>();
  return all->at(device);
}

class Queue {
 public:
  explicit Queue(int device) : device_(device) {}

  uint64_t push(std::function<void()> work) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    work_.push_back(std::move(work));
    changed_.notify_all();
    return ++issued_;
  }

  // Waits for everything issued so far.
  void synchronize() {
    WithoutGil free;
    std::unique_lock<std::mutex> lock(mutex_);
    const auto ticket = issued_;
    changed_.wait(lock, [&] { return done_ >= ticket; });
    lock.unlock();
    check();
  }

  bool idle() {
    std::unique_lock<std::mutex> lock(mutex_);
    return done_ == issued_;
  }

  void check() { failure(device_).raise(); }

 private:
  void run() {
    at::init_num_threads();
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !work_.empty(); });
      auto work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      try {
        work();
      } catch (...) {
        failure(device_).keep(std::current_exception());
      }
      work = nullptr;
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  uint64_t issued_ = 0, done_ = 0;
  const int device_;
  std::thread thread_;  // never ends: queues live as long as the process
};

class Queues {
 public:
  Queues() {
    for (int device = 0; device < kMaxDevices; ++device) queues_[device].push_back(std::make_unique<Queue>(device));
  }

  Queue& at(const c10::Stream& stream) { return at(stream.device_index(), stream.id()); }
  Queue& at(int device, int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return *queues_.at(device).at(id);
  }
  int64_t make(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    queues_.at(device).push_back(std::make_unique<Queue>(device));
    return static_cast<int64_t>(queues_[device].size()) - 1;
  }
  void synchronize(int device) {
    std::vector<Queue*> all;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& queue : queues_.at(device)) all.push_back(queue.get());
    }
    for (auto* queue : all) queue->synchronize();
  }

 private:
  std::mutex mutex_;
  std::array<std::vector<std::unique_ptr<Queue>>, kMaxDevices> queues_;
};

inline Queues& queues() {
  static auto* all = new Queues();
  return *all;
}

inline int& current_device() {
  thread_local int device = 0;
  return device;
}

// Stream 0 of every device is the default one; every thread begins on it.
inline std::array<int64_t, kMaxDevices>& current_streams() {
  thread_local std::array<int64_t, kMaxDevices> ids{};
  return ids;
}

inline int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

inline c10::Stream current_stream(int device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), current_streams().at(device));
}

inline Queue& here(int device) { return queues().at(current_stream(device)); }

// One recording of an event.
class Mark {
 public:
  void reach() {
    std::lock_guard<std::mutex> lock(mutex_);
    at_ = std::chrono::steady_clock::now();
    reached_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
  }
  bool reached() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }
  std::chrono::steady_clock::time_point at() { return at_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point at_;
};

struct Event {
  bool timed = false;
  int device = 0;
  std::shared_ptr<Mark> mark;
};

inline void record(Event& event, const c10::Stream& stream) {
  auto mark = event.mark = std::make_shared<Mark>();
  event.device = stream.device_index();
  queues().at(stream).push([mark] { mark->reach(); });
}

inline void block(const Event& event, const c10::Stream& stream) {
  if (!event.mark) return;
  if (knobs().stream_waits++ == knobs().skip_stream_wait) return;
  queues().at(stream).push([mark = event.mark] { mark->wait(); });
}

inline void synchronize(const Event& event) {
  if (!event.mark) return;
  if (knobs().host_waits++ == knobs().skip_host_wait) return;
  {
    WithoutGil free;
    event.mark->wait();
  }
  failure(event.device).raise();
}

inline double elapsed_ms(const Event& begin, const Event& end) {
  TORCH_CHECK(begin.timed && end.timed, "both events must be made with enable_timing=True");
  TORCH_CHECK(begin.mark && end.mark, "both events must be recorded before the time between them is known");
  TORCH_CHECK(begin.mark->reached() && end.mark->reached(), "device not ready: an event has not been reached yet");
  return std::chrono::duration<double, std::milli>(end.mark->at() - begin.mark->at()).count();
}

}  // namespace emu
