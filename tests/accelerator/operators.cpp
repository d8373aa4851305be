// Operators of the emulated accelerator: memory, views and copies by hand, everything else by the CPU's kernels.
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "aliases.hpp"
#include "random.hpp"

namespace emu {

void resize(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const int device = index_of(storage.device());
  const auto before = std::exchange(current_device(), device);
  auto data = memory().allocate(bytes);
  current_device() = before;
  const auto kept = std::min(bytes, storage.nbytes());
  if (kept != 0) {
    here(device).push([target = data.get(), source = storage.data(), kept] { std::memcpy(target, source, kept); });
  }
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

namespace {

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_generic(size, &memory(), kKeys, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(size, stride, &memory(), kKeys, dtype.value_or(at::kFloat));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    const auto needed = static_cast<size_t>((self.storage_offset() + self.numel()) * self.itemsize());
    if (self.numel() != 0 && needed > self.storage().nbytes()) {
      TORCH_CHECK(self.storage().resizable(), "Trying to resize storage that is not resizable");
      resize(self.storage(), needed);
    }
  }
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  const auto needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), offset);
  TORCH_CHECK(self.numel() == 0 || needed <= source.nbytes(), "the view does not fit into the storage");
  return self;
}

bool pinned_cpu(const at::Tensor& tensor) { return tensor.is_cpu() && pinned().holds(tensor.storage().data()); }

// In the order of the current stream. Only pinned memory is copied without the host.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  const bool between = !(on_device(self) && on_device(target));
  const int device = index_of(on_device(self) ? self.device() : target.device());
  Aliases aliases;
  const at::Tensor host = on_device(self) ? target : self;
  const bool alone = !between || (non_blocking && pinned_cpu(host));
  // Neither side is owned: as on a real device a copy that is under way keeps no tensor alive.
  at::Tensor from = aliases.on_cpu(self);
  const at::Tensor into = aliases.on_cpu(target);
  const bool staged = between && non_blocking && !on_device(self) && !pinned_cpu(host);
  if (staged) from = from.clone();  // the driver's own buffer: the caller may change its memory at once
  const auto bytes = static_cast<int64_t>(target.nbytes());
  auto& queue = here(device);
  queue.check();
  queue.push([from, into, between, bytes] {
    BelowAutograd below;
    if (between) {
      auto& all = knobs();
      TORCH_CHECK(all.copies++ != all.fail_copy, "emu error: a copy failed");
      delay(all.copy_delay_us + (all.bytes_per_s ? bytes * 1'000'000 / all.bytes_per_s : 0));
    } else {
      delay(knobs().operator_delay_us);
    }
    into.copy_(from);
  });
  if (between && !alone && !staged) queue.synchronize();
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  Aliases aliases;
  const auto there = aliases.on_cpu(self);
  at::Scalar value;
  in_order(index_of(self.device()), [&] { value = at::_local_scalar_dense(there); });
  return value;
}

// Counting whole numbers is something that CUDA's kernel does and the CPU's does not.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  Aliases aliases;
  const int device = index_of(self.device());
  const auto there = aliases.on_cpu(self);
  at::Tensor counts;
  in_order(device, [&] {
    const auto type = self.scalar_type();
    counts = at::isIntegralType(type, false) ? there.to(at::kDouble).histc(bins, low, high).to(type)
                                             : there.histc(bins, low, high);
  });
  return aliases.on_device(counts, device);
}

at::Tensor& histc_out(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high,
                      at::Tensor& out) {
  return out.copy_(emu::histc(self, bins, low, high));
}

void record_stream(at::Tensor& self, at::Stream stream) { memory().recordStream(self.storage().data_ptr(), stream); }

// -- everything else ---------------------------------------------------------------------------

bool mixes_devices(const std::string& name) {
  return name == "aten::index" || name.rfind("aten::index_put", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
}

// One call on its way to the CPU.
struct Call {
  const c10::OperatorHandle& op;
  std::unique_ptr<Aliases> aliases = std::make_unique<Aliases>();
  std::vector<std::pair<at::Tensor, at::Tensor>> resized;  // (of the device, of the CPU) `out` arguments of no size
  int device = -1;
  bool draws = false;

  c10::IValue in(const c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) return tensor(value.toTensor(), argument);
    if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const auto& item : value.toTensorVector()) all.push_back(tensor(item, argument));
      return all;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const std::optional<at::Tensor> item : value.toOptionalTensorList()) {
        all.push_back(item ? std::optional<at::Tensor>(tensor(*item, argument)) : std::nullopt);
      }
      return all;
    }
    if (value.isDevice() && value.toDevice().type() == kType) {
      device = index_of(value.toDevice());
      return c10::Device(c10::DeviceType::CPU);
    }
    if (value.isGenerator() && value.toGenerator().device().type() == kType) return inner_of(value.toGenerator());
    return value;
  }

  at::Tensor tensor(const at::Tensor& value, const c10::Argument& argument) {
    if (!value.defined()) return value;
    if (!on_device(value)) {
      TORCH_CHECK(value.dim() == 0 || mixes_devices(op.schema().name()),
                  "Expected all tensors to be on the same device, but `", argument.name(), "` of ", op.schema().name(),
                  " is on ", value.device());
      return value.detach().clone();  // its value now, whatever the host does next
    }
    device = index_of(value.device());
    const bool out = argument.is_out() && argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (out && value.numel() == 0) {
      resized.emplace_back(value, at::detail::empty_cpu({0}, value.scalar_type()));
      return resized.back().second;
    }
    return aliases->on_cpu(value);
  }
};

// A workspace as libraries for products take one: at the first product on a stream, for good.
void take_workspace(const std::string& name, int device) {
  static auto* taken = new std::map<std::pair<int, int64_t>, c10::DataPtr>();
  static const std::unordered_set<std::string> products{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
  const auto bytes = knobs().workspace_bytes.load();
  const auto key = std::make_pair(device, current_streams()[device]);
  if (bytes > 0 && products.count(name) != 0 && taken->count(key) == 0) (*taken)[key] = memory().allocate(bytes);
}

void by_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto begin = stack->size() - arguments.size();
  std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
  Call call{op};
  auto inside = std::make_shared<torch::jit::Stack>();
  for (size_t i = 0; i < arguments.size(); ++i) inside->push_back(call.in(given[i], arguments[i]));
  if (call.device < 0) call.device = current_device();
  const int device = call.device;
  bool has_generator = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() != "generator") continue;
    has_generator = true;
    if (given[i].isNone()) (*inside)[i] = inner_of(default_generator(device));
  }
  const bool seeded = !has_generator && op.hasTag(at::Tag::nondeterministic_seeded);
  take_workspace(schema.name(), device);

  bool writes_only = call.resized.empty();
  for (const auto& result : schema.returns()) {
    writes_only &= result.alias_info() != nullptr && result.alias_info()->isWrite();
  }
  auto work = [op, inside, seeded, device] {
    BelowAutograd below;
    delay(knobs().operator_delay_us);
    if (!seeded) return op.callBoxed(inside.get());
    // Without an argument for it a kernel draws from the CPU's default generator: lend it our state.
    auto ours = inner_of(default_generator(device));
    auto theirs = at::detail::getDefaultCPUGenerator();
    const auto before = theirs.get_state();
    theirs.set_state(ours.get_state());
    op.callBoxed(inside.get());
    ours.set_state(theirs.get_state());
    theirs.set_state(before);
  };
  auto& queue = here(device);
  queue.check();
  queue.push(work);
  if (!writes_only) queue.synchronize();

  for (const auto& [target, made] : call.resized) {
    if (made.numel() == 0) continue;
    target.resize_(made.sizes());
    if (target.strides() != made.strides()) target.as_strided_(made.sizes(), made.strides());
    copy_from(made, target, false);
  }
  // What is written comes back as it was given; all else is a fresh tensor or a view.
  std::vector<c10::IValue> results;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (size_t j = 0; j < arguments.size(); ++j) {
        const auto* other = arguments[j].alias_info();
        if (other != nullptr && other->isWrite() && other->beforeSets() == alias->beforeSets()) {
          results.push_back(given[j]);
          break;
        }
      }
      TORCH_CHECK(results.size() == i + 1, "no argument is the result of ", schema.name());
      continue;
    }
    const auto& value = inside->at(inside->size() - schema.returns().size() + i);
    if (value.isTensor()) {
      results.emplace_back(call.aliases->on_device(value.toTensor(), device));
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const auto& item : value.toTensorVector()) all.push_back(call.aliases->on_device(item, device));
      results.emplace_back(all);
    } else {
      results.push_back(value);
    }
  }
  stack->resize(begin);
  for (auto& result : results) stack->push_back(std::move(result));
}

}  // namespace
}  // namespace emu

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&emu::by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(emu::empty));
  m.impl("empty_strided", TORCH_FN(emu::empty_strided));
  m.impl("resize_", TORCH_FN(emu::resize_));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(emu::set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("_copy_from", TORCH_FN(emu::copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(emu::copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(emu::local_scalar));
  m.impl("histc", TORCH_FN(emu::histc));
  m.impl("histc.out", TORCH_FN(emu::histc_out));
  m.impl("record_stream", TORCH_FN(emu::record_stream));
}
