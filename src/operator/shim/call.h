// A call of an operator: its checks, its arguments in the form for Rust, and the kernels for each dispatch key.
#pragma once
#include "arguments.h"

namespace nfrs {

using Tensors = at::SmallVector<Tensor, 8>;
using Values = at::SmallVector<Value, 20>;

// ---- devices ----

// Returns true inside a torch.func transform, such as grad or vmap.
inline bool is_transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}
// Returns the CUDA device whose kernels run on this tensor, or -1 for the CPU's.
inline int32_t kernel_device(const Tensor& t) {
  if (t.is_cuda()) return t.get_device();
  // In tests, CPU tensors can stand in for those of device 0, except float64, for which there are no CUDA kernels.
  return t.is_cpu() && nfrs_cuda_stand_in() && t.scalar_type() != at::kDouble ? 0 : -1;
}
// Returns true if kernels run on this CUDA device. If they cannot, warns once; if the user requires them, errors.
inline bool cuda_ready(int32_t device) {
  const int ready = nfrs_cuda_ready(device);
  TORCH_CHECK(ready >= 0, nfrs_rust_error());
  if (ready == 0)
    TORCH_WARN_ONCE("normformer_rs: composed formulas run on CUDA device ", device, ", not its kernels: ",
                    nfrs_rust_error());
  return ready == 1;
}
// Returns true if the operator has a kernel for this leader. torch.func transforms always use formulas.
inline bool has_kernel(const Op& op, const Tensor& x) {
  if (is_transformed()) return false;
  const auto device = kernel_device(x);
  if (device >= 0) return (op.is & ON_GPU) && x.scalar_type() != at::kDouble && cuda_ready(device);
  return (op.is & ON_CPU) && (x.is_cpu() || x.is_meta());
}

// ---- types and shapes ----

// Returns the type in which kernels read the norm's parameters. This is the type in which the leader is computed. But
// on a GPU it is the parameters' own 16-bit type, if all have the same one.
inline at::ScalarType parameter_type(const Op& op, Args args) {
  const Tensor& x = leader(op, args);
  const auto computed = computing(x.scalar_type());
  if (kernel_device(x) < 0) return computed;
  auto type = at::kFloat;
  bool has_any = false;
  for (size_t i = 0; i < op.table.size(); ++i) {
    const Tensor& t = entry(op, args, i);
    if (op.table[i].reading != Reading::PARAMETER || !t.defined()) continue;
    if (has_any && t.scalar_type() != type) return computed;
    type = t.scalar_type(), has_any = true;
  }
  return type == at::kBFloat16 || type == at::kHalf ? type : computed;
}

// Returns the type of output k; if `working` is true, the type in which kernels write it.
inline at::ScalarType type_of(const Op& op, Args args, size_t k, bool working) {
  const Tensor& x = leader(op, args);
  const size_t i = op.made[k].place;
  const Tensor& like = entry(op, args, i).defined() ? entry(op, args, i) : x;  // the argument that the output is like
  switch (op.made[k].type) {
    case Type::COMPUTED: return computing(x.scalar_type());
    case Type::FLOAT32: return at::kFloat;
    case Type::FLOAT64: return at::kDouble;
    case Type::DTYPE: return args[op.dtype].isNone() ? like.scalar_type() : args[op.dtype].toScalarType();
    default: break;
  }
  if (working && op.table[i].reading == Reading::PARAMETER) return parameter_type(op, args);
  if (working && op.table[i].reading == Reading::COMPUTED) return computing(x.scalar_type());
  return like.scalar_type();
}

// Returns true if output k is not computed: the plan has left it out, or the argument that it is like is absent.
inline bool is_absent(const Op& op, Args args, const Call& call, size_t k) {
  return (call.absent >> k & 1) || !entry(op, args, op.made[k].place).defined();
}

// Allocates output k; if `working` is true, in the type in which kernels write it. An output that is not computed gets
// no elements. Sizes may be symbolic.
inline Tensor allocate(const Op& op, Args args, const Sizes& sizes, const Call& call, size_t k, bool working) {
  const auto options = leader(op, args).options().dtype(type_of(op, args, k, working));
  if (is_absent(op, args, call, k)) return at::empty({0}, options);
  if (*op.made[k].sizes == '@') return at::empty_symint(entry(op, args, op.made[k].place).sym_sizes(), options);
  return at::empty_symint(sizes.build(op.made[k].sizes), options);
}

// ---- arguments in the form for Rust ----

// Returns the number by which Rust identifies a tensor's type; -1 for types that no kernel reads.
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
// Returns a tensor as a matrix, whose rows run over all dimensions except the last.
inline View view(const Tensor& t) {
  const int64_t cols = t.dim() == 0 ? 1 : t.size(-1);
  const int64_t rows = cols == 0 ? 0 : t.numel() / cols;
  const int64_t stride = t.dim() == 2 ? t.stride(0) : cols;  // only a matrix's rows may lie apart (Reading::COLUMNS)
  return View{const_cast<void*>(t.const_data_ptr()), rows, cols, stride, dtype_code(t)};
}

// Returns a tensor or another argument as a `Value`, which points to it and does not own it. `by_kernel` adds the view.
inline Value shown(const Tensor& t) {
  Value v;
  if (t.defined()) v.tag = Value::TENSOR, v.dtype = dtype_code(t), v.tensor = &t;
  return v;
}
inline Value shown(const IValue& given) {
  if (given.isTensor()) return shown(given.toTensor());
  Value v;
  if (given.isInt()) v.tag = Value::INTEGER, v.integer = given.toInt();
  else if (given.isDouble()) v.tag = Value::FLOAT, v.number = given.toDouble();
  else if (given.isBool()) v.tag = Value::BOOLEAN, v.integer = given.toBool();
  else if (given.isString())
    v.tag = Value::TEXT, v.text = given.toStringRef().data(), v.length = given.toStringRef().size();
  else if (given.isList()) v.tag = Value::LIST, v.list = &given, v.length = given.toListRef().size();
  else if (given.isSymInt()) v.tag = Value::INTEGER, v.integer = given.toSymInt().guard_int(__FILE__, __LINE__);
  else TORCH_CHECK(given.isNone(), "an operator's argument is a ", given.tagKind());
  return v;
}
// Returns each element of a list as a `Value`.
template <class All>
Values all_shown(const All& given) {
  Values all;
  for (const auto& v : given) all.push_back(shown(v));
  return all;
}
inline Span<Value> span(const Values& values) { return {values.data(), values.size()}; }

// A call that has passed the table's checks and the operator's plan in Rust.
struct Planned {
  Sizes sizes;
  Values values;
  Call call{};

  Planned(const Op& op, Args args, int32_t device, Why why = DEVICE) : values(all_shown(args)) {
    check(op, args, sizes);
    call.arguments = span(values);
    call.device = device;
    call.why = why;
    check_rust(nfrs_run(op.rust, PLAN, &call, nullptr));
  }
};

// ---- the kernels of dispatch keys ----

// Returns outputs without memory, for the Meta key.
inline Tensors meta(const Op& op, Args args) {
  const int32_t no_device = -1;
  const bool working = false;
  const Planned p(op, args, no_device);
  Tensors made;
  for (size_t k = 0; k < op.made.size(); ++k) made.push_back(allocate(op, args, p.sizes, p.call, k, working));
  return made;
}

// Errors if an argument is a tensor subclass without memory, such as a FakeTensor, and Python's dispatch key is
// excluded. The formula's operations would then run torch's own kernels, which would read invalid memory.
inline void check_wrapped(const Op& op, Args args) {
  if (!c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::Python)) return;
  for (size_t i = 0; i < op.table.size(); ++i) {
    const Tensor& t = entry(op, args, i);
    const bool is_wrapped = t.defined() && t.key_set().has(c10::DispatchKey::Python) && !t.is_meta();
    TORCH_CHECK(!is_wrapped || !is_hollow(t), op.name, ": a tensor ", why_unreadable(t));
  }
}

// Runs the formula, and returns its outputs. Rust gets WHY, the reason why no kernel runs.
template <Why WHY>
Tensors by_formula(const Op& op, Args args) {
  check_wrapped(op, args);
  const Tensor& x = leader(op, args);
  Planned p(op, args, has_kernel(op, x) ? kernel_device(x) : -1, WHY);
  at::SmallVector<Tensor*, 8> out(op.made.size(), nullptr);
  check_rust(nfrs_run(op.rust, FORMULA, &p.call, out.data()));
  Tensors made;
  for (auto* t : out) made.push_back(take_over(t));
  // Outputs that the formula does not compute are zeros.
  const bool working = false;
  for (size_t k = 0; k < made.size(); ++k)
    if (!made[k].defined()) made[k] = allocate(op, args, p.sizes, p.call, k, working).zero_();
  return made;
}

// Returns argument i in the form that kernels read (converted, moved or made contiguous), or an undefined tensor if it
// already has this form.
inline Tensor reading(const Op& op, Args args, size_t i, int32_t device) {
  const Tensor &t = entry(op, args, i), &x = leader(op, args);
  auto type = t.scalar_type();
  switch (op.table[i].reading) {
    // A matrix whose rows are contiguous stays as it is; so does one of at most one column.
    case Reading::COLUMNS: return t.stride(1) == 1 || t.size(1) <= 1 ? Tensor() : t.contiguous();
    case Reading::SEED:
      if (device < 0) return t.is_cpu() && t.is_contiguous() ? Tensor() : t.cpu().contiguous();
      return t.device() == x.device() && t.is_contiguous() ? Tensor() : t.to(x.device()).contiguous();
    // A working copy. On the CPU it is always a new tensor; `by_kernel` copies it back if it has changed.
    case Reading::STATE:
      if (at::isFloatingType(type)) type = device < 0 || type == at::kDouble ? at::kDouble : at::kFloat;
      return t.to(type, /*non_blocking=*/false, /*copy=*/device < 0).contiguous();
    case Reading::COMPUTED: type = computing(x.scalar_type()); break;
    case Reading::PARAMETER: type = parameter_type(op, args); break;
    case Reading::DENSE: break;
  }
  return t.scalar_type() == type && t.is_contiguous() ? Tensor() : t.to(type).contiguous();
}

// Runs the kernel, or the formula if there is no kernel for this call.
inline Tensors by_kernel(const Op& op, Args args) {
  const Tensor& x = leader(op, args);
  // Errors if an argument has no memory. But a meta tensor beside a leader with memory is left to `check`, whose error
  // names both devices.
  for (size_t i = 0; i < op.table.size(); ++i)
    if (const Tensor& t = entry(op, args, i); t.defined() && t.layout() == at::kStrided)
      TORCH_CHECK_VALUE(t.is_meta() ? i != op.leader : !is_hollow(t), op.name, ": ", op.table[i].name, " ",
                        why_unreadable(t));
  if ((op.is & COMPOSED) && !has_kernel(op, x)) return by_formula<DEVICE>(op, args);
  const int32_t device = kernel_device(x);
  Planned p(op, args, device);
  if (p.call.composed) return by_formula<DEVICE>(op, args);
  // Without a rate `p`, the operator always reads its seed.
  const bool is_dropped = op.p < 0 || args[op.p].toDouble() != 0;
  // `read` keeps converted arguments alive while the kernel runs.
  Tensors read(op.table.size()), made(op.made.size());
  for (size_t i = 0; i < op.table.size(); ++i) {
    const Tensor& t = entry(op, args, i);
    if (!t.defined() || (op.table[i].reading == Reading::SEED && !is_dropped)) continue;
    read[i] = reading(op, args, i, device);
    if (op.table[i].is & WRITTEN) t.mutable_data_ptr();  // gives a lazy copy its own memory
    p.values[op.table[i].place].view = view(read[i].defined() ? read[i] : t);
  }
  Values outputs;
  for (size_t k = 0; k < op.made.size(); ++k) {
    made[k] = allocate(op, args, p.sizes, p.call, k, /*working=*/true);
    const bool is_made = !is_absent(op, args, p.call, k);
    outputs.push_back(shown(is_made ? made[k] : Tensor()));
    if (is_made) outputs[k].view = view(made[k]);
  }
  p.call.outputs = span(outputs);
  const int ran = nfrs_run(op.rust, KERNEL, &p.call, nullptr);
  if (ran == REFUSED_NOW) TORCH_WARN("normformer_rs: the formula runs from now on. Please report: ", nfrs_rust_error());
  if (ran == REFUSED || ran == REFUSED_NOW) return by_formula<DEVICE>(op, args);
  check_rust(ran);
  // Copy changed working copies back, and tell autograd which arguments have changed.
  for (size_t i = 0; i < op.table.size(); ++i) {
    const Tensor& t = entry(op, args, i);
    const bool moved = read[i].defined() && (p.call.written >> op.table[i].place & 1);
    if (moved) t.copy_(read[i]);
    if ((moved || (op.table[i].is & WRITTEN)) && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  }
  // Kernels wrote some outputs in their working type.
  for (size_t k = 0; k < op.made.size(); ++k) {
    const auto type = type_of(op, args, k, /*working=*/false);
    if (made[k].scalar_type() != type) made[k] = made[k].to(type);
  }
  return made;
}

// The kernel of the Negative and Conjugate keys for an operator that writes to arguments. It runs the operator on plain
// copies of lazily negated or conjugated tensors, and copies the results back. torch's own fallback assumes that every
// written argument is returned. If one is not, that fallback writes to memory of another tensor.
inline void by_plain(const Op& op, c10::DispatchKeySet keys, Stack* stack) {
  std::vector<std::pair<Tensor, Tensor>> written;  // a written argument, and its plain copy
  const auto& formal = op.handle->schema().arguments();
  for (size_t i = 0; i < op.n_args; ++i) {
    IValue& v = torch::jit::peek(*stack, i, op.n_args);
    const Tensor t = tensor(v);
    if (!t.defined() || (!t.is_neg() && !t.is_conj())) continue;
    const Tensor plain = t.resolve_conj().resolve_neg();
    if (formal[i].alias_info() && formal[i].alias_info()->isWrite()) written.emplace_back(t, plain);
    v = plain;
  }
  op.handle->redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Conjugate),
                             stack);
  for (const auto& [t, plain] : written) t.copy_(plain);
}

// The kernel of the FuncTorchBatched key for an operator that vmap must call once per example.
inline void by_examples(const Op& op, c10::DispatchKeySet, Stack* stack) {
  using at::functorch::maybeGetBatchedImpl;
  const auto args = torch::jit::last(*stack, op.n_args).vec();
  // Returns vmap's wrapper of an argument; null if no vmap batches it.
  const auto batched = [&](const IValue& v) { return tensor(v).defined() ? maybeGetBatchedImpl(tensor(v)) : nullptr; };
  // The level of the innermost vmap, and its number of examples.
  int64_t level = -1, count = 0;
  for (const auto& v : args)
    if (const auto* b = batched(v); b && b->level() > level) level = b->level(), count = b->value().size(b->bdim());
  TORCH_CHECK_VALUE(count > 0, op.name, ": vmap over no examples");
  // Each example is taken from the tensors that this vmap batches. All other tensors go to every call unchanged.
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
  std::vector<std::vector<Tensor>> made(op.made.size());
  for (int64_t i = 0; i < count; ++i) {
    Stack example;
    for (const auto& v : args) {
      const auto* b = batched(v);
      example.push_back(b && b->level() == level ? IValue(b->value().select(b->bdim(), i)) : v);
    }
    op.handle->callBoxed(example);  // replaces the arguments by the outputs
    for (size_t k = 0; k < made.size(); ++k) made[k].push_back(example[k].toTensor());
  }
  torch::jit::drop(*stack, op.n_args);
  // Each output is batched along dimension 0, where its examples are stacked.
  for (const auto& examples : made) stack->emplace_back(at::functorch::makeBatched(at::stack(examples), 0, level));
}

// Makes one of the functions above a boxed kernel: its results replace the arguments on the stack.
template <Tensors (*RUN)(const Op&, Args)>
void boxed(const Op& op, c10::DispatchKeySet, Stack* stack) {
  Tensors made = RUN(op, torch::jit::last(*stack, op.n_args));
  torch::jit::drop(*stack, op.n_args);
  for (auto& t : made) stack->emplace_back(std::move(t));
}

}  // namespace nfrs
