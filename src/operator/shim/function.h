// A Rust function as an autograd node.
#pragma once
#include "node.h"

extern "C" {
// Appends a tensor to the list, which takes ownership of the tensor.
using Push = void (*)(void* list, at::Tensor* t);
// Appends to `made` the function's outputs or, if `is_backward` is true, the gradients of its inputs. Returns a status
// for `check_rust`.
int nfrs_function_run(void* function, bool is_backward, nfrs::Span<nfrs::Value> inputs,
                      nfrs::Span<nfrs::Value> gradients, void* made, Push push);
void nfrs_function_drop(void* function);
}

namespace nfrs {

using torch::autograd::AutogradContext;

// Owns a Rust function, which the autograd node keeps.
struct Held : torch::CustomClassHolder {
  Held(void* rust, bool saves) : rust(rust), saves(saves) {}
  ~Held() override { nfrs_function_drop(rust); }
  void* const rust;
  const bool saves;  // true if the backward pass needs the inputs

  // Runs the function or, if `is_backward` is true, its backward pass.
  variable_list run(bool is_backward, at::TensorList inputs, at::TensorList gradients) const {
    const Values in = all_shown(inputs), given = all_shown(gradients);
    const auto push = [](void* to, Tensor* t) noexcept { static_cast<variable_list*>(to)->push_back(take_over(t)); };
    variable_list made;
    check_rust(nfrs_function_run(rust, is_backward, span(in), span(given), &made, push));
    return made;
  }
};

// The autograd node, which runs the Rust function that it holds.
struct Function : torch::autograd::Function<Function> {
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, c10::intrusive_ptr<Held> held) {
    if (held->saves) ctx->save_for_backward(inputs.vec());
    ctx->set_materialize_grads(false);  // a missing gradient stays undefined and does not become zeros
    variable_list outputs = held->run(/*is_backward=*/false, inputs, {});
    ctx->saved_data["held"] = IValue::make_capsule(std::move(held));
    return outputs;
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const auto held = c10::static_intrusive_pointer_cast<Held>(ctx->saved_data["held"].toCapsule());
    variable_list result = held->run(/*is_backward=*/true, ctx->get_saved_variables(), gradients);
    result.push_back(Tensor());  // the argument `held` has no gradient
    return result;
  }
};

}  // namespace nfrs
