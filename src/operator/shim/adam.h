// adam_(parameters!, first!, second!, gradients!, grad_scale, step_size, keep, beta1, beta2, eps): one update of flat f32
// buffers, which zeroes the gradients. The last three tensors hold one number each, on the buffers' device.
#pragma once
#include "common.h"

#include <array>

extern "C" {
int nfrs_adam_kernel(const View* views, double beta1, double beta2, double eps);
int nfrs_adam_composed(const Tensor* const* tensors, double beta1, double beta2, double eps);
}

namespace nfrs::adam {

using Update = void(Tensor&, Tensor&, Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&, double, double,
                    double);

// n: numbers of a buffer.
constexpr Argument TABLE[] = {
    {"parameters", "=n", Type::FLOAT32, LEADER | WRITTEN},
    {"first", "=n", Type::FLOAT32, WRITTEN},
    {"second", "=n", Type::FLOAT32, WRITTEN},
    {"gradients", "=n", Type::FLOAT32, WRITTEN},
    {"grad_scale", "=1", Type::FLOAT32},
    {"step_size", "=1", Type::FLOAT32},
    {"keep", "=1", Type::FLOAT32},
};

inline void update(Tensor& parameters, Tensor& first, Tensor& second, Tensor& gradients, const Tensor& grad_scale,
                   const Tensor& step_size, const Tensor& keep, double beta1, double beta2, double eps) {
  const Tensor* const all[] = {&parameters, &first, &second, &gradients, &grad_scale, &step_size, &keep};
  check({"adam_"}, TABLE, all, {{'n', parameters.sym_numel()}});
  if (kernel_device(parameters) < 0 || !has_kernel(parameters)) {
    check_rust(nfrs_adam_composed(all, beta1, beta2, eps));
    return;
  }
  std::array<View, 7> views;
  for (size_t i = 0; i < views.size(); ++i) views[i] = view(*all[i]);
  check_rust(nfrs_adam_kernel(views.data(), beta1, beta2, eps));
  for (size_t i = 0; i < 4; ++i) written(*all[i]);
}

inline void define(torch::Library& m) {
  m.def("adam_(Tensor(a!) parameters, Tensor(b!) first, Tensor(c!) second, Tensor(d!) gradients, Tensor grad_scale, "
        "Tensor step_size, Tensor keep, float beta1, float beta2, float eps) -> ()");
  m.impl("adam_", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(update));
  forbid_autograd(m, "adam_");
}

}  // namespace nfrs::adam
