// Random numbers of an emulated accelerator: every generator holds one of the CPU's, which draws for it.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <c10/core/Storage.h>

#include "queues.hpp"

namespace emu {

class RandomImpl final : public c10::GeneratorImpl {
 public:
  explicit RandomImpl(c10::DeviceIndex index)
      : c10::GeneratorImpl({kType, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::make_generator<at::CPUGeneratorImpl>()) {}

  at::Generator inner;

  // What was issued draws in its order, so the queues are emptied before the state is looked at.
  void settle() const { queues().synchronize(device_.index()); }
  void set_current_seed(uint64_t seed) override {
    settle();
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override {
    settle();
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    settle();
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    settle();
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  static c10::DeviceType device_type() { return kType; }

 private:
  RandomImpl* clone_impl() const override {
    settle();
    auto* copy = new RandomImpl(device_.index());
    copy->inner = inner.clone();
    return copy;
  }
};

inline const at::Generator& default_generator(int index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < kMaxDevices; ++i) made->push_back(at::make_generator<RandomImpl>(i));
    return made;
  }();
  return all->at(index < 0 ? current_device() : index);
}

inline at::Generator new_generator(int index) {
  return at::make_generator<RandomImpl>(index < 0 ? current_device() : index);
}

inline at::Generator& inner_of(const at::Generator& generator) {
  return static_cast<RandomImpl*>(generator.unsafeGetGeneratorImpl())->inner;
}

void resize(const c10::Storage& storage, size_t bytes);  // operators.cpp

}  // namespace emu
