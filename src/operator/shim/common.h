// What every operator family needs: how a tensor is shown to Rust, how Rust's errors come back, which devices have
// kernels, and how a higher-order gradient is taken of a composed formula.
#pragma once
#include "arguments.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

extern "C" {
// A matrix as Rust sees it (operator/ffi.rs, `View`). data is null where a tensor is absent; device is a CUDA device's
// number, or -1 for the CPU.
struct View {
  void* data;
  int64_t rows, cols, stride;
  int32_t dtype;
  int32_t device = -1;
};
// What dropout needs (operator/ffi.rs, `Draw`); p = 0: nothing is dropped.
struct Draw {
  double p;
  int64_t seed, update, micro_batch, site;
  const int64_t* device_seed = nullptr;
};
int nfrs_cuda_ready(int32_t device);  // 1: kernels run there; 0: they cannot; -1: they cannot, and are required
bool nfrs_cuda_stand_in();            // whether tensors of the CPU take the CUDA kernels' way: for the tests
int64_t nfrs_cuda_blocks(int32_t device);  // that may sum over rows at a time
const char* nfrs_rust_error();  // the message of this thread's last failed call into Rust
Tensor* nfrs_dropout_scale(const Draw* draw, int64_t rows, int64_t cols);  // 0 or 1/(1-p), float64, CPU
}

namespace nfrs {

inline int32_t dtype_code(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return 0;
    case at::kDouble: return 1;
    case at::kBFloat16: return 2;
    case at::kHalf: return 3;
    case at::kLong: return 4;
    case at::kBool:
    case at::kByte: return 5;
    default: return -1;
  }
}
inline at::ScalarType acc_type(const Tensor& x) { return arguments::computed(x.scalar_type()); }

// The CUDA device whose kernels a tensor takes, or -1.
inline int32_t kernel_device(const Tensor& t) {
  if (t.is_cuda()) return t.get_device();
  return t.is_cpu() && nfrs_cuda_stand_in() && t.scalar_type() != at::kDouble ? 0 : -1;
}

// Rows are all dimensions but the last. The tensor must be contiguous (or a matrix with unit column stride) and must
// outlive the view.
inline View view(const Tensor& t) {
  if (!t.defined()) return View{nullptr, 0, 0, 0, -1};
  const int64_t cols = t.dim() == 0 ? 1 : t.size(-1);
  const int64_t rows = cols == 0 ? 0 : t.numel() / cols;
  const int64_t stride = t.dim() == 2 ? t.stride(0) : cols;
  return View{const_cast<void*>(t.const_data_ptr()), rows, cols, stride, dtype_code(t), kernel_device(t)};
}

// A parameter as kernels read it: in the accumulation type, contiguous; undefined where absent.
inline Tensor parameter(const MaybeTensor& t, at::ScalarType type) {
  return t && t->defined() ? t->to(type).contiguous() : Tensor();
}
// What a norm's parameters are read in. A GPU's kernels take 16 bits as they are, where both have the same.
inline at::ScalarType parameter_type(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias) {
  const auto code = [](const MaybeTensor& t) { return t && t->defined() ? dtype_code(*t) : -1; };
  const auto w = code(weight), b = code(bias), both = w < 0 || w == b ? b : b < 0 ? w : -1;
  if (kernel_device(x) < 0 || (both != 2 && both != 3)) return acc_type(x);
  return both == 2 ? at::kBFloat16 : at::kHalf;
}
inline Tensor value(const MaybeTensor& t) { return t ? *t : Tensor(); }
inline MaybeTensor maybe(const Tensor& t) { return t.defined() ? MaybeTensor(t) : std::nullopt; }
inline const Tensor* pointer(const MaybeTensor& t) { return t && t->defined() ? &*t : nullptr; }

// For autograd, of a tensor that a kernel wrote to: what was saved of it is gone.
inline void written(const Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

inline void check_rust(int status) { TORCH_CHECK(status == 0, nfrs_rust_error()); }
// Takes over tensors that Rust made.
inline Tensor take(Tensor* made) {
  TORCH_CHECK(made != nullptr, nfrs_rust_error());
  Tensor t = std::move(*made);
  delete made;
  return t;
}

inline void check_rate(const Name& op, double p) {
  TORCH_CHECK_VALUE(p >= 0 && p < 1, op, ": dropout p must lie in [0, 1), got ", p);
}
// What says what is dropped; the seed itself is checked by the operator's table.
inline void check_dropout(const Name& op, double p, const Tensor* seed) {
  check_rate(op, p);
  TORCH_CHECK_VALUE(p == 0 || seed, op, ": with p > 0 a seed is needed, an int64 tensor (seed, update, micro_batch)");
}
// Tables' entry of a seed.
constexpr Argument SEED{"seed", "=3", Type::INT64, OPTIONAL | HOST};

// The seed tensor holds (seed, update, micro-batch).
inline Draw draw(double p, const MaybeTensor& seed, int64_t site) {
  if (p == 0) return Draw{0, 0, 0, 0, 0};
  const Tensor host = seed->cpu().contiguous();
  const auto* s = host.const_data_ptr<int64_t>();
  return Draw{p, s[0], s[1], s[2], site};
}

// The same for kernels. A GPU's read the numbers where they are: nothing waits for the device. `seed` is seed_beside's.
inline Draw draw_beside(double p, const Tensor& x, const Tensor& seed, int64_t site) {
  if (p == 0 || kernel_device(x) < 0) return draw(p, maybe(seed), site);
  Draw d{p, 0, 0, 0, site};
  d.device_seed = seed.const_data_ptr<int64_t>();
  return d;
}
inline Tensor seed_beside(double p, const Tensor& x, const MaybeTensor& seed) {
  if (p == 0 || kernel_device(x) < 0) return value(seed);
  return seed->to(x.device()).contiguous();
}

// Room for what the blocks of a GPU's kernel sum of `columns` numbers each; undefined where none is needed.
inline Tensor partial_sums(const Tensor& x, int64_t rows, int64_t columns) {
  const auto device = kernel_device(x);
  if (device < 0 || columns == 0) return Tensor();
  const int64_t blocks = std::max<int64_t>(1, std::min(rows, nfrs_cuda_blocks(device)));
  return at::empty({blocks, columns}, x.options().dtype(at::kFloat));
}
inline int64_t length(const Tensor& t) { return t.defined() ? t.numel() : 0; }

inline bool cuda_ready(int32_t device) {
  const int ready = nfrs_cuda_ready(device);
  TORCH_CHECK(ready >= 0, nfrs_rust_error());
  if (ready == 0)
    TORCH_WARN_ONCE("normformer_rs: composed formulas run on CUDA device ", device, ", not its kernels: ",
                    nfrs_rust_error());
  return ready == 1;
}

// Where a kernel exists; elsewhere, and under a torch.func transform (which refuses C++ autograd functions), the
// composed formula runs.
inline bool has_kernel(const Tensor& x) {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode)) return false;
  const auto device = kernel_device(x);
  if (device >= 0) return x.scalar_type() != at::kDouble && cuda_ready(device);
  return x.device().is_cpu() || x.device().is_meta();
}

// Gradients of `composed(inputs)` that can themselves be differentiated. Undefined inputs get undefined gradients. They
// are partial ones: of aliases, so that nothing flows on from one input to another that it was made of.
template <class Composed>
variable_list higher_order(const variable_list& originals, const variable_list& grads, Composed composed) {
  at::AutoGradMode enabled(true);
  variable_list inputs;
  for (const auto& t : originals) inputs.push_back(t.defined() ? t.view_as(t) : t);
  variable_list outputs = composed(inputs), used_outputs, used_grads, wanted;
  for (size_t i = 0; i < outputs.size(); ++i)
    if (grads[i].defined() && outputs[i].requires_grad()) {
      used_outputs.push_back(outputs[i]);
      used_grads.push_back(grads[i]);
    }
  for (const auto& t : inputs)
    if (t.defined() && t.requires_grad()) wanted.push_back(t);
  variable_list result(inputs.size());
  if (used_outputs.empty() || wanted.empty()) return result;
  auto found = torch::autograd::grad(used_outputs, wanted, used_grads, true, true, true);
  for (size_t i = 0, k = 0; i < inputs.size(); ++i)
    if (inputs[i].defined() && inputs[i].requires_grad()) result[i] = found[k++];
  return result;
}

// The same inside an operator, where autograd has been left behind: gradients of `composed(inputs)`, from `grad`.
template <class Composed>
variable_list gradients_of(const variable_list& inputs, const Tensor& grad, Composed composed) {
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  const c10::impl::ForceDispatchKeyGuard autograd(keys);
  const at::AutoGradMode enabled(true);
  variable_list leaves;
  for (const auto& t : inputs) leaves.push_back(t.detach().requires_grad_(true));
  return torch::autograd::grad({composed(leaves)}, leaves, {grad});
}

template <class Signature>
auto operator_handle(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("normformer_rs::" + name).c_str(), "").template typed<Signature>();
}

inline void forbid_autograd(torch::Library& m, const std::string& name) {
  m.impl(name.c_str(), c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace nfrs
