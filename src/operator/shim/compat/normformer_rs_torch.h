// Included before every C++ file of the build (.cargo/config.toml): stand-ins for what torch-sys calls and newer
// versions of torch have dropped. torch-sys 0.24 is generated for torch 2.11. Nobody here calls these functions, and a
// call throws.
#pragma once
#if defined(__cplusplus) && __has_include(<torch/torch.h>)
#include <torch/torch.h>

#include <stdexcept>

namespace normformer_rs {
[[noreturn]] inline void dropped(const char* name) {
  throw std::runtime_error(std::string("this version of torch has no ") + name);
}
}  // namespace normformer_rs

#if !__has_include(<ATen/ops/align_tensors_ops.h>)  // torch 2.13
namespace torch {
template <class... A>
std::vector<at::Tensor> align_tensors(A&&...) {
  normformer_rs::dropped("torch::align_tensors");
}
}  // namespace torch
// A member function of at::Tensor, which only a macro can stand in for.
#define align_as(other) to((normformer_rs::dropped("Tensor::align_as"), at::kFloat))
#endif

#if !__has_include(<ATen/ops/cholesky_ops.h>)  // torch 2.15
namespace torch {
template <class... A>
at::Tensor cholesky(A&&...) {
  normformer_rs::dropped("torch::cholesky");
}
template <class... A>
at::Tensor cholesky_out(A&&...) {
  normformer_rs::dropped("torch::cholesky_out");
}
}  // namespace torch
#endif

#if !__has_include(<ATen/ops/qr_ops.h>)  // torch 2.15
namespace torch {
template <class... A>
std::tuple<at::Tensor, at::Tensor> qr(A&&...) {
  normformer_rs::dropped("torch::qr");
}
template <class... A>
std::tuple<at::Tensor, at::Tensor> qr_out(A&&...) {
  normformer_rs::dropped("torch::qr_out");
}
}  // namespace torch
#endif
#endif
