// An emulated accelerator behind torch's PrivateUse1 registration: guard, hooks, random numbers, knobs of the tests.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Generator.h>

#include "memory.hpp"
#include "random.hpp"

namespace emu {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(!device.has_index() || device.index() < knobs().devices, "there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device() = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(device, queues().make(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    current_streams().at(stream.device_index()) = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return queues().at(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { queues().at(stream).synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex index) const override { queues().synchronize(index); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory().recordStream(data, stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return knobs().devices; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag)
      const override {
    if (*event == nullptr) *event = new Event{.timed = flag == c10::EventFlag::BACKEND_DEFAULT};
    emu::record(*static_cast<Event*>(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) emu::block(*static_cast<Event*>(event), stream);
  }
  bool queryEvent(void* event) const override {
    auto* known = static_cast<Event*>(event);
    return known == nullptr || !known->mark || known->mark->reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) emu::synchronize(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return elapsed_ms(*static_cast<Event*>(begin), *static_cast<Event*>(end));
  }

 private:
  static c10::Stream stream_of(c10::Device device, int64_t id) {
    const c10::Device where(kType, static_cast<c10::DeviceIndex>(index_of(device)));
    return c10::Stream(c10::Stream::UNSAFE, where, id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return knobs().devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return knobs().devices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kType, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kType, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return pinned().holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  c10::Device getDeviceFromPtr(void*) const override { return {kType, getCurrentDevice()}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize(storage, bytes); }
};

static void say(DeviceMemory::Device& stats, int64_t capacity, int64_t others) {
  stats.capacity = capacity;
  stats.others = others;
}

void bind_collectives(pybind11::module_& m);  // collectives.cpp

}  // namespace emu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emu;
  bind_collectives(m);
  c10::SetAllocator(kType, &memory(), 1);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("devices", [] { return knobs().devices.load(); });
  m.def("generator", [](int device) {
    return pybind11::reinterpret_steal<pybind11::object>(THPGenerator_Wrap(default_generator(device)));
  });
  m.def("set_devices", [](int count) { knobs().devices = count; });
  m.def("set_capacity", [](int device, int64_t bytes, int64_t others) {
    say(memory().devices.at(device), bytes, others);
  });
  m.def("set_large_blocks", [](bool on) { memory().large_blocks = on; });
  m.def("pinned_bytes", [] { return pinned().live.load(); });
  m.def("allocations", [](int device) { return memory().devices.at(device).allocations; });
#define KNOB(name)                                    \
  m.def("set_" #name, [](int64_t value) { knobs().name = value; }); \
  m.def(#name, [] { return knobs().name.load(); });
  KNOB(copy_delay_us)
  KNOB(bytes_per_s)
  KNOB(operator_delay_us)
  KNOB(skip_stream_wait)
  KNOB(skip_host_wait)
  KNOB(stream_waits)
  KNOB(host_waits)
  KNOB(fail_copy)
  KNOB(copies)
  KNOB(host_seeds)
  KNOB(late_poison)
  KNOB(workspace_bytes)
}
