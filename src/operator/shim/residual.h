// The fused residual step, for each norm k of Rust's table and once without a norm (k = -1):
//   NAME_residual(x, f, alpha?, beta?, weight?, bias?, eps, p, seed?, site, dtype?) -> (x_plus, y, stats)
//   residual(...): the same, y empty
// x_plus = alpha*x + beta*drop(f) in x's dtype, y = N(x_plus) in `dtype` (default: f's).
#pragma once
#include "norm.h"

extern "C" {
// The tensors of one step; absent ones have null data.
struct Step {
  View x, f, alpha, beta, weight, bias, x_plus, y, stats;
  double eps;
  Draw draw;
};
struct StepGradients {
  View dx_plus, dy, dx, df, dalpha, dbeta, dweight, dbias, workspace;
};
int nfrs_residual_forward(int64_t norm, const Step* step);
int nfrs_residual_backward(int64_t norm, const Step* step, const StepGradients* gradients);
}

namespace nfrs::residual {

constexpr int64_t NONE = -1;

using Kind = std::optional<at::ScalarType>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Six = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Forward = Three(const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                      const MaybeTensor&, double, double, const MaybeTensor&, int64_t, Kind);
using Backward = Six(const MaybeTensor&, const MaybeTensor&, const Tensor&, const MaybeTensor&, const Tensor&,
                     const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const Tensor&,
                     double, double, const MaybeTensor&, int64_t);

inline std::string name(int64_t k) { return k == NONE ? "residual" : norm::name(k) + "_residual"; }

inline Name title(int64_t k, bool backward = false) {
  if (k == NONE) return {"residual", backward ? "_backward" : ""};
  return {nfrs_norm_name(k), backward ? "_residual_backward" : "_residual"};
}

constexpr Argument FORWARD[] = {
    {"x", "*d", Type::FLOATING, LEADER},
    {"f", "*d", Type::WIDTH},
    {"alpha", "1|d", Type::FLOATING, OPTIONAL},
    {"beta", "1|d", Type::FLOATING, OPTIONAL},
    {"weight", "1|d", Type::FLOATING, OPTIONAL},
    {"bias", "1|d", Type::FLOATING, OPTIONAL},
    SEED,
};
// s: numbers kept per row.
constexpr Argument BACKWARD[] = {
    {"dx_plus", "*d", Type::SAME, OPTIONAL},
    {"dy", "*d", Type::WIDTH, OPTIONAL},
    {"x_plus", "*d", Type::FLOATING, LEADER},
    {"x", "*d", Type::SAME, OPTIONAL},
    {"f", "*d", Type::WIDTH},
    {"alpha", "1|d", Type::FLOATING, OPTIONAL},
    {"beta", "1|d", Type::FLOATING, OPTIONAL},
    {"weight", "1|d", Type::FLOATING, OPTIONAL},
    {"bias", "1|d", Type::FLOATING, OPTIONAL},
    {"stats", "*s", Type::COMPUTED},
    SEED,
};

// Numbers kept per row.
inline int64_t stats_of(int64_t k) { return k == NONE ? 0 : nfrs_norm_stats(k); }

inline void check_forward(int64_t k, const Tensor& x, const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta,
                          const MaybeTensor& weight, const MaybeTensor& bias, double p, const MaybeTensor& seed, Kind dtype) {
  check(title(k), FORWARD,
        {&x, &f, pointer(alpha), pointer(beta), pointer(weight), pointer(bias), pointer(seed)});
  check_dropout(title(k), p, pointer(seed));
  const auto type = dtype.value_or(f.scalar_type());
  TORCH_CHECK_TYPE(arguments::is_of(Type::WIDTH, type, x.scalar_type()), title(k), ": dtype must be ",
                   arguments::describe(Type::WIDTH, "x", x.scalar_type()), "; got ", type);
}
inline void check_backward(int64_t k, const MaybeTensor& dx_plus, const MaybeTensor& dy, const Tensor& x_plus,
                           const MaybeTensor& x, const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta,
                           const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& stats, double p,
                           const MaybeTensor& seed) {
  check(title(k, true), BACKWARD,
        {pointer(dx_plus), pointer(dy), &x_plus, pointer(x), &f, pointer(alpha), pointer(beta), pointer(weight),
         pointer(bias), &stats, pointer(seed)},
        {{'s', stats_of(k)}});
  TORCH_CHECK_VALUE(k != NONE || !pointer(dy), "residual_backward: without a norm there is no y, and dy must be absent");
  check_dropout(title(k, true), p, pointer(seed));
}

inline Three forward_meta(int64_t k, const Tensor& x, const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta,
                          const MaybeTensor& weight, const MaybeTensor& bias, double p, const MaybeTensor& seed, Kind dtype) {
  check_forward(k, x, f, alpha, beta, weight, bias, p, seed, dtype);
  auto x_plus = at::empty_like(x, at::MemoryFormat::Contiguous);
  const auto type = dtype.value_or(f.scalar_type());
  const auto y = k == NONE ? at::empty({0}, x.options().dtype(type))
                           : at::empty_like(x, x.options().dtype(type), at::MemoryFormat::Contiguous);
  return {x_plus, y, norm::empty_stats(stats_of(k), x)};
}

inline Three forward_kernel(int64_t k, const Tensor& x_, const Tensor& f_, const MaybeTensor& alpha_,
                            const MaybeTensor& beta_, const MaybeTensor& weight_, const MaybeTensor& bias_, double eps,
                            double p, const MaybeTensor& seed_, int64_t site, Kind dtype) {
  auto [x_plus, y, stats] = forward_meta(k, x_, f_, alpha_, beta_, weight_, bias_, p, seed_, dtype);
  const auto type = acc_type(x_);
  const Tensor x = x_.contiguous(), f = f_.contiguous(), alpha = parameter(alpha_, type), beta = parameter(beta_, type);
  const auto own = parameter_type(x_, weight_, bias_);
  const Tensor weight = parameter(weight_, own), bias = parameter(bias_, own);
  const Tensor seed = seed_beside(p, x, seed_);
  const Step step{view(x), view(f), view(alpha), view(beta), view(weight), view(bias), view(x_plus), view(y), view(stats),
                  eps, draw_beside(p, x, seed, site)};
  check_rust(nfrs_residual_forward(k, &step));
  return {x_plus, y, stats};
}

// Where dx and df are the same numbers, df is left empty and autograd hands dx to both: a pass over memory less.
inline bool same_gradients(const Tensor& x_plus, const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta,
                           double p) {
  return p == 0 && !pointer(alpha) && !pointer(beta) && x_plus.scalar_type() == f.scalar_type();
}

// x is given where alpha wants a gradient.
inline Six backward_meta(int64_t k, const MaybeTensor& dx_plus, const MaybeTensor& dy, const Tensor& x_plus,
                         const MaybeTensor& x, const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta,
                         const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& stats, double p,
                         const MaybeTensor& seed) {
  check_backward(k, dx_plus, dy, x_plus, x, f, alpha, beta, weight, bias, stats, p, seed);
  auto like = [&](const MaybeTensor& t) {
    return t && t->defined() ? at::empty_like(*t, at::MemoryFormat::Contiguous) : at::empty({0}, x_plus.options());
  };
  const bool same = same_gradients(x_plus, f, alpha, beta, p);
  return {at::empty_like(x_plus, at::MemoryFormat::Contiguous),
          same ? at::empty({0}, f.options()) : at::empty_like(f, at::MemoryFormat::Contiguous),
          like(x ? alpha : std::nullopt), like(beta), like(weight), like(bias)};
}

inline Six backward_kernel(int64_t k, const MaybeTensor& dx_plus_, const MaybeTensor& dy_, const Tensor& x_plus_,
                           const MaybeTensor& x_, const Tensor& f_, const MaybeTensor& alpha_, const MaybeTensor& beta_,
                           const MaybeTensor& weight_, const MaybeTensor& bias_, const Tensor& stats_, double eps,
                           double p, const MaybeTensor& seed_, int64_t site) {
  check_backward(k, dx_plus_, dy_, x_plus_, x_, f_, alpha_, beta_, weight_, bias_, stats_, p, seed_);
  const auto type = acc_type(x_plus_);
  auto dense = [](const MaybeTensor& t) { return t && t->defined() ? t->contiguous() : Tensor(); };
  const Tensor x_plus = x_plus_.contiguous(), x = dense(x_), f = f_.contiguous(), stats = stats_.contiguous();
  const Tensor dx_plus = dense(dx_plus_), dy = dense(dy_);
  const Tensor alpha = parameter(alpha_, type), beta = parameter(beta_, type);
  const auto own = parameter_type(x_plus_, weight_, bias_);
  const Tensor weight = parameter(weight_, own), bias = parameter(bias_, own);
  const bool same = same_gradients(x_plus, f, alpha_, beta_, p);
  Tensor dx = at::empty_like(x_plus), df = same ? at::empty({0}, f.options()) : at::empty_like(f);
  auto sum_like = [&](const Tensor& p, bool wanted) { return wanted && p.defined() ? at::empty_like(p) : Tensor(); };
  const Tensor dalpha = sum_like(alpha, x.defined()), dbeta = sum_like(beta, true);
  const Tensor dweight = sum_like(weight, true), dbias = sum_like(bias, true);
  const Tensor seed = seed_beside(p, x_plus, seed_);
  const Step step{view(x), view(f), view(alpha), view(beta), view(weight), view(bias), view(x_plus), View{}, view(stats),
                  eps, draw_beside(p, x_plus, seed, site)};
  const Tensor partial = partial_sums(x_plus, step.x_plus.rows,
                                      length(dalpha) + length(dbeta) + length(dweight) + length(dbias));
  const StepGradients gradients{view(dx_plus), view(dy), view(dx), view(same ? Tensor() : df), view(dalpha), view(dbeta),
                                view(dweight), view(dbias), view(partial)};
  check_rust(nfrs_residual_backward(k, &step, &gradients));
  auto out = [&](const Tensor& d, const MaybeTensor& p) {
    return d.defined() ? d.to(p->scalar_type()) : at::empty({0}, x_plus.options());
  };
  return {dx, df, out(dalpha, alpha_), out(dbeta, beta_), out(dweight, weight_), out(dbias, bias_)};
}

inline Three composed(int64_t k, const Tensor& x, const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta,
                      const MaybeTensor& weight, const MaybeTensor& bias, double eps, double p, const MaybeTensor& seed,
                      int64_t site, Kind dtype) {
  check_forward(k, x, f, alpha, beta, weight, bias, p, seed, dtype);
  const auto type = acc_type(x);
  auto branch = f.to(type);
  if (p > 0) {
    const Draw d = draw(p, seed, site);
    const int64_t cols = x.size(-1), rows = cols ? x.numel() / cols : 0;
    branch = branch * take(nfrs_dropout_scale(&d, rows, cols)).to(x.device(), type).reshape(x.sizes());
  }
  if (pointer(beta)) branch = branch * beta->to(type);
  auto stream = x.to(type);
  if (pointer(alpha)) stream = stream * alpha->to(type);
  const auto x_plus = (stream + branch).to(x.scalar_type());
  const auto out = dtype.value_or(f.scalar_type());
  const auto y = k == NONE ? at::empty({0}, x.options().dtype(out))
                           : norm::composed(k, x_plus.to(type), weight, bias, eps).to(out);
  return {x_plus, y, norm::empty_stats(stats_of(k), x).zero_()};
}

template <class Signature>
const c10::TypedOperatorHandle<Signature>& op(int64_t k, const char* suffix) {
  static const auto handles = [&] {
    std::vector<c10::TypedOperatorHandle<Signature>> all;
    for (int64_t i = NONE; i < nfrs_norm_count(); ++i) all.push_back(operator_handle<Signature>(name(i) + suffix));
    return all;
  }();
  return handles[k - NONE];
}

struct ResidualStep : torch::autograd::Function<ResidualStep> {
  static variable_list forward(AutogradContext* ctx, int64_t k, const Tensor& x, const Tensor& f,
                               const MaybeTensor& alpha, const MaybeTensor& beta, const MaybeTensor& weight,
                               const MaybeTensor& bias, double eps, double p, const MaybeTensor& seed, int64_t site,
                               Kind dtype) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [x_plus, y, stats] = op<Forward>(k, "").call(x, f, alpha, beta, weight, bias, eps, p, seed, site, dtype);
    // Everything the composed formula needs for a second derivative. The common case (no alpha, no beta) keeps x and f
    // alive no longer than the graph does anyway: f is a linear layer's output, x the step before's.
    ctx->save_for_backward({x, f, value(alpha), value(beta), value(weight), value(bias), x_plus, stats, value(seed)});
    ctx->saved_data["norm"] = k;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["p"] = p;
    ctx->saved_data["site"] = site;
    ctx->saved_data["dtype"] = static_cast<int64_t>(y.scalar_type());
    variable_list fixed{stats};
    if (k == NONE) fixed.push_back(y);
    ctx->mark_non_differentiable(fixed);
    ctx->set_materialize_grads(false);
    return {x_plus, y, stats};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(12);
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const int64_t k = ctx->saved_data["norm"].toInt(), site = ctx->saved_data["site"].toInt();
    const double eps = ctx->saved_data["eps"].toDouble(), p = ctx->saved_data["p"].toDouble();
    const MaybeTensor seed = maybe(saved[8]);
    variable_list d;
    if (at::GradMode::is_enabled()) {
      const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
      d = higher_order({saved.begin(), saved.begin() + 6}, {grads[0], grads[1]}, [&](const variable_list& in) {
        auto [x_plus, y, stats] = composed(k, in[0], in[1], maybe(in[2]), maybe(in[3]), maybe(in[4]), maybe(in[5]), eps,
                                           p, seed, site, dtype);
        return variable_list{x_plus, y};
      });
    } else {
      const bool alpha_wanted = saved[2].defined() && ctx->needs_input_grad(2);
      auto [dx, df, dalpha, dbeta, dweight, dbias] = op<Backward>(k, "_backward").call(
          maybe(grads[0]), maybe(grads[1]), saved[6], alpha_wanted ? MaybeTensor(saved[0]) : std::nullopt, saved[1],
          maybe(saved[2]), maybe(saved[3]), maybe(saved[4]), maybe(saved[5]), saved[7], eps, p, seed, site);
      if (same_gradients(saved[6], saved[1], maybe(saved[2]), maybe(saved[3]), p)) df = dx;
      d = {dx, df, alpha_wanted ? dalpha : Tensor(), saved[3].defined() ? dbeta : Tensor(),
           saved[4].defined() ? dweight : Tensor(), saved[5].defined() ? dbias : Tensor()};
    }
    for (size_t i = 0; i < d.size(); ++i) result[i + 1] = d[i];
    return result;
  }
};

template <int64_t K>
struct Entry {
  static Three cpu(const Tensor& x, const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta,
                   const MaybeTensor& weight, const MaybeTensor& bias, double eps, double p, const MaybeTensor& seed,
                   int64_t site, Kind dtype) {
    return forward_kernel(K, x, f, alpha, beta, weight, bias, eps, p, seed, site, dtype);
  }
  static Three cuda(const Tensor& x, const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta,
                    const MaybeTensor& weight, const MaybeTensor& bias, double eps, double p, const MaybeTensor& seed,
                    int64_t site, Kind dtype) {
    return (has_kernel(x) ? forward_kernel : composed)(K, x, f, alpha, beta, weight, bias, eps, p, seed, site, dtype);
  }
  static Three meta(const Tensor& x, const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta,
                    const MaybeTensor& weight, const MaybeTensor& bias, double, double p, const MaybeTensor& seed,
                    int64_t, Kind dtype) {
    return forward_meta(K, x, f, alpha, beta, weight, bias, p, seed, dtype);
  }
  static Three fallback(const Tensor& x, const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta,
                        const MaybeTensor& weight, const MaybeTensor& bias, double eps, double p,
                        const MaybeTensor& seed, int64_t site, Kind dtype) {
    return composed(K, x, f, alpha, beta, weight, bias, eps, p, seed, site, dtype);
  }
  static Three autograd(const Tensor& x, const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta,
                        const MaybeTensor& weight, const MaybeTensor& bias, double eps, double p,
                        const MaybeTensor& seed, int64_t site, Kind dtype) {
    if (!has_kernel(x)) return composed(K, x, f, alpha, beta, weight, bias, eps, p, seed, site, dtype);
    auto out = ResidualStep::apply(K, x, f, alpha, beta, weight, bias, eps, p, seed, site, dtype);
    return {out[0], out[1], out[2]};
  }
  static Six backward(const MaybeTensor& dx_plus, const MaybeTensor& dy, const Tensor& x_plus, const MaybeTensor& x,
                      const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta, const MaybeTensor& weight,
                      const MaybeTensor& bias, const Tensor& stats, double eps, double p, const MaybeTensor& seed,
                      int64_t site) {
    return backward_kernel(K, dx_plus, dy, x_plus, x, f, alpha, beta, weight, bias, stats, eps, p, seed, site);
  }
  static Six meta_backward(const MaybeTensor& dx_plus, const MaybeTensor& dy, const Tensor& x_plus,
                           const MaybeTensor& x, const Tensor& f, const MaybeTensor& alpha, const MaybeTensor& beta,
                           const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& stats, double, double p,
                           const MaybeTensor& seed, int64_t) {
    return backward_meta(K, dx_plus, dy, x_plus, x, f, alpha, beta, weight, bias, stats, p, seed);
  }

  static void define(torch::Library& m) {
    if (K >= nfrs_norm_count()) return;
    const auto n = name(K);
    m.def((n + "(Tensor x, Tensor f, Tensor? alpha, Tensor? beta, Tensor? weight, Tensor? bias, float eps, float p, "
               "Tensor? seed, int site, ScalarType? dtype=None) -> (Tensor, Tensor, Tensor)").c_str(),
          {at::Tag::pt2_compliant_tag});
    m.def((n + "_backward(Tensor? dx_plus, Tensor? dy, Tensor x_plus, Tensor? x, Tensor f, Tensor? alpha, Tensor? beta, "
               "Tensor? weight, Tensor? bias, Tensor stats, float eps, float p, Tensor? seed, int site) -> "
               "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)").c_str(), {at::Tag::pt2_compliant_tag});
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
  Entry<NONE>::define(m);
  (Entry<K>::define(m), ...);
}
inline void define(torch::Library& m) { define_all(m, std::make_integer_sequence<int64_t, norm::MOST>{}); }

}  // namespace nfrs::residual
