// Activation checkpointing: a piece of the model that keeps only its inputs, and is run again for its gradient.
#pragma once
#include "node.h"

extern "C" {
// Appends a tensor to a list of the other side, which takes it over.
using Push = void (*)(void* list, Tensor* t);
// Runs the piece on its inputs and appends its outputs. 0, or 1 with a message.
int nfrs_piece_run(void* piece, bool again, const Tensor* const* inputs, size_t count, void* outputs, Push push);
void nfrs_piece_drop(void* piece);
}

namespace nfrs::recompute {

using torch::autograd::AutogradContext;

struct Piece : torch::CustomClassHolder {
  explicit Piece(void* rust) : rust(rust) {}
  ~Piece() override { nfrs_piece_drop(rust); }
  void* rust;

  variable_list run(bool again, at::TensorList inputs) const {
    std::vector<const Tensor*> in;
    for (const auto& t : inputs) in.push_back(&t);
    variable_list made;
    const auto push = [](void* list, Tensor* t) noexcept { static_cast<variable_list*>(list)->push_back(take_over(t)); };
    check_rust(nfrs_piece_run(rust, again, in.data(), in.size(), &made, push));
    return made;
  }
};

struct Recompute : torch::autograd::Function<Recompute> {
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, c10::intrusive_ptr<Piece> piece) {
    ctx->save_for_backward(inputs.vec());
    variable_list outputs = piece->run(false, inputs);
    ctx->saved_data["piece"] = c10::IValue::make_capsule(std::move(piece));
    ctx->set_materialize_grads(false);
    return outputs;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(), "activation checkpointing has no double backward: train without it");
    variable_list inputs;
    for (const auto& t : ctx->get_saved_variables())
      inputs.push_back(t.detach().requires_grad_(t.requires_grad()));
    const auto piece = c10::static_intrusive_pointer_cast<Piece>(ctx->saved_data["piece"].toCapsule());
    at::AutoGradMode enabled(true);
    const variable_list outputs = piece->run(true, inputs);
    variable_list used_outputs, used_grads;
    for (size_t i = 0; i < outputs.size(); ++i)
      if (grads[i].defined()) {
        used_outputs.push_back(outputs[i]);
        used_grads.push_back(grads[i]);
      }
    torch::autograd::backward(used_outputs, used_grads);  // adds to the parameters' gradients
    variable_list result;
    for (const auto& t : inputs) result.push_back(t.requires_grad() ? t.grad() : Tensor());
    result.push_back(Tensor());  // of the piece
    return result;
  }
};

}  // namespace nfrs::recompute
