// The autograd node of every operator that Rust declares with a derivative.
#pragma once
#include "call.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace nfrs {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Converts the gradient of the argument t to t's shape and type; returns an undefined tensor if the gradient was not
// computed.
inline Tensor like(const Tensor& gradient, const Tensor& t) {
  if (!t.defined()) return gradient;
  Tensor d = gradient.scalar_type() == t.scalar_type() ? gradient : gradient.to(t.scalar_type());
  if (d.sym_sizes() == t.sym_sizes()) return d;
  // An output that was not computed has no elements (`allocate`).
  return d.dim() == 1 && d.sym_size(0) == 0 ? Tensor() : d.view_symint(t.sym_sizes());
}

// The arguments and outputs that a node has kept; the others are None.
struct Kept {
  std::vector<IValue> arguments, outputs;
};

// Computes the gradients of the tensors in op.table with the backward operator, by its kernel or its formula.
// `gradients` are those of the outputs. Bit i of `wanted` is set if the gradient of entry i of the table is needed.
inline variable_list by_operator(const Op& op, const Kept& kept, const std::vector<IValue>& gradients,
                                 uint64_t wanted) {
  const Op& b = *op.backward;
  // The stack holds the backward operator's arguments, and after the call its outputs.
  Stack stack;
  stack.reserve(std::max(b.n_args, b.made.size()));
  for (const auto& s : b.sources) {
    const bool is_given = s.only_for < 0 || (wanted >> s.only_for & 1);
    if (s.kind == Origin::NOTHING || !is_given) stack.emplace_back();
    else if (s.kind == Origin::GRADIENT) stack.push_back(gradients[s.index]);
    else stack.push_back((s.kind == Origin::OUTPUT ? kept.outputs : kept.arguments)[s.index]);
  }
  b.handle->callBoxed(stack);
  variable_list result(op.table.size());
  for (size_t k = 0; k < b.results.size(); ++k) {
    // Output k is the gradient of entry results[k] of the table.
    if (!(wanted >> b.results[k] & 1)) continue;
    auto& d = result[b.results[k]];
    const Tensor& t = entry(op, kept.arguments, b.results[k]);
    d = like(stack[k].toTensor(), t);
    // The plan has left this output out, because the first output is equal to it.
    if (!d.defined() && (b.made[k].is & SHARED)) d = like(stack[0].toTensor(), t);
  }
  return result;
}

// Checks the kept tensors again, because a saved-tensor hook may have returned different ones. `gradient` is the
// gradient of an output; the tensors must lie on its device.
inline void check_kept(const Op& op, const Kept& kept, const Tensor& gradient) {
  Sizes sizes;
  const Tensor& x = leader(op, kept.arguments);
  const auto check_place = [&](const Tensor& t) {
    TORCH_CHECK_VALUE(t.device() == gradient.device() && t.layout() == gradient.layout(), op.name,
                      ": saved tensors must lie on ", gradient.device(), ", got one on ", t.device());
  };
  for (size_t i = 0; i < op.table.size(); ++i) {
    const Tensor& t = entry(op, kept.arguments, i);
    if (!t.defined()) continue;
    if (x.defined()) check_one(op.name, op.table[i], t, op.table[op.leader].name, x, sizes);
    if (!(op.table[i].is & HOST) || !t.is_cpu()) check_place(t);
  }
  for (const auto& v : kept.outputs)
    if (tensor(v).defined()) check_place(tensor(v));
}

// Computes gradients that can be differentiated again, with Rust's formula for the gradient. The arguments and results
// are those of `by_operator`.
inline variable_list by_rust(const Op& op, const Kept& kept, const std::vector<IValue>& gradients, uint64_t wanted) {
  // `differentiate` has checked that at least one gradient is defined.
  const auto first = std::find_if(gradients.begin(), gradients.end(), [](const IValue& v) { return !v.isNone(); });
  check_kept(op, kept, first->toTensor());
  const Values arguments = all_shown(kept.arguments), outputs = all_shown(kept.outputs), given = all_shown(gradients);
  const uint64_t none_wanted = 0;
  const int32_t no_device = -1;
  Call call{span(arguments), span(outputs), given.data(), none_wanted, no_device};
  // The bits of `wanted` count the entries of the table, those of `call.wanted` all arguments.
  for (size_t i = 0; i < op.table.size(); ++i) call.wanted |= (wanted >> i & 1) << op.table[i].place;
  at::SmallVector<Tensor*, 20> out(op.n_args, nullptr);
  check_rust(nfrs_run(op.rust, GRADIENT, &call, out.data()));
  variable_list result;
  for (const auto& a : op.table) result.push_back(take_over(out[a.place]));
  return result;
}

// Returns gradients for op.table's tensors, undefined ones if none is given for the outputs. `plain` are the arguments
// kept without a version check, `tensors` those that op.saved names, and `grads` belong to the outputs with gradients.
inline variable_list differentiate(const Op& op, const std::vector<IValue>& plain, const variable_list& tensors,
                                   const variable_list& grads, uint64_t wanted) {
  if (std::none_of(grads.begin(), grads.end(), [](const Tensor& t) { return t.defined(); }))
    return variable_list(op.table.size());
  Kept kept{plain, std::vector<IValue>(op.made.size())};
  for (size_t i = 0; i < tensors.size(); ++i)
    (op.saved[i].kind == Origin::OUTPUT ? kept.outputs : kept.arguments)[op.saved[i].index] = value(tensors[i]);
  std::vector<IValue> gradients(op.made.size());
  // `k` counts the outputs, `i` those with a gradient.
  for (size_t k = 0, i = 0; k < op.made.size(); ++k)
    if (op.has_gradient[k]) gradients[k] = value(grads[i++]);
  return (at::GradMode::is_enabled() ? by_rust : by_operator)(op, kept, gradients, wanted);
}

using NodePointer = decltype(torch::autograd::Edge::function);  // a shared_ptr, in later versions an intrusive_ptr

// The autograd node of one call of an operator.
struct Derivative : torch::autograd::Node {
  explicit Derivative(const Op& op) : op(op) {}
  const Op& op;
  std::vector<SavedVariable> saved;  // in the order of op.saved
  std::vector<IValue> plain;         // the other arguments

  std::string name() const override { return std::string(op.name) + "Backward"; }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& s : saved) s.reset_data();
  }
  // Returns a bit for each tensor of op.table whose gradient is needed.
  uint64_t wanted() const {
    uint64_t mask = 0;
    for (size_t i = 0; i < op.table.size(); ++i) mask |= uint64_t(task_should_compute_output(i)) << i;
    return mask;
  }
  // Returns the saved tensors, and checks that they have not been written to since. An output is given the node that
  // computed it.
  variable_list unpack() {
    variable_list all;
    all.reserve(saved.size());
    for (size_t i = 0; i < saved.size(); ++i)
      all.push_back(op.saved[i].kind == Origin::OUTPUT ? saved[i].unpack(getptr()) : saved[i].unpack());
    return all;
  }
  // Returns the gradients of op.table's tensors; autograd calls it in the backward pass.
  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return differentiate(op, plain, unpack(), grads, wanted());
  }

  // Describes the node to compiled autograd: numbers become constants of its graph, tensors its inputs.
  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    args.collect(std::string(op.name));
    args.collect(saved, true);
    for (const auto& v : plain) {
      if (v.isInt()) args.collect(v.toInt());
      else if (v.isDouble()) args.collect(v.toDouble());
      else args.collect(v);
    }
  }
  // Adds the node's gradients to the graph of compiled autograd.
  variable_list apply_with_saved(const variable_list& grads, torch::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;
    // Between `before` and `after`, the saved variables are proxies of the graph's inputs. No gradients are computed
    // here: the graph gets a call of `differentiate`, which it makes whenever it runs.
    swap.before(saved);
    std::vector<IValue> packed;
    std::vector<at::TypePtr> types;
    for (const auto& t : unpack()) packed.push_back(value(t)), types.push_back(c10::OptionalType::ofTensor());
    const auto& python = getPyCompilerInterface();
    const auto bound = python->bind_function(
        swap.get_py_compiler(), name(),
        [&op = op, plain = plain, wanted = wanted()](const variable_list& grads, const std::vector<IValue>& packed) {
          variable_list tensors;
          for (const auto& v : packed) tensors.push_back(tensor(v));
          return differentiate(op, plain, tensors, grads, wanted);
        },
        types, true, true);
    auto metadata = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        get_input_metadata(next_edges()));
    auto result = python->call_function(swap.get_py_compiler(), "apply_functional", bound, grads, packed, metadata);
    swap.after(saved);
    return result;
  }
};

// Creates a node of type T, held by an intrusive pointer in later versions of torch, and by a shared one before.
template <class T>
NodePointer make_node(const Op& op) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>) return c10::make_intrusive<T>(op);
  else return NodePointer(new T(op), [](auto* node) { deleteNode(node); });
}

// Computes the outputs with `below`, which replaces the arguments on the stack by them, and records a node for their
// gradients.
template <class Below>
void record(const Op& op, const Below& below, Stack* stack) {
  const auto args = torch::jit::last(*stack, op.n_args);
  const NodePointer pointer = make_node<Derivative>(op);
  auto& node = static_cast<Derivative&>(*pointer);
  torch::autograd::edge_list edges(op.table.size());
  for (size_t i = 0; i < edges.size(); ++i)
    if (const Tensor& t = entry(op, args, i); t.defined()) edges[i] = torch::autograd::impl::gradient_edge(t);
  node.set_next_edges(std::move(edges));
  // Arguments are saved before `below` computes the outputs, outputs after it.
  node.saved.resize(op.saved.size());
  for (size_t i = 0; i < op.saved.size(); ++i)
    if (op.saved[i].kind == Origin::ARGUMENT) node.saved[i] = SavedVariable(tensor(args[op.saved[i].index]), false);
  for (size_t i = 0; i < op.n_args; ++i) node.plain.push_back(op.plain[i] ? args[i] : IValue());
  below();
  const auto made = torch::jit::last(*stack, op.made.size());
  for (size_t k = 0; k < made.size(); ++k)
    if (op.has_gradient[k]) torch::autograd::set_history(made[k].toTensor(), pointer);
  for (size_t i = 0; i < op.saved.size(); ++i)
    if (op.saved[i].kind == Origin::OUTPUT) node.saved[i] = SavedVariable(made[op.saved[i].index].toTensor(), true);
}

// The kernel of the Autograd key. In three cases the formula runs instead of the operator. torch.func can transform all
// of the formula's operations. In forward mode only the formula has derivatives. And there may be no kernel.
inline void autograd(const Op& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto args = torch::jit::last(*stack, op.n_args);
  const bool has_tangent = std::any_of(op.table.begin(), op.table.end(), [&](const Argument& a) {
    return torch::autograd::isFwGradDefined(tensor(args[a.place]));
  });
  if (is_transformed() || has_tangent) return boxed<by_formula<TRANSFORM>>(op, keys, stack);
  if (!(op.is & RECORDED) && !has_kernel(op, leader(op, args))) return boxed<by_formula<DEVICE>>(op, keys, stack);
  const auto below = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.handle->redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  };
  const auto needs_gradient = [&](const Argument& a) { return tensor(args[a.place]).requires_grad(); };
  const bool is_needed = at::GradMode::is_enabled() && std::any_of(op.table.begin(), op.table.end(), needs_gradient);
  is_needed ? record(op, below, stack) : below();
}

}  // namespace nfrs
