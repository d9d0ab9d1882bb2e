// Operators that are compositions of others, which PyTorch differentiates, batches and traces by itself:
//   lp_norm(x, weight?, p, eps) -> y      g·x/max(‖x‖_p, ε) over the last dimension
//   group_scaling(x, groups) -> y         x/√(mean over each group of x² + 1e-5)
//   norm_formula(x, weight?, bias?, eps, name) -> y    the norm of Rust's table that has this name and is a formula
#pragma once
#include "norm.h"

extern "C" {
Tensor* nfrs_lp_norm(const Tensor* x, const Tensor* weight, double p, double eps);
Tensor* nfrs_group_scaling(const Tensor* x, int64_t groups);
Tensor* nfrs_norm_formula(const char* name, const Tensor* x, const Tensor* weight, const Tensor* bias, double eps);
}

namespace nfrs::composite {

inline void check(const char* op, const Tensor& x) {
  check_floating(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": x must have at least one dimension, got a scalar");
}

inline Tensor lp_norm(const Tensor& x, const MaybeTensor& weight, double p, double eps) {
  check("lp_norm", x);
  TORCH_CHECK_VALUE(p >= 1, "lp_norm: p must be at least 1, or inf, got ", p);
  norm::check_parameter("lp_norm", "weight", x, weight);
  if (x.sym_size(-1) == 0) return x.clone();
  return take(nfrs_lp_norm(&x, pointer(weight), p, eps));
}

inline Tensor group_scaling(const Tensor& x, int64_t groups) {
  check("group_scaling", x);
  TORCH_CHECK_VALUE(groups >= 1, "group_scaling: groups must be at least 1, got ", groups);
  TORCH_CHECK_VALUE(x.sym_size(-1) % groups == 0, "group_scaling: groups must divide the width of x, got ", groups,
                    " groups and width ", x.sym_size(-1));
  if (x.sym_size(-1) == 0) return x.clone();
  return take(nfrs_group_scaling(&x, groups));
}

inline Tensor norm_formula(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                           c10::string_view name) {
  const std::string op(name);
  check(op.c_str(), x);
  norm::check_parameter(op.c_str(), "weight", x, weight);
  norm::check_parameter(op.c_str(), "bias", x, bias);
  if (x.sym_size(-1) == 0) return x.clone();
  return take(nfrs_norm_formula(op.c_str(), &x, pointer(weight), pointer(bias), eps));
}

inline void define(torch::Library& m) {
  m.def("lp_norm(Tensor x, Tensor? weight, float p, float eps) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("group_scaling(Tensor x, int groups=1) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("norm_formula(Tensor x, Tensor? weight, Tensor? bias, float eps, str name) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.impl("norm_formula", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(norm_formula));
  m.impl("lp_norm", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(lp_norm));
  m.impl("group_scaling", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(group_scaling));
}

}  // namespace nfrs::composite
