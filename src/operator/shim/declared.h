// What Rust and C++ say to each other of operators: a declaration (operator/register.rs) and a call (operator/call.rs).
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace nfrs {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Args = at::ArrayRef<IValue>;

// ---- a declaration ----

// What Rust keeps for good.
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
  SAME,      // the leader's; of an output: the type of what it is like
  WIDTH,     // floating, and float64 where the leader is
  COMPUTED,  // what the leader is computed in: float64 for float64, else float32
  FLOAT32,
  FLOAT64,
  INT64,
  BOOL,
  DTYPE,  // of an output: what the argument `dtype` says, or the type of what it is like
  MOMENT,  // float32 or bfloat16
};

// Beside these an argument is required, lies on the leader's device, and is read.
enum : uint8_t {
  OPTIONAL = 1,  // may be absent
  HOST = 2,      // may lie on the CPU, too
  WRITTEN = 4,   // where it lies: contiguous, and no other tensor's memory
  SHARED = 8,    // an output: where it is absent the first output is this one, too
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

// A tensor argument, or an output.
struct Argument {
  const char* name;
  // A letter or a digit per dimension: a letter is one number wherever it stands. "*" stands for any first dimensions,
  // the same wherever it stands. "=d": d numbers, whatever the shape. "1|d": a scalar or a vector, of 1 or d numbers;
  // "1|d#": or a matrix with a side of d.
  // Of an output also "@": the shape of what it is like.
  const char* sizes;
  size_t place;  // among the call's arguments; of an output: the place in Op::table of what it is like
  Type type;
  uint8_t is;
  Reading reading;
};

struct Origin {  // where an argument of a backward operator comes from
  enum : int32_t { NOTHING, GRADIENT, ARGUMENT, OUTPUT } kind;
  uint32_t index;
  int64_t only_for;  // given where the gradient of this place in Op::table is wanted; -1: always
};

// What an operator is.
enum : uint32_t {
  ON_CPU = 1,  // has kernels there
  ON_GPU = 2,
  COMPOSED = 4,      // has a formula
  COMPOSITION = 8,   // is nothing else: PyTorch differentiates what it calls
  RECORDED = 16,     // its gradient is its own, where it has no kernel, too
  BATCHED = 32,      // its formula runs under vmap
  LOOPED = 64,       // vmap calls it for one example after the other
};

struct Op {
  const void* rust;
  const char *name, *schema;
  size_t n_args, leader;                // the leader's place in `table`: what types and devices are compared with
  int64_t dtype, title, p;              // arguments: a type, a name for messages, dropout's rate; or -1
  uint32_t is;
  Span<Argument> table, made, lists;    // tensor arguments, outputs, arguments that are lists of tensors
  Span<Argument> told;                  // at most two integers, which letters stand for
  Span<uint8_t> has_gradient, plain;    // of outputs; of arguments: a node keeps them as they are, without a version
  Span<Origin> saved;                   // what else a node keeps
  Op* backward;                         // or null
  Span<Origin> sources;                 // of a backward operator: where its arguments come from,
  Span<size_t> results;                 //   and the places in the forward's `table` whose gradients its outputs are
  const c10::OperatorHandle* handle;    // C++'s
};

// ---- a call ----

// A matrix: rows of `cols` numbers, `stride` apart. data is null where a tensor is absent.
struct View {
  void* data = nullptr;
  int64_t rows = 0, cols = 0, stride = 0;
  int32_t dtype = -1;
};

// One argument, output or gradient: formulas read `tensor`, kernels `view`. `dtype` is the tensor's own.
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

enum Stage : int32_t { PLAN, KERNEL, FORMULA, GRADIENT };
// What kernels answer that are wrong on this device: the formula must run; and the first time, with a warning.
enum : int { REFUSED = 4, REFUSED_NOW = 5 };
enum Why : int32_t { DEVICE, TRANSFORM, BATCH };

struct Call {
  Span<Value> arguments, outputs;
  const Value* gradients;  // of the outputs
  uint64_t wanted;         // the arguments whose gradients are
  int32_t device;          // of the kernels: a CUDA device's number, or -1
  Why why;                 // a formula runs
  // Rust's answers:
  uint64_t absent;   // outputs that are not made
  uint64_t written;  // arguments whose working copies have changed
  bool composed;     // no kernel takes this call
};

inline const Tensor& tensor(const IValue& v) {
  static const Tensor absent;
  return v.isTensor() ? v.toTensor() : absent;
}
inline IValue value(const Tensor& t) { return t.defined() ? IValue(t) : IValue(); }
inline const Tensor& entry(const Op& op, Args args, size_t i) { return tensor(args[op.table[i].place]); }
inline const Tensor& leader(const Op& op, Args args) { return entry(op, args, op.leader); }

}  // namespace nfrs

extern "C" {
int nfrs_run(const void* rust, nfrs::Stage stage, nfrs::Call* call, at::Tensor** made);
int nfrs_cuda_ready(int32_t device);  // 1: kernels run there; 0: they cannot; -1: they cannot, and are required
bool nfrs_cuda_stand_in();            // whether tensors of the CPU take the CUDA kernels' way: for the tests
const char* nfrs_rust_error();        // the message of this thread's last failed call into Rust
}

namespace nfrs {

// An exception of Python's that Rust hands back goes on as it was: torch's checkpointing ends a recomputation by one.
inline void check_rust(int status) {
  if (status != 0) normformer_rs::rethrow_as(nfrs_rust_error());
  TORCH_CHECK_VALUE(status != 2, nfrs_rust_error());
  TORCH_CHECK_NOT_IMPLEMENTED(status != 3, nfrs_rust_error());
  TORCH_CHECK(status == 0, nfrs_rust_error());
}

// Takes over a tensor that Rust made; undefined where it made none.
inline Tensor take_over(Tensor* made) {
  if (!made) return Tensor();
  const std::unique_ptr<Tensor> own(made);
  return *own;
}

}  // namespace nfrs
