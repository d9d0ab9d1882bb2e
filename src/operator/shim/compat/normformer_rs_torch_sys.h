// This header is included before every C++ file of the build (.cargo/config.toml), because torch-sys 0.24 was generated
// for torch 2.11 and keeps only the text of an exception.
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
// ---- Python exceptions, raised by autograd hooks and tensor subclasses ----

// A Python exception that was converted to an error text, with that text.
struct Raised {
  std::exception_ptr exception;
  std::string text;
};
// This thread's last Python exception. It is not freed when the thread ends, because freeing needs the GIL, and Python
// may have ended by then.
inline thread_local Raised* raised = nullptr;

// Frees this thread's last Python exception, if there is one.
inline void forget_raised() { delete std::exchange(raised, nullptr); }

// Keeps the exception being handled if it is Python's; `text` is the error text that replaces it.
inline void notice(const char* text) {
  const auto* type = abi::__cxa_current_exception_type();
  const char* name = type ? type->name() : "";
  if (!std::strstr(name, "python_error") && !std::strstr(name, "error_already_set")) return;
  forget_raised();
  raised = new Raised{std::current_exception(), text};
}

// Throws the kept exception again if its text begins with `text`; forgets it in any case.
inline void rethrow_as(const char* text) {
  const std::unique_ptr<Raised> last(std::exchange(raised, nullptr));
  if (last && last->text.starts_with(text)) std::rethrow_exception(last->exception);
}
}  // namespace normformer_rs

#ifndef NORMFORMER_RS_SHIM  // the rest is for torch-sys only; torch.h takes half of the compile time
#include <torch/torch.h>

// torch-sys copies an exception's text with strdup, so this macro keeps the exception as well.
#define strdup(text) (normformer_rs::notice(text), strdup(text))

#ifdef __clang__
// In C++20 a line that begins with the word `module` belongs to C++'s modules. torch-sys has a type of that name.
#include <torch/script.h>
#define module torch_sys_module
#endif

// ---- functions of torch-sys that shim.cpp replaces ----

// tch gets and clears the last error after every call. If it frees a scalar after a failed call, it would take the
// failed call's error for an error of the freeing, and panic.
#define ats_free torch_sys_ats_free
#define get_and_reset_last_err torch_sys_get_and_reset_last_err
// torch-sys copies to a new tensor's address, which is invalid in FakeTensorMode and under torch.func.
#define at_tensor_of_data torch_sys_at_tensor_of_data

// ---- functions that newer versions of torch lack: nothing here calls them, and a call throws ----

namespace normformer_rs {
// Throws, in place of the function `name`, which this version of torch lacks.
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
// align_as is a member function of at::Tensor, so only a macro can replace it.
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
