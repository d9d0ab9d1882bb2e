// Registers the operators with PyTorch's dispatcher and lends Rust what tch does not bind. No arithmetic lives here:
// kernels and composed formulas are Rust's.
#include "adam.h"
#include "collective.h"
#include "column.h"
#include "composite.h"
#include "fused.h"
#include "norm.h"
#include "recompute.h"
#include "residual.h"
#include "transfer.h"

#include <mutex>

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

bool nfrs_register() {
  return guarded([] {
    static const bool done = [] {
      static torch::Library library(torch::Library::DEF, "normformer_rs", std::nullopt, __FILE__, __LINE__);
      nfrs::norm::define(library);
      nfrs::column::define(library);
      nfrs::composite::define(library);
      nfrs::residual::define(library);
      nfrs::fused::define(library);
      nfrs::adam::define(library);
      return true;
    }();
    return done;
  });
}

// noexcept: `run` is Rust's and does not unwind.
void nfrs_parallel_for(int64_t n, int64_t grain, void (*run)(const void*, int64_t, int64_t), const void* context) noexcept {
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { run(context, begin, end); });
}
int64_t nfrs_num_threads() noexcept { return at::get_num_threads(); }

Tensor* nfrs_gather(const Tensor* x, const Tensor* rows, const Tensor* back, const Tensor* absent) {
  return guarded([&] { return give(nfrs::fused::Gather::apply(*x, *rows, *back, *absent)); });
}
// Keeps scaled_dot_product_attention from cuDNN's, for all threads, until as many calls of nfrs_cudnn_allow: torch has
// one switch per process. Another thread's attention meanwhile takes another of torch's kernels, and its value is the same
// but for rounding.
void nfrs_cudnn_forbid() noexcept { cudnn.forbid(); }
void nfrs_cudnn_allow() noexcept { cudnn.allow(); }

Tensor* nfrs_norm(int64_t k, const Tensor* x, const Tensor* weight, const Tensor* bias, double eps) {
  return guarded([&] {
    auto opt = [](const Tensor* t) { return t ? MaybeTensor(*t) : std::nullopt; };
    return give(std::get<0>(nfrs::norm::forward_op(k).call(*x, opt(weight), opt(bias), eps)));
  });
}

// tensors: x, weight, bias, pad_mask, first, second, iters, refused, stats. Returns y; the statistics used through `stats`.
Tensor* nfrs_column(int64_t k, const Tensor* const* tensors, const ColumnOptions* options, Tensor** stats) {
  return guarded([&] {
    auto opt = [&](int i) { return tensors[i] ? MaybeTensor(*tensors[i]) : std::nullopt; };
    auto [y, used] = nfrs::column::call_forward(
        k, *tensors[0], opt(1), opt(2), nfrs::column::Rest{opt(3), opt(4), opt(5), opt(6), opt(7), opt(8), *options});
    *stats = give(used);
    return give(y);
  });
}

// Returns x_plus; y through `y` unless k is -1. dtype < 0: y has f's dtype.
Tensor* nfrs_residual(int64_t k, const Tensor* x, const Tensor* f, const Tensor* alpha, const Tensor* beta,
                      const Tensor* weight, const Tensor* bias, double eps, double p, const Tensor* seed, int64_t site,
                      int32_t dtype, Tensor** y) {
  return guarded([&] {
    auto opt = [](const Tensor* t) { return t ? MaybeTensor(*t) : std::nullopt; };
    nfrs::residual::Kind type = dtype < 0 ? std::nullopt : nfrs::residual::Kind(static_cast<at::ScalarType>(dtype));
    auto [x_plus, normed, stats] = nfrs::residual::op<nfrs::residual::Forward>(k, "").call(
        *x, *f, opt(alpha), opt(beta), opt(weight), opt(bias), eps, p, opt(seed), site, type);
    if (y) *y = give(normed);
    return give(x_plus);
  });
}

Tensor* nfrs_lp_norm(const Tensor* x, const Tensor* weight, double p, double eps) {
  return guarded([&] {
    static const auto op = nfrs::operator_handle<Tensor(const Tensor&, const MaybeTensor&, double, double)>("lp_norm");
    return give(op.call(*x, weight ? MaybeTensor(*weight) : std::nullopt, p, eps));
  });
}

Tensor* nfrs_relu_dropout(const Tensor* x, double p, const Tensor* seed, int64_t site) {
  return guarded([&] {
    static const auto op = nfrs::operator_handle<nfrs::fused::ReluForward>("relu_dropout");
    return give(op.call(*x, p, seed ? MaybeTensor(*seed) : std::nullopt, site));
  });
}

Tensor* nfrs_attention(const Tensor* q, const Tensor* k, const Tensor* v, const Tensor* ranges, int64_t heads,
                       bool causal, double scale, double p, const Tensor* seed, int64_t site) {
  return guarded([&] {
    static const auto op = nfrs::operator_handle<nfrs::fused::AttentionForward>("attention");
    return give(std::get<0>(
        op.call(*q, *k, *v, *ranges, heads, causal, scale, p, seed ? MaybeTensor(*seed) : std::nullopt, site)));
  });
}

// Returns the loss per row; the NLL per row through `nll`.
Tensor* nfrs_cross_entropy(const Tensor* logits, const Tensor* target, const Tensor* mask, double nll_weight,
                           double uniform_weight, int64_t ignore_index, Tensor** nll) {
  return guarded([&] {
    static const auto op = nfrs::operator_handle<nfrs::fused::EntropyForward>("label_smoothed_cross_entropy");
    auto [loss, each, lse] = op.call(*logits, *target, mask ? MaybeTensor(*mask) : std::nullopt, nll_weight,
                                     uniform_weight, ignore_index);
    *nll = give(each);
    return give(loss);
  });
}
Tensor* nfrs_cross_entropy_(Tensor* logits, const Tensor* target, const Tensor* mask, double nll_weight,
                            double uniform_weight, int64_t ignore_index, const Tensor* scale,
                            Tensor** nll) {
  return guarded([&] {
    using Signature = std::tuple<Tensor, Tensor>(Tensor&, const Tensor&, const MaybeTensor&, double, double, int64_t,
                                                 const Tensor&);
    static const auto op = nfrs::operator_handle<Signature>("label_smoothed_cross_entropy_");
    auto [loss, each] = op.call(*logits, *target, mask ? MaybeTensor(*mask) : std::nullopt, nll_weight, uniform_weight,
                                ignore_index, *scale);
    *nll = give(each);
    return give(loss);
  });
}

// tensors: those of `adam_`, in its order.
bool nfrs_adam_(Tensor* const* tensors, double beta1, double beta2, double eps) {
  return guarded([&] {
    static const auto op = nfrs::operator_handle<nfrs::adam::Update>("adam_");
    op.call(*tensors[0], *tensors[1], *tensors[2], *tensors[3], *tensors[4], *tensors[5], *tensors[6], beta1, beta2, eps);
    return true;
  });
}

// Appends the piece's outputs. Takes over the piece.
bool nfrs_recompute(void* piece, const Tensor* const* inputs, size_t count, void* outputs, Push push) {
  return guarded([&] {
    auto owned = c10::make_intrusive<nfrs::recompute::Piece>(piece);
    variable_list given;
    for (size_t i = 0; i < count; ++i) given.push_back(*inputs[i]);
    for (auto& t : nfrs::recompute::Recompute::apply(at::TensorList(given), std::move(owned))) push(outputs, give(t));
    return true;
  });
}

Tensor* nfrs_all_reduce(const Tensor* t, int64_t, const char* group) {
  return guarded([&] { return give(nfrs::collective::all_reduce(*t, group)); });
}
bool nfrs_all_reduce_(Tensor* t, const char* group) {
  return guarded([&] {
    nfrs::collective::all_reduce_(*t, group);
    return true;
  });
}
Tensor* nfrs_all_gather(const Tensor* t, int64_t size, const char* group) {
  return guarded([&] { return give(nfrs::collective::all_gather(*t, size, group)); });
}
Tensor* nfrs_broadcast(const Tensor* t, int64_t, const char* group) {
  return guarded([&] { return give(nfrs::collective::broadcast(*t, group)); });
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
