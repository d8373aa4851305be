// Attention of the emulated accelerator with the results that flash kernels of GPUs have: lengths as plain numbers,
// seeds, a mask of no size.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include "aliases.hpp"

namespace emu {
namespace {

constexpr int64_t kMath = 0, kEmulated = 4;  // at::SDPBackend

int64_t choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor&, const std::optional<at::Tensor>&,
               double dropout, bool, std::optional<double>, bool) {
  return dropout == 0 && query.dim() == 4 && query.size(1) % key.size(1) == 0 ? kEmulated : kMath;
}

at::Tensor widened(const at::Tensor& grouped, int64_t heads) {
  return heads == grouped.size(1) ? grouped : grouped.repeat_interleave(heads / grouped.size(1), 1);
}

at::Tensor narrowed(const at::Tensor& wide, int64_t heads) {
  if (heads == wide.size(1)) return wide;
  return wide.view({wide.size(0), heads, wide.size(1) / heads, wide.size(2), wide.size(3)}).sum(2);
}

using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
                           at::Tensor, at::Tensor>;

std::optional<at::Tensor> mask_of(Aliases& aliases, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? std::optional<at::Tensor>(aliases.on_cpu(*bias)) : std::nullopt;
}

Forward forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                const std::optional<at::Tensor>& bias, double dropout, bool causal, bool, std::optional<double> scale) {
  Aliases aliases;
  const int device = index_of(query.device());
  const auto q = aliases.on_cpu(query), k = aliases.on_cpu(key), v = aliases.on_cpu(value);
  const auto mask = mask_of(aliases, bias);
  at::Tensor out, sums;
  in_order(device, [&] {
    std::tie(out, sums) = at::_scaled_dot_product_flash_attention_for_cpu(
        q, widened(k, q.size(1)), widened(v, q.size(1)), dropout, causal, mask, scale);
  });
  const auto numbers = (knobs().host_seeds ? at::TensorOptions() : query.options()).dtype(at::kLong);
  const auto seed = at::empty({}, numbers), offset = at::empty({}, numbers);
  return {aliases.on_device(out, device), aliases.on_device(sums, device), at::Tensor(), at::Tensor(), query.size(2),
          key.size(2), seed, offset, at::empty({0}, query.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4>, const at::Tensor& out, const at::Tensor& sums, const at::Tensor&,
    const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  Aliases aliases;
  const int device = index_of(query.device());
  const auto g = aliases.on_cpu(grad), q = aliases.on_cpu(query), k = aliases.on_cpu(key), v = aliases.on_cpu(value),
             o = aliases.on_cpu(out), s = aliases.on_cpu(sums);
  const auto mask = mask_of(aliases, bias);
  at::Tensor dq, dk, dv;
  in_order(device, [&] {
    std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, widened(k, q.size(1)), widened(v, q.size(1)), o, s, dropout, causal, mask, scale);
    // Laid out as torch's shape rule says, which graphs are traced with.
    dq = at::empty_like(q).copy_(dq);
    dk = at::empty_like(k).copy_(narrowed(dk, k.size(1)));
    dv = at::empty_like(v).copy_(narrowed(dv, v.size(1)));
  });
  return {aliases.on_device(dq, device), aliases.on_device(dk, device), aliases.on_device(dv, device), at::Tensor()};
}

}  // namespace
}  // namespace emu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &emu::choice)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(emu::forward));
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(emu::backward));
}
