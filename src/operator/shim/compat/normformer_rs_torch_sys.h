// Included before every C++ file of the build (.cargo/config.toml), for torch-sys 0.24: it is generated for torch 2.11,
// and of an exception it keeps the text alone.
#pragma once
#if defined(__cplusplus) && __has_include(<torch/torch.h>)
#include <cxxabi.h>

#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace normformer_rs {
// ---- exceptions of Python's, which hooks of autograd and tensor subclasses raise ----

// This thread's last one that became text, and the text.
struct Raised {
  std::exception_ptr exception;
  std::string text;
};
// Not destroyed at the thread's end: an exception of Python's waits for the GIL as it goes, and by then there may be none.
inline thread_local Raised* raised = nullptr;

inline void forget_raised() { delete std::exchange(raised, nullptr); }

// In a handler whose exception becomes `text`.
inline void notice(const char* text) {
  const auto* type = abi::__cxa_current_exception_type();
  const char* name = type ? type->name() : "";
  if (!std::strstr(name, "python_error") && !std::strstr(name, "error_already_set")) return;
  forget_raised();
  raised = new Raised{std::current_exception(), text};
}

// Throws it again, as it was, where an error has its text, or the beginning; and forgets it.
inline void rethrow_as(const char* text) {
  const std::unique_ptr<Raised> last(std::exchange(raised, nullptr));
  if (last && last->text.starts_with(text)) std::rethrow_exception(last->exception);
}
}  // namespace normformer_rs

#ifndef NORMFORMER_RS_SHIM  // what follows is for torch-sys alone; torch.h takes half the time of compiling it
#include <torch/torch.h>

// How torch-sys keeps a text.
#define strdup(text) (normformer_rs::notice(text), strdup(text))

// ---- functions that shim.cpp has in torch-sys's place ----

// tch asks for an error after each call, also as it drops the scalar of a call that has failed, and panics there.
#define ats_free torch_sys_ats_free
#define get_and_reset_last_err torch_sys_get_and_reset_last_err
// It copies to wherever a new tensor lies, which is nowhere in FakeTensorMode and under torch.func.
#define at_tensor_of_data torch_sys_at_tensor_of_data

// ---- functions that newer versions of torch have dropped: nobody here calls them, and a call throws ----

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
#endif  // NORMFORMER_RS_SHIM
#endif
