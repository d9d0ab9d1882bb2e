// Registers the operators with PyTorch's dispatcher and lends Rust what tch does not bind. No arithmetic lives here:
// kernels and composed formulas are Rust's.
#include "operators.h"
#include "recompute.h"
#include "transfer.h"

#include <ATen/Parallel.h>

#include <mutex>

using at::Tensor;

namespace {
thread_local std::string last_error;

template <class Work>
auto guarded(Work work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::exception& e) {
    last_error = e.what();
  } catch (...) {
    last_error = "C++ threw what is no std::exception";
  }
  return {};
}
Tensor* give(Tensor t) { return new Tensor(std::move(t)); }

// x's rows, none of them twice where a gradient matters; `back` has where each went, `absent` which went nowhere.
struct Gather : torch::autograd::Function<Gather> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& rows, const Tensor& back,
                        const Tensor& absent) {
    ctx->save_for_backward({back, absent});
    return x.index_select(0, rows);
  }
  static nfrs::variable_list backward(torch::autograd::AutogradContext* ctx, nfrs::variable_list grads) {
    const auto s = ctx->get_saved_variables();
    return {grads[0].index_select(0, s[0]).masked_fill_(s[1], 0), Tensor(), Tensor(), Tensor()};
  }
};

// Counts who keeps attention from cuDNN: the last to leave puts torch's switch back as the first has found it.
class Cudnn {
 public:
  void forbid() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (count++ > 0) return;
    was = at::globalContext().userEnabledCuDNNSDP();
    if (was) at::globalContext().setSDPUseCuDNN(false);
  }
  void allow() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (--count == 0 && was) at::globalContext().setSDPUseCuDNN(true);
  }

 private:
  std::mutex mutex;
  int count = 0;
  bool was = false;
};
Cudnn cudnn;
}  // namespace

// What Rust calls; an exception must not leave. A Tensor* is tch's C_tensor*; one that comes back is new and the caller's. Null (or false): failed,
// with the message in nfrs_last_error().
extern "C" {
const char* nfrs_last_error() { return last_error.c_str(); }

// Registers an operator as Rust declares it.
bool nfrs_define(const OperatorRow* row) {
  return guarded([&] {
    static torch::Library library(torch::Library::DEF, "normformer_rs", std::nullopt, __FILE__, __LINE__);
    nfrs::define(library, *row);
    return true;
  });
}

// noexcept: `run` is Rust's and does not unwind.
void nfrs_parallel_for(int64_t n, int64_t grain, void (*run)(const void*, int64_t, int64_t), const void* context) noexcept {
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { run(context, begin, end); });
}
int64_t nfrs_num_threads() noexcept { return at::get_num_threads(); }

Tensor* nfrs_gather(const Tensor* x, const Tensor* rows, const Tensor* back, const Tensor* absent) {
  return guarded([&] { return give(Gather::apply(*x, *rows, *back, *absent)); });
}
// Keeps scaled_dot_product_attention from cuDNN's, for all threads, until as many calls of nfrs_cudnn_allow: torch has
// one switch per process. Another thread's attention meanwhile takes another of torch's kernels, and its value is the same
// but for rounding.
void nfrs_cudnn_forbid() noexcept { cudnn.forbid(); }
void nfrs_cudnn_allow() noexcept { cudnn.allow(); }

// An operator, for nfrs_call; null where there is none of this name.
const void* nfrs_operator(const char* name, int64_t length) {
  return guarded([&]() -> const void* {
    const auto found = c10::Dispatcher::singleton().findSchema({std::string(name, length), ""});
    return found ? new c10::OperatorHandle(*found) : nullptr;
  });
}
// Calls it, through the dispatcher.
bool nfrs_call(const void* op, const Value* arguments, int64_t n, Tensor** outputs, int64_t n_outputs) {
  return guarded([&] {
    torch::jit::Stack stack;
    stack.reserve(std::max(n, n_outputs));
    for (const auto& a : at::ArrayRef<Value>(arguments, n)) {
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
    const int64_t n_made = stack.size();
    TORCH_CHECK(n_made == n_outputs, "an operator made ", n_made, " tensors, not ", n_outputs);
    for (size_t k = 0; k < stack.size(); ++k) outputs[k] = give(std::move(stack[k]).toTensor());
    return true;
  });
}

// An element of a list that is an argument: a tensor, null where there is none, or a number.
const Tensor* nfrs_tensor_of(const c10::IValue* list, int64_t i) noexcept {
  const Tensor& t = nfrs::tensor(list->toListRef()[i]);
  return t.defined() ? &t : nullptr;
}
double nfrs_number_of(const c10::IValue* list, int64_t i) noexcept { return list->toListRef()[i].toDouble(); }

// Records again what is called inside an operator, which has left autograd behind, until nfrs_leave_autograd.
struct Above {
  static c10::impl::LocalDispatchKeySet keys() {
    auto keys = c10::impl::tls_local_dispatch_key_set();
    keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    return keys;
  }
  const c10::impl::ForceDispatchKeyGuard above{keys()};
  const at::AutoGradMode enabled{true};
};
void* nfrs_above_autograd() noexcept { return new Above; }
void nfrs_leave_autograd(void* above) noexcept { delete static_cast<Above*>(above); }
// A gradient for each of n inputs, null where `root` does not depend on it; with `again` they can be differentiated.
bool nfrs_gradients(const Tensor* root, const Tensor* gradient, const Tensor* const* inputs, int64_t n, bool again,
                    Tensor** made) {
  return guarded([&] {
    nfrs::variable_list leaves;
    for (int64_t i = 0; i < n; ++i) leaves.push_back(*inputs[i]);
    const auto found = torch::autograd::grad({*root}, leaves, {*gradient}, again, again, true);
    for (int64_t i = 0; i < n; ++i) made[i] = found[i].defined() ? give(found[i]) : nullptr;
    return true;
  });
}
// Whether the last dimension is a multiple of a number (of 0: is 0), symbolic or not.
bool nfrs_has_columns(const Tensor* x, int64_t multiple_of) {
  return guarded([&]() -> bool {
    const auto columns = x->sym_size(-1);
    return multiple_of == 0 ? columns == 0 : columns % multiple_of == 0;
  });
}

// Appends the piece's outputs. Takes over the piece.
bool nfrs_recompute(void* piece, const Tensor* const* inputs, size_t count, void* outputs, Push push) {
  return guarded([&] {
    auto owned = c10::make_intrusive<nfrs::recompute::Piece>(piece);
    nfrs::variable_list given;
    for (size_t i = 0; i < count; ++i) given.push_back(*inputs[i]);
    for (auto& t : nfrs::recompute::Recompute::apply(at::TensorList(given), std::move(owned))) push(outputs, give(t));
    return true;
  });
}

Tensor* nfrs_upload(const Tensor* host, int device) {
  return guarded([&] {
    return give(nfrs::transfer::upload(*host, c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device))));
  });
}
void* nfrs_side_stream(int device) {
  return guarded([&]() -> void* {
    return new c10::Stream(nfrs::transfer::side_stream(c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device))));
  });
}
void* nfrs_stream_enter(const void* stream) {
  return guarded([&]() -> void* { return new c10::StreamGuard(*static_cast<const c10::Stream*>(stream)); });
}
void nfrs_stream_leave(void* guard) noexcept { delete static_cast<c10::StreamGuard*>(guard); }
void nfrs_stream_free(void* stream) noexcept { delete static_cast<c10::Stream*>(stream); }
void* nfrs_late(const Tensor* t) {
  return guarded([&]() -> void* { return new nfrs::transfer::Late(*t); });
}
Tensor* nfrs_late_read(const void* late) {
  return guarded([&] { return give(static_cast<const nfrs::transfer::Late*>(late)->read()); });
}
void nfrs_late_free(void* late) noexcept { delete static_cast<nfrs::transfer::Late*>(late); }

// Backward from a tensor that is not a scalar.
bool nfrs_backward(const Tensor* root, const Tensor* gradient) {
  return guarded([&] {
    torch::autograd::backward({*root}, {*gradient});
    return true;
  });
}
bool nfrs_set_grad(const Tensor* leaf, const Tensor* gradient) {
  return guarded([&] {
    leaf->mutable_grad() = *gradient;
    return true;
  });
}
}
