// Checks whether a tensor's memory can be read, and copies it to the host (host.rs).
#pragma once
#include <ATen/ATen.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/functorch/BatchedTensorImpl.h>

namespace nfrs {

using at::Tensor;

// Returns the bytes by which the storage is too small for the tensor; at most 0 if it is large enough. FSDP frees a
// tensor's memory by resizing its storage.
inline int64_t missing_bytes(const Tensor& t) {
  if (!t.has_storage() || t.is_meta() || t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return 0;
  if (t.numel() == 0) return 0;
  int64_t last = t.storage_offset();  // the index of the tensor's last number in the storage
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return (last + 1) * static_cast<int64_t>(t.element_size()) - static_cast<int64_t>(t.storage().nbytes());
}

// Returns true if there is no memory at the tensor's address.
inline bool is_hollow(const Tensor& t) {
  if (!t.has_storage() || t.storage().device() != t.device()) return true;
  return t.storage().nbytes() > 0 && !t.storage().unsafeGetStorageImpl()->data_ptr().get();
}

// Returns why a tensor's numbers cannot be read, and the remedy; an empty string if they can.
inline std::string why_unreadable(const Tensor& t) {
  if (!t.defined()) return "is undefined: pass a tensor";
  if (t.layout() != at::kStrided || t.is_nested())
    return t.is_nested() ? "is a nested tensor: call to_padded_tensor() first"
                         : c10::str("has layout ", t.layout(), ": call to_dense() first");
  if (t.is_quantized()) return "is quantised: call dequantize() first";
  if (at::functorch::isBatchedTensor(t)) return "differs between the examples of vmap: pass one tensor for all of them";
  if (t.is_meta()) return "is on the meta device, where tensors have no numbers: pass one on the cpu";
  if (t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || is_hollow(t))
    return "has no memory of its own, as in FakeTensorMode or a wrapper subclass: pass a plain tensor";
  if (missing_bytes(t) > 0)
    return c10::str("has shape ", t.sizes(), " and only ", t.storage().nbytes(),
                    " bytes of storage: its memory was freed");
  return "";
}

// A guard under which calls are not recorded by autograd, wrapped by torch.func, or passed to Python.
struct Plainly {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::Functionalize,
                           c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// Returns a copy on the host, in `type`, of a tensor that torch.func differentiates. It copies number by number,
// because torch offers no public way to unwrap the tensor.
inline Tensor by_items(const Tensor& t, at::ScalarType type) {
  const Tensor flat = t.reshape({-1});
  std::vector<at::Scalar> items;
  for (int64_t i = 0; i < flat.numel(); ++i) items.push_back(flat.select(0, i).item());
  const Plainly plainly;
  Tensor host = at::empty(flat.sizes(), at::TensorOptions().dtype(type));
  for (size_t i = 0; i < items.size(); ++i) host.select(0, static_cast<int64_t>(i)).fill_(items[i]);
  return host;
}

// Returns a contiguous copy on the CPU in `type` (-1: the tensor's own). If the numbers cannot be read, returns an
// undefined tensor and sets `why`.
inline Tensor on_host(Tensor t, int type, std::string& why) {
  if (t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper))
    return by_items(t, type < 0 ? t.scalar_type() : static_cast<at::ScalarType>(type));
  const Plainly plainly;
  // Unwrap the tensor from functionalisation, after the writes that its wrapper has deferred.
  while (t.defined() && at::functionalization::impl::isFunctionalTensor(t)) {
    at::functionalization::impl::sync(t);
    t = at::functionalization::impl::from_functional_tensor(t);
  }
  if (t.defined() && t._is_zerotensor()) t = at::zeros(t.sizes(), t.options());
  why = why_unreadable(t);
  if (!why.empty()) return Tensor();
  t = t.resolve_conj().resolve_neg();
  return t.to(at::kCPU, type < 0 ? t.scalar_type() : static_cast<at::ScalarType>(type)).contiguous();
}

// Returns true if all of the tensor's data lies at its address and is its value. Every kernel call needs this answer,
// so the common case, a plain dense tensor, comes first and builds no message.
inline bool has_memory(const Tensor& t) {
  static const c10::DispatchKeySet special(
      {c10::DispatchKey::Negative, c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor,
       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize,
       c10::DispatchKey::Python, c10::DispatchKey::NestedTensor, c10::DispatchKey::Quantized});
  if (t.defined() && t.layout() == at::kStrided && !t.key_set().has_any(special) && !t.is_meta())
    return !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !is_hollow(t) && missing_bytes(t) <= 0;
  return why_unreadable(t).empty() && !t.is_neg() && !t.is_conj();
}

}  // namespace nfrs
