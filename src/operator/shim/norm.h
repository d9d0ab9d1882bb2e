// The family of row norms: for each entry k of Rust's table (operator/row_norm.rs, `ROW_NORMS`), with its name,
//   NAME(x, weight?, bias?, eps) -> (y, stats)       y = N(x) over the last dimension, in x's dtype
//   NAME_backward(dy, x, weight?, bias?, stats, eps) -> (dx, dweight, dbias)
// One set of kernels serves all; k is the only difference.
#pragma once
#include "common.h"

extern "C" {
int64_t nfrs_norm_count();
const char* nfrs_norm_name(int64_t norm);
int64_t nfrs_norm_stats(int64_t norm);  // numbers kept per row for the backward pass
int nfrs_norm_forward(int64_t norm, const View* x, const View* weight, const View* bias, double eps, const View* y,
                      const View* stats);
int nfrs_norm_backward(int64_t norm, const View* dy, const View* x, const View* weight, double eps, const View* stats,
                       const View* dx, const View* dweight, const View* dbias, const View* workspace);
Tensor* nfrs_norm_composed(int64_t norm, const Tensor* x, const Tensor* weight, const Tensor* bias, double eps);
}

namespace nfrs::norm {

constexpr int64_t MOST = 12;  // instantiated below; raise it when the table outgrows it

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const MaybeTensor&, const MaybeTensor&, double);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const MaybeTensor&,
                                                    const MaybeTensor&, const Tensor&, double);

inline std::string name(int64_t k) { return nfrs_norm_name(k); }

constexpr Argument FORWARD[] = {
    {"x", "*d", Type::FLOATING, LEADER},
    {"weight", "1|d", Type::FLOATING, OPTIONAL},
    {"bias", "1|d", Type::FLOATING, OPTIONAL},
};
// s: numbers kept per row.
constexpr Argument BACKWARD[] = {
    {"dy", "*d", Type::SAME},
    {"x", "*d", Type::FLOATING, LEADER},
    {"weight", "1|d", Type::FLOATING, OPTIONAL},
    {"bias", "1|d", Type::FLOATING, OPTIONAL},
    {"stats", "*s", Type::COMPUTED},
};

inline void check_forward(int64_t k, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias) {
  check({nfrs_norm_name(k)}, FORWARD, {&x, pointer(weight), pointer(bias)});
}
inline void check_backward(int64_t k, const Tensor& dy, const Tensor& x, const MaybeTensor& weight,
                           const MaybeTensor& bias, const Tensor& stats) {
  check({nfrs_norm_name(k), "_backward"}, BACKWARD, {&dy, &x, pointer(weight), pointer(bias), &stats},
        {{'s', nfrs_norm_stats(k)}});
}
inline Tensor empty_stats(int64_t per_row, const Tensor& x) {
  auto sizes = x.sym_sizes().vec();
  sizes.back() = per_row;
  return at::empty_symint(sizes, x.options().dtype(acc_type(x)));
}

inline std::tuple<Tensor, Tensor> forward_meta(int64_t k, const Tensor& x, const MaybeTensor& weight,
                                               const MaybeTensor& bias) {
  check_forward(k, x, weight, bias);
  return {at::empty_like(x, at::MemoryFormat::Contiguous), empty_stats(nfrs_norm_stats(k), x)};
}

inline std::tuple<Tensor, Tensor> forward_kernel(int64_t k, const Tensor& x, const MaybeTensor& weight,
                                                 const MaybeTensor& bias, double eps) {
  auto [y, stats] = forward_meta(k, x, weight, bias);
  const auto type = parameter_type(x, weight, bias);
  const Tensor dense = x.contiguous(), w = parameter(weight, type), b = parameter(bias, type);
  const View vx = view(dense), vw = view(w), vb = view(b), vy = view(y), vs = view(stats);
  check_rust(nfrs_norm_forward(k, &vx, &vw, &vb, eps, &vy, &vs));
  return {y, stats};
}

inline std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor& x, const MaybeTensor& weight,
                                                        const MaybeTensor& bias) {
  auto like = [&](const MaybeTensor& p) {
    return p && p->defined() ? at::empty_like(*p, at::MemoryFormat::Contiguous) : at::empty({0}, x.options());
  };
  return {at::empty_like(x, at::MemoryFormat::Contiguous), like(weight), like(bias)};
}

inline std::tuple<Tensor, Tensor, Tensor> backward_kernel(int64_t k, const Tensor& dy, const Tensor& x,
                                                          const MaybeTensor& weight, const MaybeTensor& bias,
                                                          const Tensor& stats, double eps) {
  check_backward(k, dy, x, weight, bias, stats);
  const auto type = parameter_type(x, weight, bias);
  const Tensor dense = x.contiguous(), gradient = dy.contiguous(), kept = stats.contiguous();
  const Tensor w = parameter(weight, type);
  Tensor dx = at::empty_like(dense, at::MemoryFormat::Contiguous);
  Tensor dw = w.defined() ? at::empty_like(w) : at::empty({0}, x.options());
  Tensor db = pointer(bias) ? at::empty(bias->sizes(), x.options().dtype(type)) : at::empty({0}, x.options());
  const View vdy = view(gradient), vx = view(dense), vw = view(w), vs = view(kept);
  const View vdx = view(dx), vdw = view(w.defined() ? dw : Tensor()), vdb = view(pointer(bias) ? db : Tensor());
  const Tensor partial = partial_sums(x, vx.rows, vdw.rows * vdw.cols + vdb.rows * vdb.cols);
  const View vp = view(partial);
  check_rust(nfrs_norm_backward(k, &vdy, &vx, &vw, eps, &vs, &vdx, &vdw, &vdb, &vp));
  return {dx, w.defined() ? dw.to(weight->scalar_type()) : dw, pointer(bias) ? db.to(bias->scalar_type()) : db};
}

inline Tensor composed(int64_t k, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  check_forward(k, x, weight, bias);
  return take(nfrs_norm_composed(k, &x, pointer(weight), pointer(bias), eps));
}

inline const c10::TypedOperatorHandle<Forward>& forward_op(int64_t k) {
  static const auto handles = [] {
    std::vector<c10::TypedOperatorHandle<Forward>> all;
    for (int64_t i = 0; i < nfrs_norm_count(); ++i) all.push_back(operator_handle<Forward>(name(i)));
    return all;
  }();
  return handles[k];
}
inline const c10::TypedOperatorHandle<Backward>& backward_op(int64_t k) {
  static const auto handles = [] {
    std::vector<c10::TypedOperatorHandle<Backward>> all;
    for (int64_t i = 0; i < nfrs_norm_count(); ++i) all.push_back(operator_handle<Backward>(name(i) + "_backward"));
    return all;
  }();
  return handles[k];
}

struct RowNorm : torch::autograd::Function<RowNorm> {
  static variable_list forward(AutogradContext* ctx, int64_t k, const Tensor& x, const MaybeTensor& weight,
                               const MaybeTensor& bias, double eps) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, stats] = forward_op(k).call(x, weight, bias, eps);
    ctx->save_for_backward({x, value(weight), value(bias), stats});
    ctx->saved_data["norm"] = k;
    ctx->saved_data["eps"] = eps;
    ctx->mark_non_differentiable({stats});
    ctx->set_materialize_grads(false);
    return {y, stats};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined()) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    const int64_t k = ctx->saved_data["norm"].toInt();
    const double eps = ctx->saved_data["eps"].toDouble();
    if (at::GradMode::is_enabled()) {
      auto d = higher_order({saved[0], saved[1], saved[2]}, {grads[0]}, [&](const variable_list& in) {
        return variable_list{composed(k, in[0], maybe(in[1]), maybe(in[2]), eps)};
      });
      return {Tensor(), d[0], d[1], d[2], Tensor()};
    }
    auto [dx, dw, db] = backward_op(k).call(grads[0], saved[0], maybe(saved[1]), maybe(saved[2]), saved[3], eps);
    return {Tensor(), dx, saved[1].defined() ? dw : Tensor(), saved[2].defined() ? db : Tensor(), Tensor()};
  }
};

inline std::tuple<Tensor, Tensor> composed_pair(int64_t k, const Tensor& x, const MaybeTensor& weight,
                                                const MaybeTensor& bias, double eps) {
  return {composed(k, x, weight, bias, eps), empty_stats(nfrs_norm_stats(k), x).zero_()};
}

inline std::tuple<Tensor, Tensor> forward_autograd(int64_t k, const Tensor& x, const MaybeTensor& weight,
                                                   const MaybeTensor& bias, double eps) {
  if (!has_kernel(x)) return composed_pair(k, x, weight, bias, eps);
  auto out = RowNorm::apply(k, x, weight, bias, eps);
  return {out[0], out[1]};
}

template <int64_t K>
struct Entry {
  static std::tuple<Tensor, Tensor> cpu(const Tensor& x, const MaybeTensor& w, const MaybeTensor& b, double eps) {
    return forward_kernel(K, x, w, b, eps);
  }
  static std::tuple<Tensor, Tensor> cuda(const Tensor& x, const MaybeTensor& w, const MaybeTensor& b, double eps) {
    return has_kernel(x) ? forward_kernel(K, x, w, b, eps) : composed_pair(K, x, w, b, eps);
  }
  static std::tuple<Tensor, Tensor> meta(const Tensor& x, const MaybeTensor& w, const MaybeTensor& b, double) {
    return forward_meta(K, x, w, b);
  }
  static std::tuple<Tensor, Tensor> autograd(const Tensor& x, const MaybeTensor& w, const MaybeTensor& b, double eps) {
    return forward_autograd(K, x, w, b, eps);
  }
  static std::tuple<Tensor, Tensor> fallback(const Tensor& x, const MaybeTensor& w, const MaybeTensor& b, double eps) {
    return composed_pair(K, x, w, b, eps);
  }
  static std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const MaybeTensor& w,
                                                     const MaybeTensor& b, const Tensor& stats, double eps) {
    return backward_kernel(K, dy, x, w, b, stats, eps);
  }
  static std::tuple<Tensor, Tensor, Tensor> meta_backward(const Tensor& dy, const Tensor& x, const MaybeTensor& w,
                                                          const MaybeTensor& b, const Tensor& stats, double) {
    check_backward(K, dy, x, w, b, stats);
    return backward_meta(x, w, b);
  }

  static void define(torch::Library& m) {
    if (K >= nfrs_norm_count()) return;
    const auto n = name(K);
    m.def((n + "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)").c_str(),
          {at::Tag::pt2_compliant_tag});
    m.def((n + "_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, float eps) -> "
               "(Tensor, Tensor, Tensor)").c_str(), {at::Tag::pt2_compliant_tag});
    m.impl(n.c_str(), c10::DispatchKey::CPU, TORCH_FN(cpu));
    m.impl(n.c_str(), c10::DispatchKey::CUDA, TORCH_FN(cuda));
    m.impl(n.c_str(), c10::DispatchKey::Meta, TORCH_FN(meta));
    m.impl(n.c_str(), c10::DispatchKey::Autograd, TORCH_FN(autograd));
    m.impl(n.c_str(), c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(fallback));
    m.impl(n.c_str(), c10::DispatchKey::FuncTorchBatched, TORCH_FN(fallback));
    m.impl((n + "_backward").c_str(), c10::DispatchKey::CPU, TORCH_FN(backward));
    m.impl((n + "_backward").c_str(), c10::DispatchKey::CUDA, TORCH_FN(backward));
    m.impl((n + "_backward").c_str(), c10::DispatchKey::Meta, TORCH_FN(meta_backward));
    forbid_autograd(m, n + "_backward");
  }
};

template <int64_t... K>
void define_all(torch::Library& m, std::integer_sequence<int64_t, K...>) {
  (Entry<K>::define(m), ...);
}
inline void define(torch::Library& m) {
  TORCH_CHECK(nfrs_norm_count() <= MOST, "norm.h: raise MOST to ", nfrs_norm_count());
  define_all(m, std::make_integer_sequence<int64_t, MOST>{});
}

}  // namespace nfrs::norm
