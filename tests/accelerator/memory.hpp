// Memory of an emulated accelerator: host memory that is counted, cached by stream, and poisoned when it is given back.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "queues.hpp"

namespace emu {

constexpr size_t kUnit = 512, kMiB = size_t{1} << 20;
constexpr int kPoison = 0xFF;  // NaN as floating point, -1 as an integer

inline size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Block {
  size_t counted, room;
  int device;
  int64_t stream;                    // where it was allocated: in this order it is handed out again
  std::unordered_set<int64_t> used;  // other streams that `record_stream` named
};

// Works as the caching allocators of real devices do: bytes count as free when the host lets go of them, and may be
// handed out again at once, but only to the stream that they came from. They are poisoned in the order of that stream,
// at the first moment at which they could belong to someone else. That is stricter than a real device: a program may
// free what another stream still reads, if it has their own stream wait before it asks for bytes again, as FSDP does
// with gradients. For such programs `late_poison` is the moment at which they do belong to someone else.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  struct Device {
    int64_t live = 0, peak = 0, capacity = int64_t{8} << 30, others = 0, allocations = 0;
  };

  bool large_blocks = false;  // a block of 10 MiB and more takes what is left of its 2 MiB pages, up to 1 MiB

  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device where(kType, device);
    if (bytes == 0) return {nullptr, nullptr, &give_back, where};
    size_t counted = rounded(bytes, kUnit);
    if (large_blocks && counted >= 10 * kMiB) {
      const size_t pages = rounded(counted, 2 * kMiB);
      if (pages - counted <= kMiB) counted = pages;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = devices[device];
    TORCH_CHECK_WITH(
        OutOfMemoryError, stats.live + stats.others + static_cast<int64_t>(counted) <= stats.capacity,
        "emu out of memory. Tried to allocate ", bytes, " bytes. Device ", device, " has a capacity of ",
        stats.capacity, " bytes of which ", stats.capacity - stats.live - stats.others, " bytes are free.");
    const auto stream = current_streams()[device];
    auto& cached = cache_[{device, stream, counted}];
    void* data = nullptr;
    if (cached.empty()) {
      data = std::aligned_alloc(kUnit, counted);
      std::memset(data, kPoison, counted);
    } else {
      data = cached.back();
      cached.pop_back();
      if (knobs().late_poison) poison(queues().at(device, stream), data, counted);
    }
    blocks_[data] = {counted, counted, device, stream, {}};
    stats.live += static_cast<int64_t>(counted);
    stats.peak = std::max(stats.peak, stats.live);
    ++stats.allocations;
    return {data, data, &give_back, where};
  }

  void free(void* data) {
    Block block;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = blocks_.find(data);
      block = std::move(found->second);
      blocks_.erase(found);
      devices[block.device].live -= static_cast<int64_t>(block.counted);
    }
    auto& queue = queues().at(block.device, block.stream);
    for (auto other : block.used) {
      auto mark = std::make_shared<Mark>();
      queues().at(block.device, other).push([mark] { mark->reach(); });
      queue.push([mark] { mark->wait(); });
    }
    if (!knobs().late_poison) poison(queue, data, block.room);
    std::lock_guard<std::mutex> lock(mutex_);
    cache_[{block.device, block.stream, block.room}].push_back(data);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    queues().synchronize(current_device());
    std::memcpy(target, source, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(data.get());
    if (found != blocks_.end() && found->second.stream != stream.id()) found->second.used.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* all : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*all)[0].current = devices[index].live;
      (*all)[0].peak = devices[index].peak;
    }
    stats.allocation[0].allocated = devices[index].allocations;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(mutex_);
    devices[index].peak = devices[index].live;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& stats = devices[index];
    return {stats.capacity - stats.live - stats.others, stats.capacity};
  }

  std::array<Device, kMaxDevices> devices;

 private:
  static void give_back(void* data);
  static void poison(Queue& queue, void* data, size_t bytes) {
    queue.push([data, bytes] { std::memset(data, kPoison, bytes); });
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<void*>> cache_;
};

inline DeviceMemory& memory() {
  static auto* all = new DeviceMemory();
  return *all;
}

inline void DeviceMemory::give_back(void* data) {
  if (data != nullptr) memory().free(data);
}

// Pinned host memory: only from here a copy goes on without the host. Requests are rounded up to powers of two.
class PinnedMemory final : public c10::Allocator {
 public:
  std::atomic<int64_t> live{0};

  c10::DataPtr allocate(size_t bytes) override {
    size_t room = 64;
    while (room < bytes) room *= 2;
    void* data = std::aligned_alloc(64, room);
    std::memset(data, kPoison, room);
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[reinterpret_cast<uintptr_t>(data)] = room;
    live += static_cast<int64_t>(room);
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = reinterpret_cast<uintptr_t>(data);
    auto next = ranges_.upper_bound(at);
    return next != ranges_.begin() && at < std::prev(next)->first + std::prev(next)->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }

 private:
  static void give_back(void* data);

  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
};

inline PinnedMemory& pinned() {
  static auto* all = new PinnedMemory();
  return *all;
}

inline void PinnedMemory::give_back(void* data) {
  if (data == nullptr) return;
  for (int device = 0; device < knobs().devices; ++device) queues().synchronize(device);  // copies may still use it
  auto& all = pinned();
  std::lock_guard<std::mutex> lock(all.mutex_);
  const auto found = all.ranges_.find(reinterpret_cast<uintptr_t>(data));
  std::memset(data, kPoison, found->second);
  all.live -= static_cast<int64_t>(found->second);
  all.ranges_.erase(found);
  std::free(data);
}

}  // namespace emu
