// Operators that are compositions of others, which PyTorch differentiates, batches and traces by itself:
//   lp_norm(x, weight?, p, eps) -> y      g·x/max(‖x‖_p, ε) over the last dimension
//   group_scaling(x, groups) -> y         x/√(mean over each group of x² + 1e-5)
//   composed_norm(x, parameters, options, name) -> y    the norm of Rust's table that has this name and no kernels
#pragma once
#include "norm.h"

extern "C" {
Tensor* nfrs_lp_norm_composed(const Tensor* x, const Tensor* weight, double p, double eps);
int nfrs_lp_norm_forward(const View* x, const View* weight, double p, double eps, const View* y, const View* stats);
int nfrs_lp_norm_backward(const View* dy, const View* x, const View* weight, const View* stats, double p, double eps,
                          const View* dx, const View* dweight, const View* workspace);
Tensor* nfrs_group_scaling(const Tensor* x, int64_t groups);
Tensor* nfrs_composed_norm(const char* name, const Tensor* x, const Tensor* const* parameters, int64_t count,
                           const double* options, int64_t option_count);
}

namespace nfrs::composite {

constexpr Argument X[] = {{"x", "*d", Type::FLOATING, LEADER}};
constexpr Argument LP[] = {{"x", "*d", Type::FLOATING, LEADER}, {"weight", "1|d", Type::FLOATING, OPTIONAL}};
constexpr Argument PARAMETER[] = {{"x", "*d", Type::FLOATING, LEADER}, {"a parameter", "1|d", Type::FLOATING, OPTIONAL}};
constexpr Argument LP_BACKWARD[] = {
    {"dy", "*d", Type::SAME},
    {"x", "*d", Type::FLOATING, LEADER},
    {"weight", "1|d", Type::FLOATING, OPTIONAL},
    {"stats", "*1", Type::FLOAT32},
};

inline void check_order(double p) { TORCH_CHECK_VALUE(p >= 1, "lp_norm: p must be at least 1, or inf, got ", p); }

// lp_norm where a GPU has kernels for it, as two operators below autograd:
//   lp_norm_forward(x, weight?, p, eps) -> (y, stats),  lp_norm_backward(dy, x, weight?, stats, p, eps) -> (dx, dweight)
using LpForward = std::tuple<Tensor, Tensor>(const Tensor&, const MaybeTensor&, double, double);
using LpBackward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const MaybeTensor&, const Tensor&, double,
                                              double);

inline std::tuple<Tensor, Tensor> lp_forward_meta(const Tensor& x, const MaybeTensor& weight, double p, double) {
  check({"lp_norm_forward"}, LP, {&x, pointer(weight)});
  check_order(p);
  auto sizes = x.sym_sizes().vec();
  sizes.back() = 1;
  return {at::empty_like(x, at::MemoryFormat::Contiguous), at::empty_symint(sizes, x.options().dtype(at::kFloat))};
}
inline std::tuple<Tensor, Tensor> lp_forward(const Tensor& x_, const MaybeTensor& weight, double p, double eps) {
  const auto [y, stats] = lp_forward_meta(x_, weight, p, eps);
  const Tensor x = x_.contiguous(), w = parameter(weight, at::kFloat);
  const View vx = view(x), vw = view(w), vy = view(y), vs = view(stats);
  check_rust(nfrs_lp_norm_forward(&vx, &vw, p, eps, &vy, &vs));
  return {y, stats};
}
inline std::tuple<Tensor, Tensor> lp_backward_meta(const Tensor& dy, const Tensor& x, const MaybeTensor& weight,
                                                   const Tensor& stats, double p, double) {
  check({"lp_norm_backward"}, LP_BACKWARD, {&dy, &x, pointer(weight), &stats});
  check_order(p);
  auto [dx, dw, db] = norm::backward_meta(x, weight, std::nullopt);
  return {dx, dw};
}
inline std::tuple<Tensor, Tensor> lp_backward(const Tensor& dy_, const Tensor& x_, const MaybeTensor& weight,
                                              const Tensor& stats_, double p, double eps) {
  check({"lp_norm_backward"}, LP_BACKWARD, {&dy_, &x_, pointer(weight), &stats_});
  check_order(p);
  const Tensor x = x_.contiguous(), dy = dy_.contiguous(), stats = stats_.contiguous();
  const Tensor w = parameter(weight, at::kFloat);
  const Tensor dx = at::empty_like(x), dw = w.defined() ? at::empty_like(w) : at::empty({0}, x.options());
  const View vdy = view(dy), vx = view(x), vw = view(w), vs = view(stats), vdx = view(dx);
  const View vdw = view(w.defined() ? dw : Tensor());
  const Tensor partial = partial_sums(x, vx.rows, vdw.rows * vdw.cols);
  const View vp = view(partial);
  check_rust(nfrs_lp_norm_backward(&vdy, &vx, &vw, &vs, p, eps, &vdx, &vdw, &vp));
  return {dx, w.defined() ? dw.to(weight->scalar_type()) : dw};
}

inline Tensor lp_composed(const Tensor& x, const MaybeTensor& weight, double p, double eps) {
  return take(nfrs_lp_norm_composed(&x, pointer(weight), p, eps));
}

struct LpNorm : torch::autograd::Function<LpNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const MaybeTensor& weight, double p, double eps) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = operator_handle<LpForward>("lp_norm_forward");
    const auto [y, stats] = op.call(x, weight, p, eps);
    ctx->save_for_backward({x, value(weight), stats});
    ctx->saved_data["p"] = p;
    ctx->saved_data["eps"] = eps;
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const double p = ctx->saved_data["p"].toDouble(), eps = ctx->saved_data["eps"].toDouble();
    if (at::GradMode::is_enabled()) {
      auto d = higher_order({saved[0], saved[1]}, {grads[0]}, [&](const variable_list& in) {
        return variable_list{lp_composed(in[0], maybe(in[1]), p, eps)};
      });
      return {d[0], d[1], Tensor(), Tensor()};
    }
    static const auto op = operator_handle<LpBackward>("lp_norm_backward");
    const auto [dx, dw] = op.call(grads[0], saved[0], maybe(saved[1]), saved[2], p, eps);
    return {dx, saved[1].defined() ? dw : Tensor(), Tensor(), Tensor()};
  }
};

inline Tensor lp_composed_checked(const Tensor& x, const MaybeTensor& weight, double p, double eps) {
  check({"lp_norm"}, LP, {&x, pointer(weight)});
  check_order(p);
  return x.sym_size(-1) == 0 ? x.clone() : lp_composed(x, weight, p, eps);
}

inline Tensor lp_norm(const Tensor& x, const MaybeTensor& weight, double p, double eps) {
  const bool is_launched = p != 2 && kernel_device(x) >= 0 && has_kernel(x) && x.dim() > 0 && x.sym_size(-1) != 0;
  return is_launched ? LpNorm::apply(x, weight, p, eps) : lp_composed_checked(x, weight, p, eps);
}

inline Tensor group_scaling(const Tensor& x, int64_t groups) {
  check({"group_scaling"}, X, {&x});
  TORCH_CHECK_VALUE(groups >= 1, "group_scaling: groups must be at least 1, got ", groups);
  TORCH_CHECK_VALUE(x.sym_size(-1) % groups == 0, "group_scaling: groups must divide the width of x, got ", groups,
                    " groups and width ", x.sym_size(-1));
  if (x.sym_size(-1) == 0) return x.clone();
  return take(nfrs_group_scaling(&x, groups));
}

inline Tensor composed_norm(const Tensor& x, const c10::List<MaybeTensor>& parameters, at::ArrayRef<double> options,
                            c10::string_view name) {
  const std::string op(name);
  check({op.c_str()}, X, {&x});
  std::vector<MaybeTensor> given;
  for (const MaybeTensor& parameter : parameters) given.push_back(parameter);
  std::vector<const Tensor*> pointers;
  for (const auto& parameter : given) {
    check({op.c_str()}, PARAMETER, {&x, pointer(parameter)});
    pointers.push_back(pointer(parameter));
  }
  if (x.sym_size(-1) == 0) return x.clone();
  return take(nfrs_composed_norm(op.c_str(), &x, pointers.data(), pointers.size(), options.data(), options.size()));
}

inline void define(torch::Library& m) {
  m.def("lp_norm(Tensor x, Tensor? weight, float p, float eps) -> Tensor", {at::Tag::pt2_compliant_tag});
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("lp_norm_forward(Tensor x, Tensor? weight, float p, float eps) -> (Tensor, Tensor)", tags);
  m.def("lp_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor stats, float p, float eps) -> (Tensor, Tensor)",
        tags);
  for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {  // the CPU's stand in for a GPU's in tests
    m.impl("lp_norm_forward", key, TORCH_FN(lp_forward));
    m.impl("lp_norm_backward", key, TORCH_FN(lp_backward));
  }
  m.impl("lp_norm_forward", c10::DispatchKey::Meta, TORCH_FN(lp_forward_meta));
  m.impl("lp_norm_backward", c10::DispatchKey::Meta, TORCH_FN(lp_backward_meta));
  forbid_autograd(m, "lp_norm_forward");
  forbid_autograd(m, "lp_norm_backward");
  m.def("group_scaling(Tensor x, int groups=1) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("composed_norm(Tensor x, Tensor?[] parameters, float[] options, str name) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.impl("composed_norm", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(composed_norm));
  m.impl("lp_norm", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(lp_norm));
  m.impl("group_scaling", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(group_scaling));
  // Under vmap torch batches the compositions' own operations; without these lines torch 2.15 calls example by example.
  m.impl("composed_norm", c10::DispatchKey::FuncTorchBatched, TORCH_FN(composed_norm));
  m.impl("lp_norm", c10::DispatchKey::FuncTorchBatched, TORCH_FN(lp_composed_checked));
  m.impl("group_scaling", c10::DispatchKey::FuncTorchBatched, TORCH_FN(group_scaling));
}

}  // namespace nfrs::composite
