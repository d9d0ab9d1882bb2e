// ReLU + dropout, attention over short rows, and label-smoothed cross-entropy.
#pragma once
#include "common.h"

extern "C" {
int nfrs_relu_dropout_forward(const View* x, const Draw* draw, const View* y);
int nfrs_relu_dropout_backward(const View* dy, const View* y, const Draw* draw, const View* dx);

// ranges: (n, 4) rows of (q_start, q_len, k_start, k_len).
struct Attention {
  View q, k, v, ranges, out, lse;
  int64_t heads;
  int32_t causal;
  double scale;
  Draw draw;
};
struct AttentionGradients {
  View dout, dq, dk, dv;
};
int nfrs_attention_forward(const Attention* a);
int nfrs_attention_backward(const Attention* a, const AttentionGradients* g);
Tensor* nfrs_attention_composed(const Tensor* q, const Tensor* k, const Tensor* v, const Tensor* ranges, int64_t heads,
                                int32_t causal, double scale, const Draw* draw);

// mask: one byte per column, 1 inside the target vocabulary; loss, nll, lse: one number per row.
struct CrossEntropy {
  View logits, target, mask, loss, nll, lse;
  double nll_weight, uniform_weight;
  int64_t ignore_index;
};
int nfrs_cross_entropy_forward(const CrossEntropy* c);
int nfrs_cross_entropy_backward(const CrossEntropy* c, const View* dloss, const View* dlogits);
int nfrs_cross_entropy_in_place(const CrossEntropy* c, const View* scale);
Tensor* nfrs_cross_entropy_composed(const Tensor* logits, const Tensor* target, const Tensor* mask, double nll_weight,
                                    double uniform_weight, int64_t ignore_index, Tensor** nll);
}

namespace nfrs::fused {

using std::tuple;

// ---- relu_dropout(x, p, seed?, site) -> y = drop(max(x, 0)) ----

using ReluForward = Tensor(const Tensor&, double, const MaybeTensor&, int64_t);
using ReluBackward = Tensor(const Tensor&, const Tensor&, double);

constexpr Argument RELU[] = {{"x", "*", Type::FLOATING, LEADER}, SEED};
constexpr Argument RELU_BACKWARD[] = {{"dy", "*", Type::SAME}, {"y", "*", Type::FLOATING, LEADER}};

inline void relu_check(const Tensor& x, double p, const MaybeTensor& seed) {
  check({"relu_dropout"}, RELU, {&x, pointer(seed)});
  check_dropout({"relu_dropout"}, p, pointer(seed));
}
inline Tensor relu_meta(const Tensor& x, double p, const MaybeTensor& seed, int64_t) {
  relu_check(x, p, seed);
  return at::empty_like(x, at::MemoryFormat::Contiguous);
}
inline Tensor relu_kernel(const Tensor& x_, double p, const MaybeTensor& seed_, int64_t site) {
  auto y = relu_meta(x_, p, seed_, site);
  const Tensor x = x_.contiguous(), seed = seed_beside(p, x, seed_);
  const Draw d = draw_beside(p, x, seed, site);
  const View vx = view(x), vy = view(y);
  check_rust(nfrs_relu_dropout_forward(&vx, &d, &vy));
  return y;
}
inline Tensor relu_composed(const Tensor& x, double p, const MaybeTensor& seed, int64_t site) {
  relu_check(x, p, seed);
  auto y = x.relu();
  if (p == 0) return y;
  const Draw d = draw(p, seed, site);
  const int64_t cols = x.dim() ? x.size(-1) : 1, rows = cols ? x.numel() / cols : 0;
  return y * take(nfrs_dropout_scale(&d, rows, cols)).to(x.device(), x.scalar_type()).reshape(x.sizes());
}
inline Tensor relu_cuda(const Tensor& x, double p, const MaybeTensor& seed, int64_t site) {
  return (has_kernel(x) ? relu_kernel : relu_composed)(x, p, seed, site);
}
inline Tensor relu_backward_meta(const Tensor& dy, const Tensor& y, double p) {
  check({"relu_dropout_backward"}, RELU_BACKWARD, {&dy, &y});
  check_rate({"relu_dropout_backward"}, p);
  return at::empty_like(y, at::MemoryFormat::Contiguous);
}
inline Tensor relu_backward_kernel(const Tensor& dy_, const Tensor& y_, double p) {
  Tensor dx = relu_backward_meta(dy_, y_, p);
  const Tensor dy = dy_.contiguous(), y = y_.contiguous();
  const Draw d{p, 0, 0, 0, 0};
  const View vdy = view(dy), vy = view(y), vdx = view(dx);
  check_rust(nfrs_relu_dropout_backward(&vdy, &vy, &d, &vdx));
  return dx;
}
struct ReluDropout : torch::autograd::Function<ReluDropout> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, double p, const MaybeTensor& seed, int64_t site) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = operator_handle<ReluForward>("relu_dropout");
    auto y = op.call(x, p, seed, site);
    ctx->save_for_backward({y});
    ctx->saved_data["p"] = p;
    return {y};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto y = ctx->get_saved_variables()[0];
    const double p = ctx->saved_data["p"].toDouble();
    static const auto op = operator_handle<ReluBackward>("relu_dropout_backward");
    // The derivative is piecewise constant in x: where y is not zero it is the kept scale, read off by the kernel.
    if (at::GradMode::is_enabled())
      return {grads[0] * op.call(at::ones_like(y), y.detach(), p), Tensor(), Tensor(), Tensor()};
    return {op.call(grads[0], y, p), Tensor(), Tensor(), Tensor()};
  }
};
inline Tensor relu_autograd(const Tensor& x, double p, const MaybeTensor& seed, int64_t site) {
  if (!has_kernel(x)) return relu_composed(x, p, seed, site);
  return ReluDropout::apply(x, p, seed, site)[0];
}

// ---- attention(q, k, v, ranges, heads, causal, scale, p, seed?, site) -> (out, lse) ----

using AttentionForward = tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t,
                                               bool, double, double, const MaybeTensor&, int64_t);
using AttentionBackward = tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                        const Tensor&, const Tensor&, int64_t, bool, double, double,
                                                        const MaybeTensor&, int64_t);

// n, m, w: rows of queries, rows of keys, width; h: heads.
constexpr Argument ATTENTION[] = {
    {"q", "nw", Type::FLOATING, LEADER}, {"k", "mw", Type::SAME}, {"v", "mw", Type::SAME},
    {"ranges", "r4", Type::INT64, HOST}, SEED,
};
constexpr Argument ATTENTION_BACKWARD[] = {
    {"dout", "nw", Type::SAME}, {"q", "nw", Type::FLOATING, LEADER}, {"k", "mw", Type::SAME}, {"v", "mw", Type::SAME},
    {"lse", "nh", Type::COMPUTED}, {"ranges", "r4", Type::INT64, HOST}, SEED,
};

inline void check_heads(const Tensor& q, int64_t heads) {
  TORCH_CHECK_VALUE(heads > 0 && q.sym_size(1) > 0 && q.sym_size(1) % heads == 0, "attention: the width ",
                    q.sym_size(1), " must be a multiple of the number of heads, ", heads, ", and not 0");
}
inline void attention_check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ranges, int64_t heads,
                            double p, const MaybeTensor& seed) {
  check({"attention"}, ATTENTION, {&q, &k, &v, &ranges, pointer(seed)});
  check_dropout({"attention"}, p, pointer(seed));
  check_heads(q, heads);
}
inline tuple<Tensor, Tensor> attention_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ranges,
                                            int64_t heads, bool, double, double p, const MaybeTensor& seed, int64_t) {
  attention_check(q, k, v, ranges, heads, p, seed);
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint({q.sym_size(0), heads}, q.options().dtype(acc_type(q)))};
}
inline Tensor unit_columns(const Tensor& t) { return t.stride(1) == 1 || t.size(1) <= 1 ? t : t.contiguous(); }

inline tuple<Tensor, Tensor> attention_kernel(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& ranges_,
                                           int64_t heads, bool causal, double scale, double p, const MaybeTensor& seed,
                                           int64_t site) {
  auto [out, lse] = attention_meta(q_, k_, v_, ranges_, heads, causal, scale, p, seed, site);
  const Tensor q = unit_columns(q_), k = unit_columns(k_), v = unit_columns(v_), ranges = ranges_.contiguous();
  const Attention a{view(q), view(k), view(v), view(ranges), view(out), view(lse), heads, causal, scale,
                    draw(p, seed, site)};
  check_rust(nfrs_attention_forward(&a));
  return {out, lse};
}
inline tuple<Tensor, Tensor, Tensor> attention_backward_meta(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                             const Tensor& v, const Tensor& lse, const Tensor& ranges,
                                                             int64_t heads, bool, double, double p,
                                                             const MaybeTensor& seed, int64_t) {
  check({"attention_backward"}, ATTENTION_BACKWARD, {&dout, &q, &k, &v, &lse, &ranges, pointer(seed)}, {{'h', heads}});
  check_dropout({"attention_backward"}, p, pointer(seed));
  check_heads(q, heads);
  return {at::empty_symint(q.sym_sizes(), q.options()), at::empty_symint(k.sym_sizes(), k.options()),
          at::empty_symint(v.sym_sizes(), v.options())};
}
inline tuple<Tensor, Tensor, Tensor> attention_backward_kernel(const Tensor& dout_, const Tensor& q_, const Tensor& k_,
                                                            const Tensor& v_, const Tensor& lse_, const Tensor& ranges_,
                                                            int64_t heads, bool causal, double scale, double p,
                                                            const MaybeTensor& seed, int64_t site) {
  const auto [dq, dk, dv] =
      attention_backward_meta(dout_, q_, k_, v_, lse_, ranges_, heads, causal, scale, p, seed, site);
  const Tensor q = unit_columns(q_), k = unit_columns(k_), v = unit_columns(v_), ranges = ranges_.contiguous();
  const Tensor dout = dout_.contiguous(), lse = lse_.contiguous();
  const Attention a{view(q), view(k), view(v), view(ranges), View{}, view(lse), heads, causal, scale,
                    draw(p, seed, site)};
  const AttentionGradients g{view(dout), view(dq), view(dk), view(dv)};
  check_rust(nfrs_attention_backward(&a, &g));
  return {dq, dk, dv};
}
inline Tensor attention_formula(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ranges, int64_t heads,
                                bool causal, double scale, double p, const MaybeTensor& seed, int64_t site) {
  attention_check(q, k, v, ranges, heads, p, seed);
  const Draw d = draw(p, seed, site);
  return take(nfrs_attention_composed(&q, &k, &v, &ranges, heads, causal, scale, &d));
}
inline tuple<Tensor, Tensor> attention_composed(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ranges,
                                                int64_t heads, bool causal, double scale, double p,
                                                const MaybeTensor& seed, int64_t site) {
  return {attention_formula(q, k, v, ranges, heads, causal, scale, p, seed, site),
          at::zeros({q.size(0), heads}, q.options().dtype(acc_type(q)))};
}
inline tuple<Tensor, Tensor, Tensor> attention_backward_composed(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                                 const Tensor& v, const Tensor& lse,
                                                                 const Tensor& ranges, int64_t heads, bool causal,
                                                                 double scale, double p, const MaybeTensor& seed,
                                                                 int64_t site) {
  check({"attention_backward"}, ATTENTION_BACKWARD, {&dout, &q, &k, &v, &lse, &ranges, pointer(seed)}, {{'h', heads}});
  const auto d = gradients_of({q, k, v}, dout, [&](const variable_list& in) {
    return attention_formula(in[0], in[1], in[2], ranges, heads, causal, scale, p, seed, site);
  });
  return {d[0], d[1], d[2]};
}
// No kernel for a GPU: what stands for one has none either.
inline tuple<Tensor, Tensor> attention_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ranges,
                                           int64_t heads, bool causal, double scale, double p, const MaybeTensor& seed,
                                           int64_t site) {
  return (kernel_device(q) < 0 ? attention_kernel : attention_composed)(q, k, v, ranges, heads, causal, scale, p, seed,
                                                                        site);
}
inline tuple<Tensor, Tensor, Tensor> attention_backward_cpu(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                            const Tensor& v, const Tensor& lse, const Tensor& ranges,
                                                            int64_t heads, bool causal, double scale, double p,
                                                            const MaybeTensor& seed, int64_t site) {
  return (kernel_device(q) < 0 ? attention_backward_kernel : attention_backward_composed)(
      dout, q, k, v, lse, ranges, heads, causal, scale, p, seed, site);
}
struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& ranges, int64_t heads, bool causal, double scale, double p,
                               const MaybeTensor& seed, int64_t site) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = operator_handle<AttentionForward>("attention");
    auto [out, lse] = op.call(q, k, v, ranges, heads, causal, scale, p, seed, site);
    ctx->save_for_backward({q, k, v, lse, ranges, value(seed)});
    ctx->saved_data["heads"] = heads;
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["p"] = p;
    ctx->saved_data["site"] = site;
    ctx->mark_non_differentiable({lse});
    ctx->set_materialize_grads(false);
    return {out, lse};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(10);
    if (!grads[0].defined()) return result;
    const auto s = ctx->get_saved_variables();
    const int64_t heads = ctx->saved_data["heads"].toInt(), site = ctx->saved_data["site"].toInt();
    const bool causal = ctx->saved_data["causal"].toBool();
    const double scale = ctx->saved_data["scale"].toDouble(), p = ctx->saved_data["p"].toDouble();
    if (at::GradMode::is_enabled()) {
      const auto d = higher_order({s[0], s[1], s[2]}, {grads[0]}, [&](const variable_list& in) {
        return variable_list{attention_formula(in[0], in[1], in[2], s[4], heads, causal, scale, p, maybe(s[5]), site)};
      });
      for (size_t i = 0; i < 3; ++i) result[i] = d[i];
    } else {
      static const auto op = operator_handle<AttentionBackward>("attention_backward");
      auto [dq, dk, dv] =
          op.call(grads[0], s[0], s[1], s[2], s[3], s[4], heads, causal, scale, p, maybe(s[5]), site);
      result[0] = dq, result[1] = dk, result[2] = dv;
    }
    return result;
  }
};
inline tuple<Tensor, Tensor> attention_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ranges,
                                                int64_t heads, bool causal, double scale, double p,
                                                const MaybeTensor& seed, int64_t site) {
  if (!has_kernel(q)) return attention_composed(q, k, v, ranges, heads, causal, scale, p, seed, site);
  auto out = AttentionFunction::apply(q, k, v, ranges, heads, causal, scale, p, seed, site);
  return {out[0], out[1]};
}

// x's rows, none of them twice where a gradient matters; `back` has where each went, `absent` which went nowhere.
struct Gather : torch::autograd::Function<Gather> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& rows, const Tensor& back,
                        const Tensor& absent) {
    ctx->save_for_backward({back, absent});
    return x.index_select(0, rows);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto s = ctx->get_saved_variables();
    return {grads[0].index_select(0, s[0]).masked_fill_(s[1], 0), Tensor(), Tensor(), Tensor()};
  }
};

// ---- label_smoothed_cross_entropy(logits, target, mask?, nll_weight, uniform_weight, ignore_index)
//      -> (loss, nll, lse), one number per row, loss differentiable; and, in place, the logits turned into scale * d loss / d logits ----

using EntropyForward = tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const MaybeTensor&, double, double,
                                                     int64_t);
using EntropyBackward = Tensor(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, const Tensor&, double,
                               double, int64_t);

// n, c: rows, classes. The scale is a tensor, and not a number, so that a CUDA graph can be replayed with another.
constexpr Argument ENTROPY[] = {
    {"logits", "nc", Type::FLOATING, LEADER},
    {"target", "n", Type::INT64},
    {"mask", "c", Type::BOOL, OPTIONAL},
};
constexpr Argument ENTROPY_BACKWARD[] = {
    {"dloss", "n", Type::COMPUTED},
    {"logits", "nc", Type::FLOATING, LEADER},
    {"target", "n", Type::INT64},
    {"mask", "c", Type::BOOL, OPTIONAL},
    {"lse", "n", Type::COMPUTED},
};
constexpr Argument ENTROPY_IN_PLACE[] = {
    {"logits", "nc", Type::FLOATING, LEADER | WRITTEN},
    {"target", "n", Type::INT64},
    {"mask", "c", Type::BOOL, OPTIONAL},
    {"scale", "=1", Type::FLOAT64},
};

inline void check_classes(const Tensor& logits) {
  TORCH_CHECK_VALUE(logits.sym_size(1) > 0, "label_smoothed_cross_entropy: logits must have at least one class, got ",
                    logits.sym_sizes());
}
inline void entropy_check(const Tensor& logits, const Tensor& target, const MaybeTensor& mask) {
  check({"label_smoothed_cross_entropy"}, ENTROPY, {&logits, &target, pointer(mask)});
  check_classes(logits);
}
inline void entropy_in_place_check(const Tensor& logits, const Tensor& target, const MaybeTensor& mask, const Tensor& scale) {
  check({"label_smoothed_cross_entropy_"}, ENTROPY_IN_PLACE, {&logits, &target, pointer(mask), &scale});
  check_classes(logits);
}
inline tuple<Tensor, Tensor, Tensor> entropy_meta(const Tensor& logits, const Tensor& target, const MaybeTensor& mask,
                                                  double, double, int64_t) {
  entropy_check(logits, target, mask);
  auto row = [&] { return at::empty_symint({logits.sym_size(0)}, logits.options().dtype(acc_type(logits))); };
  return {row(), row(), row()};
}
inline tuple<Tensor, Tensor, Tensor> entropy_kernel(const Tensor& logits_, const Tensor& target_, const MaybeTensor& mask_,
                                                 double nll_weight, double uniform_weight, int64_t ignore_index) {
  auto [loss, nll, lse] = entropy_meta(logits_, target_, mask_, nll_weight, uniform_weight, ignore_index);
  const Tensor logits = logits_.contiguous(), target = target_.contiguous();
  const Tensor mask = pointer(mask_) ? mask_->contiguous() : Tensor();
  const CrossEntropy c{view(logits), view(target), view(mask), view(loss), view(nll), view(lse), nll_weight,
                       uniform_weight, ignore_index};
  check_rust(nfrs_cross_entropy_forward(&c));
  return {loss, nll, lse};
}
inline Tensor entropy_backward_meta(const Tensor& dloss, const Tensor& logits, const Tensor& target,
                                    const MaybeTensor& mask, const Tensor& lse, double, double, int64_t) {
  check({"label_smoothed_cross_entropy_backward"}, ENTROPY_BACKWARD, {&dloss, &logits, &target, pointer(mask), &lse});
  check_classes(logits);
  return at::empty_like(logits, at::MemoryFormat::Contiguous);
}
inline Tensor entropy_backward_kernel(const Tensor& dloss_, const Tensor& logits_, const Tensor& target_,
                                   const MaybeTensor& mask_, const Tensor& lse_, double nll_weight,
                                   double uniform_weight, int64_t ignore_index) {
  const Tensor dlogits =
      entropy_backward_meta(dloss_, logits_, target_, mask_, lse_, nll_weight, uniform_weight, ignore_index);
  const Tensor logits = logits_.contiguous(), target = target_.contiguous(), lse = lse_.contiguous();
  const Tensor mask = pointer(mask_) ? mask_->contiguous() : Tensor(), dloss = dloss_.contiguous();
  const CrossEntropy c{view(logits), view(target), view(mask), View{}, View{}, view(lse), nll_weight, uniform_weight,
                       ignore_index};
  const View vl = view(dloss), vd = view(dlogits);
  check_rust(nfrs_cross_entropy_backward(&c, &vl, &vd));
  return dlogits;
}
inline tuple<Tensor, Tensor> entropy_in_place_kernel(Tensor& logits, const Tensor& target_, const MaybeTensor& mask_,
                                                  double nll_weight, double uniform_weight, int64_t ignore_index,
                                                  const Tensor& scale) {
  entropy_in_place_check(logits, target_, mask_, scale);
  auto [loss, nll, lse] = entropy_meta(logits, target_, mask_, nll_weight, uniform_weight, ignore_index);
  const Tensor target = target_.contiguous(), mask = pointer(mask_) ? mask_->contiguous() : Tensor();
  const CrossEntropy c{view(logits), view(target), view(mask), view(loss), view(nll), View{}, nll_weight,
                       uniform_weight, ignore_index};
  const View by = view(scale);
  check_rust(nfrs_cross_entropy_in_place(&c, &by));
  written(logits);
  return {loss, nll};
}
inline tuple<Tensor, Tensor> entropy_formula(const Tensor& logits, const Tensor& target, const MaybeTensor& mask,
                                             double nll_weight, double uniform_weight, int64_t ignore_index) {
  entropy_check(logits, target, mask);
  Tensor* nll = nullptr;
  const Tensor loss = take(nfrs_cross_entropy_composed(&logits, &target, pointer(mask), nll_weight, uniform_weight,
                                                       ignore_index, &nll));
  return {loss, take(nll).detach()};
}
inline tuple<Tensor, Tensor, Tensor> entropy_composed(const Tensor& logits, const Tensor& target,
                                                      const MaybeTensor& mask, double nll_weight,
                                                      double uniform_weight, int64_t ignore_index) {
  auto [loss, nll] = entropy_formula(logits, target, mask, nll_weight, uniform_weight, ignore_index);
  return {loss, nll, at::zeros_like(loss)};
}
inline tuple<Tensor, Tensor> entropy_in_place_composed(Tensor& logits, const Tensor& target, const MaybeTensor& mask,
                                                       double nll_weight, double uniform_weight, int64_t ignore_index,
                                                       const Tensor& scale) {
  entropy_in_place_check(logits, target, mask, scale);
  at::AutoGradMode enabled(true);
  const Tensor leaf = logits.detach().to(acc_type(logits)).requires_grad_(true);
  auto [loss, nll] = entropy_formula(leaf, target, mask, nll_weight, uniform_weight, ignore_index);
  const auto d = torch::autograd::grad({loss.sum()}, {leaf});
  at::AutoGradMode disabled(false);
  logits.copy_(d[0] * scale.reshape({}));
  return {loss.detach(), nll.detach()};
}
inline tuple<Tensor, Tensor, Tensor> entropy_cuda(const Tensor& logits, const Tensor& target, const MaybeTensor& mask,
                                                  double nll_weight, double uniform_weight, int64_t ignore_index) {
  return (has_kernel(logits) ? entropy_kernel : entropy_composed)(logits, target, mask, nll_weight, uniform_weight,
                                                                  ignore_index);
}
inline tuple<Tensor, Tensor> entropy_in_place_cuda(Tensor& logits, const Tensor& target, const MaybeTensor& mask,
                                                   double nll_weight, double uniform_weight, int64_t ignore_index,
                                                   const Tensor& scale) {
  return (has_kernel(logits) ? entropy_in_place_kernel : entropy_in_place_composed)(
      logits, target, mask, nll_weight, uniform_weight, ignore_index, scale);
}
struct EntropyFunction : torch::autograd::Function<EntropyFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Tensor& target,
                               const MaybeTensor& mask, double nll_weight, double uniform_weight,
                               int64_t ignore_index) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = operator_handle<EntropyForward>("label_smoothed_cross_entropy");
    auto [loss, nll, lse] = op.call(logits, target, mask, nll_weight, uniform_weight, ignore_index);
    ctx->save_for_backward({logits, target, value(mask), lse});
    ctx->saved_data["nll_weight"] = nll_weight;
    ctx->saved_data["uniform_weight"] = uniform_weight;
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->mark_non_differentiable({nll, lse});
    ctx->set_materialize_grads(false);
    return {loss, nll, lse};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(6);
    if (!grads[0].defined()) return result;
    const auto s = ctx->get_saved_variables();
    const double a = ctx->saved_data["nll_weight"].toDouble(), b = ctx->saved_data["uniform_weight"].toDouble();
    const int64_t ignore_index = ctx->saved_data["ignore_index"].toInt();
    if (at::GradMode::is_enabled()) {
      result[0] = higher_order({s[0]}, {grads[0]}, [&](const variable_list& in) {
        return variable_list{std::get<0>(entropy_formula(in[0], s[1], maybe(s[2]), a, b, ignore_index))};
      })[0];
    } else {
      static const auto op = operator_handle<EntropyBackward>("label_smoothed_cross_entropy_backward");
      result[0] = op.call(grads[0], s[0], s[1], maybe(s[2]), s[3], a, b, ignore_index);
    }
    return result;
  }
};
inline tuple<Tensor, Tensor, Tensor> entropy_autograd(const Tensor& logits, const Tensor& target,
                                                      const MaybeTensor& mask, double nll_weight,
                                                      double uniform_weight, int64_t ignore_index) {
  if (!has_kernel(logits)) return entropy_composed(logits, target, mask, nll_weight, uniform_weight, ignore_index);
  auto out = EntropyFunction::apply(logits, target, mask, nll_weight, uniform_weight, ignore_index);
  return {out[0], out[1], out[2]};
}

inline void define(torch::Library& m) {
  using K = c10::DispatchKey;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("relu_dropout(Tensor x, float p, Tensor? seed, int site) -> Tensor", tags);
  m.def("relu_dropout_backward(Tensor dy, Tensor y, float p) -> Tensor", tags);
  m.impl("relu_dropout", K::CPU, TORCH_FN(relu_kernel));
  m.impl("relu_dropout", K::CUDA, TORCH_FN(relu_cuda));
  m.impl("relu_dropout", K::Meta, TORCH_FN(relu_meta));
  m.impl("relu_dropout", K::Autograd, TORCH_FN(relu_autograd));
  m.impl("relu_dropout", K::CompositeExplicitAutograd, TORCH_FN(relu_composed));
  m.impl("relu_dropout", K::FuncTorchBatched, TORCH_FN(relu_composed));
  m.impl("relu_dropout_backward", K::CPU, TORCH_FN(relu_backward_kernel));
  m.impl("relu_dropout_backward", K::CUDA, TORCH_FN(relu_backward_kernel));
  m.impl("relu_dropout_backward", K::Meta, TORCH_FN(relu_backward_meta));
  forbid_autograd(m, "relu_dropout_backward");

  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor ranges, int heads, bool causal, float scale, float p, "
        "Tensor? seed, int site) -> (Tensor, Tensor)", tags);
  m.def("attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor ranges, "
        "int heads, bool causal, float scale, float p, Tensor? seed, int site) -> (Tensor, Tensor, Tensor)", tags);
  m.impl("attention", K::CPU, TORCH_FN(attention_cpu));
  m.impl("attention", K::Meta, TORCH_FN(attention_meta));
  m.impl("attention", K::Autograd, TORCH_FN(attention_autograd));
  m.impl("attention", K::CompositeExplicitAutograd, TORCH_FN(attention_composed));
  m.impl("attention_backward", K::CPU, TORCH_FN(attention_backward_cpu));
  m.impl("attention_backward", K::CompositeExplicitAutograd, TORCH_FN(attention_backward_composed));
  m.impl("attention_backward", K::Meta, TORCH_FN(attention_backward_meta));
  forbid_autograd(m, "attention_backward");

  m.def("label_smoothed_cross_entropy(Tensor logits, Tensor target, Tensor? mask, float nll_weight, "
        "float uniform_weight, int ignore_index) -> (Tensor, Tensor, Tensor)", tags);
  m.def("label_smoothed_cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor? mask, "
        "Tensor lse, float nll_weight, float uniform_weight, int ignore_index) -> Tensor", tags);
  m.def("label_smoothed_cross_entropy_(Tensor(a!) logits, Tensor target, Tensor? mask, float nll_weight, "
        "float uniform_weight, int ignore_index, Tensor scale) -> (Tensor, Tensor)", tags);
  m.impl("label_smoothed_cross_entropy", K::CPU, TORCH_FN(entropy_kernel));
  m.impl("label_smoothed_cross_entropy", K::CUDA, TORCH_FN(entropy_cuda));
  m.impl("label_smoothed_cross_entropy", K::Meta, TORCH_FN(entropy_meta));
  m.impl("label_smoothed_cross_entropy", K::Autograd, TORCH_FN(entropy_autograd));
  m.impl("label_smoothed_cross_entropy", K::CompositeExplicitAutograd, TORCH_FN(entropy_composed));
  m.impl("label_smoothed_cross_entropy", K::FuncTorchBatched, TORCH_FN(entropy_composed));
  m.impl("label_smoothed_cross_entropy_backward", K::CPU, TORCH_FN(entropy_backward_kernel));
  m.impl("label_smoothed_cross_entropy_backward", K::CUDA, TORCH_FN(entropy_backward_kernel));
  m.impl("label_smoothed_cross_entropy_backward", K::Meta, TORCH_FN(entropy_backward_meta));
  forbid_autograd(m, "label_smoothed_cross_entropy_backward");
  m.impl("label_smoothed_cross_entropy_", K::CPU, TORCH_FN(entropy_in_place_kernel));
  m.impl("label_smoothed_cross_entropy_", K::CUDA, TORCH_FN(entropy_in_place_cuda));
  m.impl("label_smoothed_cross_entropy_", K::CompositeExplicitAutograd, TORCH_FN(entropy_in_place_composed));
  forbid_autograd(m, "label_smoothed_cross_entropy_");
}

}  // namespace nfrs::fused
