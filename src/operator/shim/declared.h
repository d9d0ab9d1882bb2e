// The structs that Rust and C++ share: an operator's declaration (operator/register.rs) and its call
// (operator/call.rs).
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace nfrs {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Args = at::ArrayRef<IValue>;

// ---- a declaration ----

// An array in Rust's memory. A declaration's arrays are never freed; a call's arrays live as long as the call.
template <class T>
struct Span {
  const T* data;
  size_t length;
  const T* begin() const { return data; }
  const T* end() const { return data + length; }
  size_t size() const { return length; }
  const T& operator[](size_t i) const { return data[i]; }
};

enum class Type : uint8_t {
  FLOATING,  // float32, float64, bfloat16 or float16
  SAME,      // the leader's type; for an output, the type of the argument that it is like
  WIDTH,     // a floating type, which is float64 if and only if the leader is
  COMPUTED,  // the type in which the leader is computed: float64 for float64, else float32
  FLOAT32,
  FLOAT64,
  INT64,
  BOOL,
  DTYPE,  // for an output: the argument `dtype`, or if that is absent, like SAME
  MOMENT,  // float32 or bfloat16
};

// Flags of an argument. Without a flag it is required, on the leader's device, and only read.
enum : uint8_t {
  OPTIONAL = 1,  // may be absent
  HOST = 2,      // may be on the CPU even if the leader is not
  WRITTEN = 4,   // written in place: must be contiguous and share no memory
  SHARED = 8,    // for an output: if it is left out, the first output serves as this output, too
};

// The form in which kernels read an argument.
enum class Reading : uint8_t {
  DENSE,      // contiguous
  COLUMNS,    // a matrix with contiguous rows, any distance apart
  COMPUTED,   // converted to the type in which the leader is computed
  PARAMETER,  // like COMPUTED; on a GPU, 16-bit parameters stay if all have one type
  SEED,       // on the kernel's device; not read if the argument `p` is 0
  STATE,      // a working copy, copied back if changed; float64 on the CPU
};

// A tensor argument, or an output.
struct Argument {
  const char* name;
  // The wanted shape, with a letter or a digit per dimension. A letter stands for one number in the whole call. "*"
  // stands for any number of leading dimensions, which are the same in the whole call. "=d" means d numbers in any
  // shape. "1|d" means a scalar, or a vector of 1 or d numbers; "1|d#" also allows a matrix with a side of d. For an
  // output, "@" means the shape of the argument that it is like.
  const char* sizes;
  size_t place;  // an argument's index in the call; for an output, the index in Op::table of the argument it is like
  Type type;
  uint8_t is;
  Reading reading;
};

// The source of a backward operator's argument: the gradient of a forward output, a forward argument or output, or
// none.
struct Origin {
  enum : int32_t { NOTHING, GRADIENT, ARGUMENT, OUTPUT } kind;
  uint32_t index;  // the index of the output, or of the forward operator's argument
  int64_t only_for;  // passed only if the gradient of this entry of Op::table is wanted; -1: always
};

// Flags of an operator.
enum : uint32_t {
  ON_CPU = 1,  // has kernels for the CPU
  ON_GPU = 2,
  COMPOSED = 4,      // has a formula
  COMPOSITION = 8,   // has only a formula, whose operations PyTorch differentiates
  RECORDED = 16,     // uses its own gradient even without a kernel
  BATCHED = 32,      // runs its formula under vmap
  LOOPED = 64,       // is called by vmap once per example
};

// An operator's declaration.
struct Op {
  const void* rust;                     // Rust's declaration, which nfrs_run gets back
  const char *name, *schema;
  size_t n_args, leader;                // the leader's index in `table`: types and devices are compared with it
  int64_t dtype, title, p;              // indices of the arguments dtype, name in messages, dropout rate; or -1
  uint32_t is;
  Span<Argument> table, made, lists;    // tensor arguments, outputs, arguments that are lists of tensors
  Span<Argument> numbers;               // at most two integer arguments whose values letters stand for
  Span<uint8_t> has_gradient, plain;    // per output; per argument: a node keeps it without a version check
  Span<Origin> saved;                   // the other tensors that a node keeps
  Op* backward;                         // or null
  Span<Origin> sources;                 // for a backward operator: the sources of its arguments,
  Span<size_t> results;                 // and for each output, the index in the forward's `table`
  const c10::OperatorHandle* handle;    // set by C++
};

// ---- a call ----

// A matrix: rows of `cols` numbers, `stride` apart. `data` is null if the tensor is absent.
struct View {
  void* data = nullptr;
  int64_t rows = 0, cols = 0, stride = 0;
  int32_t dtype = -1;
};

// One argument, output or gradient: formulas read `tensor`, kernels `view`. `dtype` is the type of the tensor itself.
struct Value {
  enum { NONE, TENSOR, INTEGER, FLOAT, BOOLEAN, TEXT, LIST };
  int32_t tag = NONE, dtype = -1;
  union {
    int64_t integer = 0;
    double number;
    const char* text;
    const Tensor* tensor;
    const IValue* list;
  };
  int64_t length = 0;
  View view;
};

// The stages of a call, which nfrs_run runs: checks, kernel, formula, and gradients that can be differentiated again.
enum Stage : int32_t { PLAN, KERNEL, FORMULA, GRADIENT };
// Results of nfrs_run if the kernels are wrong on this device, so that the formula must run. REFUSED_NOW also warns
// once.
enum : int { REFUSED = 4, REFUSED_NOW = 5 };
// The reason why a formula runs: there is no kernel, a transform differentiates the call, or vmap batches it.
enum Why : int32_t { DEVICE, TRANSFORM, BATCH };

// A call in one of its stages.
struct Call {
  Span<Value> arguments, outputs;
  const Value* gradients;  // the gradients of the outputs
  uint64_t wanted;         // a bit for each argument whose gradient is wanted
  int32_t device;          // the CUDA device whose kernels run, or -1
  Why why;                 // the reason why a formula runs
  // Rust sets these:
  uint64_t absent;   // a bit for each output that is not computed
  uint64_t written;  // a bit for each argument whose working copy has changed
  bool composed;     // true if no kernel accepts this call
};

// Returns the tensor in an argument; an undefined one if it has none.
inline const Tensor& tensor(const IValue& v) {
  static const Tensor absent;
  return v.isTensor() ? v.toTensor() : absent;
}
inline IValue value(const Tensor& t) { return t.defined() ? IValue(t) : IValue(); }
// Returns the call's tensor for entry i of the operator's table; undefined if it is absent.
inline const Tensor& entry(const Op& op, Args args, size_t i) { return tensor(args[op.table[i].place]); }
inline const Tensor& leader(const Op& op, Args args) { return entry(op, args, op.leader); }

}  // namespace nfrs

extern "C" {
// Runs a stage of a call in Rust, which puts the results of a formula or gradient stage into `made`. Returns 0,
// REFUSED, REFUSED_NOW, or the status of an error for `check_rust`.
int nfrs_run(const void* rust, nfrs::Stage stage, nfrs::Call* call, at::Tensor** made);
int nfrs_cuda_ready(int32_t device);  // 1: kernels run there; 0: they cannot run; -1: they cannot run but are required
bool nfrs_cuda_stand_in();            // true if CPU tensors are sent through the CUDA kernels, for tests
const char* nfrs_rust_error();        // the message of this thread's last failed call into Rust
}

namespace nfrs {

// Throws a failed call's error: 2 is a ValueError, 3 a NotImplementedError. A Python exception is thrown unchanged,
// because torch's checkpointing raises one to end a recomputation early.
inline void check_rust(int status) {
  if (status != 0) normformer_rs::rethrow_as(nfrs_rust_error());
  TORCH_CHECK_VALUE(status != 2, nfrs_rust_error());
  TORCH_CHECK_NOT_IMPLEMENTED(status != 3, nfrs_rust_error());
  TORCH_CHECK(status == 0, nfrs_rust_error());
}

// Takes ownership of a tensor that Rust made; returns an undefined tensor for null.
inline Tensor take_over(Tensor* made) {
  if (!made) return Tensor();
  const std::unique_ptr<Tensor> own(made);
  return *own;
}

}  // namespace nfrs
