// Registers the operators with PyTorch's dispatcher, and provides functions of libtorch that tch does not bind. Nothing
// is computed here: kernels and formulas are in Rust.
#include "function.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/library.h>

using namespace nfrs;

#ifdef NORMFORMER_RS_PYTHON
namespace torch {
void translate_exception_to_python(const std::exception_ptr&);  // in libtorch_python; its header needs Python's headers
}
#endif

namespace {
thread_local std::string last_error;  // the message of this thread's last failed call from Rust

// Runs `work`. If it throws, keeps the message and returns null or false.
template <class Work>
auto guarded(Work work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::exception& e) {
    normformer_rs::notice(e.what());
    last_error = e.what();
  } catch (...) {
    last_error = "C++ threw what is no std::exception";
  }
  return {};
}
// Runs `work`; returns false if it throws.
template <class Work>
bool done(Work work) {
  return guarded([&] {
    work();
    return true;
  });
}
// Moves a tensor to the heap; the receiver owns it.
Tensor* give(Tensor t) { return new Tensor(std::move(t)); }
// Returns the tensors of values that are all tensors.
variable_list tensors(Span<Value> values) {
  variable_list list;
  for (const auto& v : values) list.push_back(*v.tensor);
  return list;
}
c10::Device cuda(int device) { return c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)); }

// A boxed kernel of one operator for one dispatch key.
struct Boxed : c10::OperatorKernel {
  using Run = void (*)(const Op&, c10::DispatchKeySet, Stack*);
  Boxed(const Op& op, Run run) : op(op), run(run) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) { run(op, keys, stack); }
  const Op& op;
  const Run run;
};

// Returns true if the operator writes to one of its arguments.
bool writes(const Op& op) {
  const auto& formal = op.handle->schema().arguments();
  return std::any_of(formal.begin(), formal.end(), [](const c10::Argument& a) {
    return a.alias_info() && a.alias_info()->isWrite();
  });
}

// Registers an operator, with one boxed kernel for each dispatch key.
void define(torch::Library& m, Op& op) {
  using Key = c10::DispatchKey;
  m.def(op.schema, {at::Tag::pt2_compliant_tag});
  const auto name = std::string("normformer_rs::") + op.name;
  op.handle = new c10::OperatorHandle(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), ""));
  const auto impl = [&](Key key, Boxed::Run run) {
    m.impl(op.name, key, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Boxed>(op, run)));
  };
  if (op.is & COMPOSITION) {
    // Under vmap, torch batches the operations of the formula. Without the second of these lines torch 2.15 would call
    // the formula once per example.
    impl(Key::CompositeImplicitAutograd, boxed<by_formula<DEVICE>>);
    impl(Key::FuncTorchBatched, boxed<by_formula<DEVICE>>);
    return;
  }
  impl(Key::CPU, boxed<by_kernel>);
  if (op.is & (ON_GPU | COMPOSED)) impl(Key::CUDA, boxed<by_kernel>);
  impl(Key::Meta, boxed<meta>);
  // Kernels write to plain memory, which a negated or conjugated view is not.
  if (writes(op)) {
    impl(Key::Negative, by_plain);
    impl(Key::Conjugate, by_plain);
  }
  if (op.is & COMPOSED) impl(Key::CompositeExplicitAutograd, boxed<by_formula<DEVICE>>);
  if (op.is & BATCHED) impl(Key::FuncTorchBatched, boxed<by_formula<BATCH>>);
  if (op.is & LOOPED) impl(Key::FuncTorchBatched, by_examples);
  if (op.backward) {
    define(m, *op.backward);
    impl(Key::Autograd, autograd);
  } else {
    m.impl(op.name, Key::Autograd, torch::autograd::autogradNotImplementedFallback());
  }
}


// Counts the bytes of the tensors that this thread allocates. It replaces torch's memory profiler while it lives.
struct Counter final : c10::MemoryReportingInfoBase {
  std::atomic<int64_t> now = 0, peak = 0;  // atomic, because torch's worker threads report too
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    const int64_t held = now += bytes;
    for (int64_t most = peak; most < held && !peak.compare_exchange_weak(most, held);) {}  // peak = max(peak, held)
  }
  bool memoryProfilingEnabled() const override { return true; }
};
// A counter, which counts as long as this value lives.
struct Counting {
  std::shared_ptr<Counter> counter = std::make_shared<Counter>();
  c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, counter};
};
}  // namespace

// Replacements of torch-sys's functions, as tch calls them (compat/normformer_rs_torch_sys.h).
namespace {
thread_local char* error_of_call = nullptr;    // the error of a failed call, which tch has not got yet
thread_local bool is_asked_for_free = false;  // true if tch's next question is about the freeing of a scalar
}  // namespace
extern "C" {
void torch_sys_ats_free(void* scalar);
char* torch_sys_get_and_reset_last_err();

// After a failed call tch frees the call's scalar, gets the last error for the freeing, and then for the call itself.
// The first time it gets no error, the second time the call's.
void ats_free(void* scalar) {
  if (char* error = torch_sys_get_and_reset_last_err()) error_of_call = error;
  torch_sys_ats_free(scalar);
  is_asked_for_free = error_of_call != nullptr;
}
char* get_and_reset_last_err() {
  if (std::exchange(is_asked_for_free, false)) return nullptr;
  if (error_of_call) return std::exchange(error_of_call, nullptr);
  return torch_sys_get_and_reset_last_err();
}
// Copies numbers of the host to a new CPU tensor of this shape. `type` is a c10::ScalarType, whose numbers must have
// `bytes_each` bytes.
Tensor* at_tensor_of_data(const void* numbers, const int64_t* sizes, size_t dims, size_t bytes_each, int type) {
  try {
    const Plainly plainly;
    const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(type));
    auto made = std::make_unique<Tensor>(at::empty(at::IntArrayRef(sizes, dims), options));
    TORCH_CHECK(made->element_size() == static_cast<int64_t>(bytes_each), "a number of ", made->scalar_type(), " has ",
                made->element_size(), " bytes, not ", bytes_each);
    if (made->numel() > 0) std::memcpy(made->mutable_data_ptr(), numbers, made->nbytes());
    return made.release();
  } catch (const std::exception& e) {
    error_of_call = strdup(e.what());
    return nullptr;
  }
}
}

// The functions that Rust calls; none lets an exception out. A Tensor* is tch's C_tensor*; the caller owns a returned
// one. A result of null or false means failure, with the message in nfrs_last_error().
extern "C" {
const char* nfrs_last_error() { return last_error.c_str(); }

// Returns this thread's last Python exception if it became an error with this text. The caller must drop or return
// it.
void* nfrs_take_raised(const char* text) noexcept {
  std::unique_ptr<normformer_rs::Raised> last(std::exchange(normformer_rs::raised, nullptr));
  return last && last->text == text ? last.release() : nullptr;
}
void nfrs_drop_raised(void* raised) noexcept { delete static_cast<normformer_rs::Raised*>(raised); }
// Makes `raised` this thread's last exception again, and takes ownership.
void nfrs_return_raised(void* raised) noexcept {
  normformer_rs::forget_raised();
  normformer_rs::raised = static_cast<normformer_rs::Raised*>(raised);
}
#ifdef NORMFORMER_RS_PYTHON
// Sets the exception as Python's current error. The caller holds the GIL and calls this once.
void nfrs_restore_raised(const void* raised) noexcept {
  done([&] { torch::translate_exception_to_python(static_cast<const normformer_rs::Raised*>(raised)->exception); });
}
#endif

// Registers an operator that Rust has declared, and its backward operator.
bool nfrs_define(Op* op) {
  return done([&] {
    static torch::Library library(torch::Library::DEF, "normformer_rs", std::nullopt, __FILE__, __LINE__);
    define(library, *op);
  });
}

// The address and the length of a tensor's data, for Rust.
struct Memory {
  const void* data;
  size_t bytes;
};
// Copies a tensor to the host in `type` (-1: the tensor's own) and sets `memory` to the data; returns null if the
// tensor cannot be read.
Tensor* nfrs_host(const Tensor* t, int type, Memory* memory) {
  return guarded([&]() -> Tensor* {
    const Tensor host = on_host(*t, type, last_error);
    if (!host.defined()) return nullptr;
    *memory = {host.const_data_ptr(), host.nbytes()};
    return give(host);
  });
}
// Returns true if the tensor's data lies at its address and is its value; false also on an exception.
bool nfrs_has_memory(const Tensor* t) {
  return guarded([&]() -> bool { return has_memory(*t); });
}

// Calls `run` with `context` on ranges that together cover 0..n, on torch's threads. It is noexcept because `run`, a
// Rust function, never unwinds.
void nfrs_parallel_for(int64_t n, int64_t grain, void (*run)(const void*, int64_t, int64_t),
                       const void* context) noexcept {
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { run(context, begin, end); });
}

// Allows or forbids cuDNN in scaled_dot_product_attention, for the whole process; returns the old setting.
bool nfrs_set_cudnn_attention(bool on) noexcept {
  const bool was = at::globalContext().userEnabledCuDNNSDP();
  at::globalContext().setSDPUseCuDNN(on);
  return was;
}

// Looks up an operator for nfrs_call; null if no operator has this name.
const void* nfrs_operator(const char* name, int64_t length) {
  return guarded([&]() -> const void* {
    const auto found = c10::Dispatcher::singleton().findSchema({std::string(name, length), ""});
    return found ? new c10::OperatorHandle(*found) : nullptr;
  });
}
// Calls an operator through the dispatcher; `outputs` has room for `n_outputs` tensors.
bool nfrs_call(const void* op, Span<Value> arguments, Tensor** outputs, size_t n_outputs) {
  return done([&] {
    Stack stack;
    stack.reserve(std::max(arguments.size(), n_outputs));
    for (const auto& a : arguments) {
      switch (a.tag) {
        case Value::TENSOR: stack.emplace_back(*a.tensor); break;
        case Value::INTEGER: stack.emplace_back(a.integer); break;
        case Value::FLOAT: stack.emplace_back(a.number); break;
        case Value::BOOLEAN: stack.emplace_back(a.integer != 0); break;
        case Value::TEXT: stack.emplace_back(std::string(a.text, a.length)); break;
        default: stack.emplace_back();
      }
    }
    static_cast<const c10::OperatorHandle*>(op)->callBoxed(stack);
    TORCH_CHECK(stack.size() == n_outputs, "an operator made ", stack.size(), " tensors, not ", n_outputs);
    for (size_t k = 0; k < stack.size(); ++k) outputs[k] = give(std::move(stack[k]).toTensor());
  });
}

// Creates a CPU generator with this seed, which nfrs_free_generator frees; nfrs_draw fills a tensor from it.
void* nfrs_generator(uint64_t seed) {
  return guarded([&] { return new at::Generator(at::detail::createCPUGenerator(seed)); });
}
void nfrs_free_generator(void* generator) noexcept { delete static_cast<at::Generator*>(generator); }
// Fills a tensor with uniform numbers from `from` to `to`, or with normal ones of mean `from` and standard deviation
// `to`.
bool nfrs_draw(void* generator, const Tensor* t, bool is_normal, double from, double to) {
  return done([&] {
    const auto& own = *static_cast<at::Generator*>(generator);
    is_normal ? t->normal_(from, to, own) : t->uniform_(from, to, own);
  });
}

// Returns an element of a list argument.
Value nfrs_element(const IValue* list, int64_t i) noexcept { return shown(list->toListRef()[i]); }

// Turns autograd on inside an operator, where the dispatcher has turned it off, until nfrs_leave_autograd.
void* nfrs_above_autograd() noexcept {
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  return new c10::impl::ForceDispatchKeyGuard(keys);
}
void nfrs_leave_autograd(void* above) noexcept { delete static_cast<c10::impl::ForceDispatchKeyGuard*>(above); }
// Computes a gradient for each input, null if no root depends on it; `gradients` are those of the roots. If
// `create_graph` is true, the results can be differentiated. Without inputs, adds gradients to the leaves' grad.
bool nfrs_gradients(Span<Value> roots, Span<Value> gradients, Span<Value> inputs, bool create_graph, Tensor** made) {
  return done([&] {
    const auto from = tensors(roots), given = tensors(gradients), to = tensors(inputs);
    if (to.empty()) return torch::autograd::backward(from, given);
    const bool keeps_graph = create_graph, allows_unused = true;
    const auto computed = torch::autograd::grad(from, to, given, keeps_graph, create_graph, allows_unused);
    for (size_t i = 0; i < computed.size(); ++i) made[i] = computed[i].defined() ? give(computed[i]) : nullptr;
  });
}
// Returns true if the size of the last dimension is a multiple of `multiple_of`; for 0, if the size is 0. It may be
// symbolic.
bool nfrs_has_columns(const Tensor* x, int64_t multiple_of) {
  return guarded([&]() -> bool {
    const auto columns = x->sym_size(-1);
    return multiple_of == 0 ? columns == 0 : columns % multiple_of == 0;
  });
}

// Sets `width` to the size of the last dimension.
bool nfrs_width(const Tensor* x, int64_t* width) {
  return done([&] { *width = x->sym_size(-1).guard_int(__FILE__, __LINE__); });
}

// Takes ownership of a Rust function, calls it as an autograd node, and appends its outputs to `outputs`. `saves` is
// true if the backward pass needs the inputs.
bool nfrs_function(void* function, bool saves, Span<Value> inputs, void* outputs, Push push) {
  return done([&] {
    auto held = c10::make_intrusive<Held>(function, saves);
    const auto given = tensors(inputs);
    for (auto& t : Function::apply(at::TensorList(given), std::move(held))) push(outputs, give(t));
  });
}

// Counts this thread's allocations until nfrs_count_end, which gets the returned counter.
void* nfrs_count_memory() {
  return guarded([]() -> void* { return new Counting; });
}
// Returns the largest number of bytes that were allocated at once since nfrs_count_memory.
int64_t nfrs_counted_peak(const void* counting) noexcept {
  return static_cast<const Counting*>(counting)->counter->peak;
}
void nfrs_count_end(void* counting) noexcept { delete static_cast<Counting*>(counting); }

// Records an event on a CUDA device's current stream, with torch's generic interfaces, so that CUDA is not needed to
// build.
void* nfrs_event(int device) {
  return guarded([&]() -> void* {
    auto event = std::make_unique<c10::Event>(at::kCUDA);
    event->record(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(cuda(device)));
    return event.release();
  });
}
// Waits until the device has passed the event.
bool nfrs_event_wait(const void* event) { return done([&] { static_cast<const c10::Event*>(event)->synchronize(); }); }
void nfrs_event_free(void* event) noexcept { delete static_cast<c10::Event*>(event); }
// Returns the number of a stream from torch's pool; never 0, the number of the default stream.
int64_t nfrs_side_stream(int device) {
  return guarded([&] { return c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(cuda(device)).id(); });
}
// Makes the stream with this number current until nfrs_stream_leave, which gets the returned guard.
void* nfrs_stream_enter(int device, int64_t stream) {
  return guarded([&]() -> void* {
    return new c10::StreamGuard(c10::Stream(c10::Stream::UNSAFE, cuda(device), stream));
  });
}
void nfrs_stream_leave(void* guard) noexcept { delete static_cast<c10::StreamGuard*>(guard); }

// Sets the leaf's grad to `gradient`.
bool nfrs_set_grad(const Tensor* leaf, const Tensor* gradient) {
  return done([&] { leaf->mutable_grad() = *gradient; });
}
}
