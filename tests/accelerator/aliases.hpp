// Tensors of the device as tensors of the CPU on the same memory, and results of the CPU brought to the device.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <unordered_map>

#include "memory.hpp"

namespace emu {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
const c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// Storages of one call, in both directions, so that tensors which share bytes share them on the other side, too.
class Aliases {
 public:
  at::Tensor on_cpu(const at::Tensor& tensor) {
    const auto& base = tensor.storage();
    auto& known = cpu_[base.unsafeGetStorageImpl()];
    if (!known) {
      // The memory stays mapped when the host gives it back, so work that is still queued may look at it.
      known = c10::Storage(c10::Storage::use_byte_size_t(), base.nbytes(),
                           c10::DataPtr(base.mutable_data(), c10::Device(c10::DeviceType::CPU)), nullptr, false);
      device_.emplace(known.unsafeGetStorageImpl(), base);
    }
    return view(known, tensor, kCpuKeys);
  }

  // A result: a view of an argument's bytes, or bytes of its own, which are copied.
  at::Tensor on_device(const at::Tensor& tensor, int device) {
    if (!tensor.defined()) return tensor;
    const auto& base = tensor.storage();
    auto found = device_.find(base.unsafeGetStorageImpl());
    if (found == device_.end()) {
      const auto before = std::exchange(current_device(), device);
      c10::Storage made(c10::Storage::use_byte_size_t(), base.nbytes(), memory().allocate(base.nbytes()), &memory(), true);
      current_device() = before;
      if (base.nbytes() != 0) {
        here(device).push([target = made.mutable_data(), source = base, bytes = base.nbytes()] {
          std::memcpy(target, source.data(), bytes);
        });
      }
      found = device_.emplace(base.unsafeGetStorageImpl(), made).first;
      results_.push_back(base);
    }
    return view(found->second, tensor, kKeys);
  }

 private:
  static at::Tensor view(const c10::Storage& base, const at::Tensor& like, c10::DispatchKeySet keys) {
    auto made = at::detail::make_tensor<at::TensorImpl>(c10::Storage(base), keys, like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.is_conj()) made._set_conj(true);
    if (like.is_neg()) made._set_neg(true);
    return made;
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_, device_;
  std::vector<c10::Storage> results_;  // keeps addresses of results from being used twice within a call
};

// Inside, the CPU's kernels are called without autograd, on whatever thread this is.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard autograd{c10::autograd_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard inplace{c10::DispatchKey::ADInplaceOrView};
};

inline void delay(int64_t microseconds) {
  if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

// Runs work in the order of the current stream and waits for it.
template <class F>
void in_order(int device, F&& work) {
  auto& queue = here(device);
  queue.push([&] {
    BelowAutograd below;
    delay(knobs().operator_delay_us);
    work();
  });
  queue.synchronize();
}

}  // namespace emu
