// Collectives of the emulated accelerator: those of the host (gloo) on copies, in the order of the current stream.
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "queues.hpp"

namespace emu {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors to_host(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) all.push_back(tensor.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  return all;
}

void bring_back(const Tensors& targets, const Tensors& values) {
  for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(values[i]);
}

class Collectives final : public c10d::Backend {
 public:
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> host)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}

  const std::string getBackendName() const override { return "emuccl"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto here = to_host(tensors);
    auto work = done(host_->broadcast(here, options));
    bring_back(tensors, here);
    return work;
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto here = to_host(tensors);
    auto work = done(host_->allreduce(here, options));
    bring_back(tensors, here);
    return work;
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    auto here = to_host(ins);
    std::vector<Tensors> all;
    for (const auto& out : outs) all.push_back(to_host(out));
    auto work = done(host_->allgather(all, here, options));
    for (size_t i = 0; i < outs.size(); ++i) bring_back(outs[i], all[i]);
    return work;
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    auto to = out.cpu(), from = in.cpu();
    auto work = done(host_->_allgather_base(to, from, options));
    out.copy_(to);
    return work;
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto to = out.cpu(), from = in.cpu();
    auto work = done(host_->_reduce_scatter_base(to, from, options));
    out.copy_(to);
    return work;
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) override {
    auto to = out.cpu(), from = in.cpu();
    auto work = done(host_->alltoall_base(to, from, out_splits, in_splits, options));
    out.copy_(to);
    return work;
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return done(host_->barrier(options)); }

 private:
  static WorkPtr done(WorkPtr work) {
    WithoutGil free;
    work->wait();
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
};

}  // namespace

void bind_collectives(pybind11::module_& m) {
  m.def("collectives", [](const c10::intrusive_ptr<c10d::Backend>& host) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(host);
  });
}

}  // namespace emu
