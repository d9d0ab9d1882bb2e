// Operators as Rust declares them (operator/declare.rs): the structs that both sides share, what holds of every call,
// and how a call is shown to Rust.
#pragma once
#include "arguments.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <deque>
#include <string>
#include <vector>

extern "C" {
struct Text {
  const char* data;
  int64_t length;
};
// A tensor argument or an output; a number where `type` says so. `like` is an argument's name.
struct ArgumentRow {
  Text name, sizes, like;
  uint8_t type, is, reading;
};
struct OperatorRow {
  const void* rust;
  Text schema;
  const ArgumentRow* arguments;
  int64_t n_arguments;
  const ArgumentRow* outputs;
  int64_t n_outputs;
  uint32_t is;
  const OperatorRow* backward;  // or null
};
// A matrix: rows of `cols` numbers, `stride` apart. data is null where a tensor is absent.
struct View {
  void* data;
  int64_t rows, cols, stride;
  int32_t dtype;
};
// One argument, output or gradient: formulas read `tensor`, kernels `view`. `dtype` is the tensor's own.
struct Value {
  enum { NONE, TENSOR, INTEGER, FLOAT, BOOLEAN, TEXT, LIST };
  int32_t tag, dtype;
  union {
    int64_t integer;
    double number;
    const char* text;
    const at::Tensor* tensor;
    const c10::IValue* list;
  };
  int64_t length;
  View view;
};
struct Call {
  const Value *arguments;
  int64_t n_arguments;
  const Value *outputs;
  int64_t n_outputs;
  const Value* gradients;
  int32_t device;    // of the kernels: a CUDA device's number, or -1
  int32_t why;       // a formula runs: a `Why`
  uint64_t absent;   // Rust's answer: outputs that are not made
  uint64_t written;  // Rust's answer: arguments whose working copies have changed
  bool composed;     // Rust's answer: no kernel takes this call
};
int nfrs_run(const void* rust, int32_t stage, Call* call, at::Tensor** made);  // a stage of Rust's `Stage`
int nfrs_cuda_ready(int32_t device);  // 1: kernels run there; 0: they cannot; -1: they cannot, and are required
bool nfrs_cuda_stand_in();            // whether tensors of the CPU take the CUDA kernels' way: for the tests
const char* nfrs_rust_error();        // the message of this thread's last failed call into Rust
}

namespace nfrs {

using c10::IValue;
using torch::jit::Stack;
using Args = at::ArrayRef<IValue>;
using Tensors = at::SmallVector<Tensor, 8>;
using Values = at::SmallVector<Value, 20>;

enum Stage : int32_t { PLAN, KERNEL, FORMULA, GRADIENT };
enum Why : int32_t { DEVICE, TRANSFORM, BATCH };
// What an operator is (`OperatorRow::is`).
enum : uint32_t {
  ON_CPU = 1,        // has kernels there
  ON_GPU = 2,
  COMPOSED = 4,      // has a formula
  COMPOSITION = 8,   // is nothing else: PyTorch differentiates what it calls
  RECORDED = 16,     // its gradient is its own, where it has no kernel, too
  BATCHED = 32,      // its formula runs under vmap
  DIFFERENTIATES = 64,  // Rust forms the gradient that can be differentiated again; else the formula is run again
};
// How kernels get an argument.
enum class Reading : uint8_t {
  DENSE,      // contiguous
  COLUMNS,    // columns side by side, rows any distance apart
  COMPUTED,   // in the type that the leader is computed in
  PARAMETER,  // so too, but 16 bits as they are on a GPU, where all parameters have the same
  SEED,       // where the kernels are; absent where the argument `p` is 0
  STATE,      // a working copy, whose changes go back: float64 on the CPU
};

struct Source {  // where an argument of a backward operator comes from
  enum { NOTHING, GRADIENT, ARGUMENT, OUTPUT } kind;
  size_t index;
  int64_t only_for = -1;  // given where this argument's gradient is wanted
};

// An operator, its names resolved to positions.
struct Op {
  const void* rust;
  uint32_t is;
  c10::OperatorHandle handle;
  std::string name;
  size_t n_args = 0;
  std::deque<std::string> texts;             // what the arguments below point to
  std::vector<Argument> table, made;         // tensor arguments, outputs
  std::vector<Reading> readings;             // of the former
  std::vector<size_t> positions;             // and their places among the arguments
  std::vector<std::pair<Argument, size_t>> lists;  // arguments that are lists of tensors, and their places
  std::vector<int64_t> like;                 // of each output: an argument's place in `table`
  size_t leader = 0;                         // in `table`
  int64_t dtype = -1, told = -1, title = -1, p = -1;  // arguments: of type DTYPE, NUMBER, TITLE; dropout's rate
  char letter = 0;                           // that `told` tells
  // of an operator with a derivative:
  Op* backward = nullptr;
  std::vector<bool> has_gradient;            // of outputs
  std::vector<Source> saved;                 // what a node keeps
  std::vector<bool> plain;                   // of arguments: kept as they are, without a version
  // of a backward operator:
  std::vector<Source> sources;               // of its arguments
  std::vector<size_t> results;               // of its outputs: each is the gradient of this in the forward's `table`
};

inline const Tensor& tensor(const IValue& v) {
  static const Tensor absent;
  return v.isTensor() ? v.toTensor() : absent;
}
inline IValue value(const Tensor& t) { return t.defined() ? IValue(t) : IValue(); }
inline const Tensor& entry(const Op& op, Args args, size_t i) { return tensor(args[op.positions[i]]); }
inline const Tensor& leader(const Op& op, Args args) { return entry(op, args, op.leader); }

// ---- devices ----

inline bool is_transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}
// The CUDA device whose kernels a tensor takes, or -1.
inline int32_t kernel_device(const Tensor& t) {
  if (t.is_cuda()) return t.get_device();
  return t.is_cpu() && nfrs_cuda_stand_in() && t.scalar_type() != at::kDouble ? 0 : -1;
}
inline bool cuda_ready(int32_t device) {
  const int ready = nfrs_cuda_ready(device);
  TORCH_CHECK(ready >= 0, nfrs_rust_error());
  if (ready == 0)
    TORCH_WARN_ONCE("normformer_rs: composed formulas run on CUDA device ", device, ", not its kernels: ",
                    nfrs_rust_error());
  return ready == 1;
}
// Whether there is a kernel for this leader. A torch.func transform differentiates and batches formulas alone.
inline bool has_kernel(const Op& op, const Tensor& x) {
  if (is_transformed()) return false;
  const auto device = kernel_device(x);
  if (device >= 0) return (op.is & ON_GPU) && x.scalar_type() != at::kDouble && cuda_ready(device);
  return (op.is & ON_CPU) && (x.is_cpu() || x.is_meta());
}

// ---- what holds of every call ----

inline void check(const Op& op, Args args, arguments::Sizes& sizes) {
  std::string own;
  if (op.title >= 0) own = args[op.title].toStringRef();
  const Name name{op.title >= 0 ? own.c_str() : op.name.c_str()};
  at::SmallVector<const Tensor*, 12> tensors;
  for (const auto i : op.positions) {
    const Tensor& t = tensor(args[i]);
    tensors.push_back(t.defined() ? &t : nullptr);
  }
  if (op.told >= 0) sizes.tell(op.letter, args[op.told].toInt());
  arguments::check(name, op.table.data(), tensors.data(), tensors.size(), sizes);
  for (const auto& [row, at] : op.lists)
    for (const auto& t : args[at].toListRef())
      if (tensor(t).defined())
        arguments::check_one(name, row, tensor(t), op.table[op.leader], *tensors[op.leader], sizes);
  if (op.dtype >= 0 && !args[op.dtype].isNone()) {
    const auto type = args[op.dtype].toScalarType(), of = tensors[op.leader]->scalar_type();
    TORCH_CHECK_TYPE(arguments::is_of(Type::WIDTH, type, of), name, ": dtype must be ",
                     arguments::describe(Type::WIDTH, op.table[op.leader].name, of), "; got ", type);
  }
}

// What parameters are read in.
inline at::ScalarType parameter_type(const Op& op, Args args) {
  const Tensor& x = leader(op, args);
  const auto computed = arguments::computed(x.scalar_type());
  if (kernel_device(x) < 0) return computed;
  auto type = at::kFloat;
  bool has_any = false;
  for (size_t i = 0; i < op.table.size(); ++i) {
    const Tensor& t = entry(op, args, i);
    if (op.readings[i] != Reading::PARAMETER || !t.defined()) continue;
    if (has_any && t.scalar_type() != type) return computed;
    type = t.scalar_type(), has_any = true;
  }
  return type == at::kBFloat16 || type == at::kHalf ? type : computed;
}

// An output's type; `working`: as kernels write it.
inline at::ScalarType type_of(const Op& op, Args args, size_t k, bool working) {
  const Tensor& x = leader(op, args);
  const size_t i = op.like[k];
  const Tensor& like = entry(op, args, i).defined() ? entry(op, args, i) : x;
  switch (op.made[k].type) {
    case Type::COMPUTED: return arguments::computed(x.scalar_type());
    case Type::FLOAT32: return at::kFloat;
    case Type::DTYPE: return args[op.dtype].isNone() ? like.scalar_type() : args[op.dtype].toScalarType();
    default: break;
  }
  if (working && op.readings[i] == Reading::PARAMETER) return parameter_type(op, args);
  if (working && op.readings[i] == Reading::COMPUTED) return arguments::computed(x.scalar_type());
  return like.scalar_type();
}

inline bool is_absent(const Op& op, Args args, const Call& call, size_t k) {
  return (call.absent >> k & 1) || !entry(op, args, op.like[k]).defined();
}

// Absent outputs are empty. Sizes stay symbolic.
inline Tensor allocate(const Op& op, Args args, const arguments::Sizes& sizes, const Call& call, size_t k,
                       bool working) {
  const auto options = leader(op, args).options().dtype(type_of(op, args, k, working));
  if (is_absent(op, args, call, k)) return at::empty({0}, options);
  if (*op.made[k].sizes == '@') return at::empty_symint(entry(op, args, op.like[k]).sym_sizes(), options);
  return at::empty_symint(sizes.build(op.made[k].sizes), options);
}

// ---- a call, shown to Rust ----

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
// Rows are all dimensions but the last.
inline View view(const Tensor& t) {
  const int64_t cols = t.dim() == 0 ? 1 : t.size(-1);
  const int64_t rows = cols == 0 ? 0 : t.numel() / cols;
  const int64_t stride = t.dim() == 2 ? t.stride(0) : cols;
  return View{const_cast<void*>(t.const_data_ptr()), rows, cols, stride, dtype_code(t)};
}
constexpr View NO_VIEW{nullptr, 0, 0, 0, -1};

inline Value shown(const Tensor& t) {
  Value v{Value::NONE, -1, {}, 0, NO_VIEW};
  if (t.defined()) v.tag = Value::TENSOR, v.dtype = dtype_code(t), v.tensor = &t;
  return v;
}
inline Value shown(const IValue& given) {
  if (given.isTensor()) return shown(given.toTensor());
  Value v{Value::NONE, -1, {}, 0, NO_VIEW};
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
inline Values all_shown(Args args) {
  Values all;
  for (const auto& v : args) all.push_back(shown(v));
  return all;
}
inline Call call_of(const Values& values, int32_t device, Why why = DEVICE) {
  return Call{values.data(), static_cast<int64_t>(values.size()), nullptr, 0, nullptr, device, why, 0, 0, false};
}

inline void check_rust(int status) {
  TORCH_CHECK_VALUE(status != 2, nfrs_rust_error());
  TORCH_CHECK_NOT_IMPLEMENTED(status != 3, nfrs_rust_error());
  TORCH_CHECK(status == 0, nfrs_rust_error());
}
inline void plan(const Op& op, Call& call) { check_rust(nfrs_run(op.rust, PLAN, &call, nullptr)); }

// Takes over tensors that Rust made; undefined where it made none.
inline Tensor take_over(Tensor* made) {
  if (!made) return Tensor();
  const std::unique_ptr<Tensor> own(made);
  return *own;
}

// ---- the kernels of dispatch keys ----

inline void give_back(const Op& op, Stack* stack, Tensors&& made) {
  torch::jit::drop(*stack, op.n_args);
  for (auto& t : made) stack->emplace_back(std::move(t));
}

inline void meta(const Op& op, c10::DispatchKeySet, Stack* stack) {
  const auto args = torch::jit::last(*stack, op.n_args);
  arguments::Sizes sizes;
  check(op, args, sizes);
  const Values values = all_shown(args);
  Call call = call_of(values, -1);
  plan(op, call);
  Tensors made;
  for (size_t k = 0; k < op.made.size(); ++k) made.push_back(allocate(op, args, sizes, call, k, false));
  give_back(op, stack, std::move(made));
}

// A tensor of a call as kernels read it, where that is not how it came; else undefined.
inline Tensor reading(const Op& op, Args args, size_t i, int32_t device) {
  const Tensor &t = entry(op, args, i), &x = leader(op, args);
  auto type = t.scalar_type();
  switch (op.readings[i]) {
    case Reading::COLUMNS: return t.stride(1) == 1 || t.size(1) <= 1 ? Tensor() : t.contiguous();
    case Reading::SEED:
      if (device < 0) return t.is_cpu() && t.is_contiguous() ? Tensor() : t.cpu().contiguous();
      return t.device() == x.device() && t.is_contiguous() ? Tensor() : t.to(x.device()).contiguous();
    case Reading::STATE:
      if (at::isFloatingType(type)) type = device < 0 || type == at::kDouble ? at::kDouble : at::kFloat;
      return t.to(type, false, device < 0).contiguous();
    case Reading::COMPUTED: type = arguments::computed(x.scalar_type()); break;
    case Reading::PARAMETER: type = parameter_type(op, args); break;
    case Reading::DENSE: break;
  }
  return t.scalar_type() == type && t.is_contiguous() ? Tensor() : t.to(type).contiguous();
}

inline void written(const Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

Tensors composed(const Op& op, Args args, Why why);

inline Tensors compute(const Op& op, Args args) {
  const Tensor& x = leader(op, args);
  if ((op.is & COMPOSED) && !has_kernel(op, x)) return composed(op, args, DEVICE);
  arguments::Sizes sizes;
  check(op, args, sizes);
  const int32_t device = kernel_device(x);
  Values values = all_shown(args), outputs;
  Call call = call_of(values, device);
  plan(op, call);
  if (call.composed) return composed(op, args, DEVICE);
  const bool is_dropped = op.p < 0 || args[op.p].toDouble() != 0;
  Tensors read(op.table.size()), made(op.made.size());
  for (size_t i = 0; i < op.table.size(); ++i) {
    const Tensor& t = entry(op, args, i);
    if (!t.defined() || (op.readings[i] == Reading::SEED && !is_dropped)) continue;
    read[i] = reading(op, args, i, device);
    if (op.table[i].is & WRITTEN) t.mutable_data_ptr();  // its own memory from now on, where it was a lazy copy
    values[op.positions[i]].view = view(read[i].defined() ? read[i] : t);
  }
  for (size_t k = 0; k < op.made.size(); ++k) {
    made[k] = allocate(op, args, sizes, call, k, true);
    const bool is_made = !is_absent(op, args, call, k);
    outputs.push_back(shown(is_made ? made[k] : Tensor()));
    if (is_made) outputs[k].view = view(made[k]);
  }
  call.outputs = outputs.data(), call.n_outputs = outputs.size();
  check_rust(nfrs_run(op.rust, KERNEL, &call, nullptr));
  for (size_t i = 0; i < op.table.size(); ++i) {
    const bool moved = read[i].defined() && (call.written >> op.positions[i] & 1);
    if (moved) entry(op, args, i).copy_(read[i]);
    if (moved || (op.table[i].is & WRITTEN)) written(entry(op, args, i));
  }
  for (size_t k = 0; k < op.made.size(); ++k) {
    const auto type = type_of(op, args, k, false);
    if (made[k].scalar_type() != type) made[k] = made[k].to(type);
  }
  return made;
}
inline void kernel(const Op& op, c10::DispatchKeySet, Stack* stack) {
  give_back(op, stack, compute(op, torch::jit::last(*stack, op.n_args)));
}

inline Tensors composed(const Op& op, Args args, Why why) {
  arguments::Sizes sizes;
  check(op, args, sizes);
  const Values values = all_shown(args);
  const Tensor& x = leader(op, args);
  Call call = call_of(values, has_kernel(op, x) ? kernel_device(x) : -1, why);
  plan(op, call);
  at::SmallVector<Tensor*, 8> out(op.made.size(), nullptr);
  check_rust(nfrs_run(op.rust, FORMULA, &call, out.data()));
  Tensors made;
  for (auto* t : out) made.push_back(take_over(t));
  for (size_t k = 0; k < made.size(); ++k)
    if (!made[k].defined()) made[k] = allocate(op, args, sizes, call, k, false).zero_();
  return made;
}
template <Why WHY>
void fallback(const Op& op, c10::DispatchKeySet, Stack* stack) {
  give_back(op, stack, composed(op, torch::jit::last(*stack, op.n_args), WHY));
}

}  // namespace nfrs
