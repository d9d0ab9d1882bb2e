// The family of norms with statistics of columns: for each entry k of Rust's table (operator/column_norm.rs),
//   NAME(x, weight?, bias?, pad_mask?, first(a!)?, second(b!)?, iters(c!)?, refused(d!)?, stats?, *, train, alpha, eps,
//        alpha_bwd, warmup, variant, group) -> (y, stats)
//   NAME_backward(dy, x, weight?, pad_mask?, second(a!)?, refused(b!)?, stats, *, train, alpha_bwd, variant, group)
//        -> (dx, dweight, dbias)
// y = N(x) with statistics over all dimensions but the last, and over the ranks of the process group, where one is
// named; dweight and dbias are this rank's. Buffers move in place: in the forward pass of training, and
// PowerNorm's second in the backward pass. The output `stats` is what the pass used; given as an argument (a second run
// of the same forward pass) it is used as it is, and nothing moves.
#pragma once
#include "norm.h"

extern "C" {
// The same structs as in Rust.
struct ColumnOptions {
  double alpha, alpha_bwd, eps;
  int64_t warmup, group;
  bool train, release;
};
struct ColumnCall {
  View x, weight, bias, pad, first, second, iters, refused;
  bool wide_state, given;
  ColumnOptions options;
  View y, stats;
  View partial, batch;  // room that a GPU's kernels need
};
struct ColumnGradients {
  View dy, dx, dweight, dbias, slopes;
};
int64_t nfrs_column_count();
const char* nfrs_column_name(int64_t norm);
const char* nfrs_column_state(int64_t norm, int64_t which);
bool nfrs_column_approximate(int64_t norm);
bool nfrs_column_centred(int64_t norm);
int64_t nfrs_group(const char* name);  // -1: unknown
bool nfrs_group_name(int64_t group, char* to, int64_t room);
int64_t nfrs_column_stats();
int64_t nfrs_column_partial(int64_t rows, int64_t cols);  // float32 numbers that slabs of rows leave on a GPU
int nfrs_column_forward(int64_t norm, const ColumnCall* call);
int nfrs_column_backward(int64_t norm, const ColumnCall* call, const ColumnGradients* gradients);
Tensor* nfrs_column_composed(int64_t norm, const Tensor* const* tensors, const ColumnOptions* options, Tensor** stats);
int nfrs_column_composed_backward(int64_t norm, const Tensor* const* tensors, const ColumnOptions* options,
                                  Tensor** gradients);
}

namespace nfrs::column {

constexpr int64_t MOST = 4;  // instantiated below; raise it when the table outgrows it

using Options = ColumnOptions;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Forward = Two(const Tensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                    const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, bool, double, double,
                    double, int64_t, c10::string_view, c10::string_view);
using Backward = Three(const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                       const MaybeTensor&, const Tensor&, bool, double, c10::string_view, c10::string_view);

inline std::string name(int64_t k) { return nfrs_column_name(k); }

// What a call has beside x, weight and bias.
struct Rest {
  MaybeTensor pad, first, second, iters, refused, given;
  Options options;
};

inline bool is_release(int64_t k, c10::string_view variant) {
  TORCH_CHECK_VALUE(variant == "paper" || variant == "release", name(k), ": variant must be one of paper, release; got \"", variant, "\"");
  return variant == "release";
}
inline c10::string_view variant_of(const Options& o) { return o.release ? "release" : "paper"; }

inline int64_t group_of(int64_t k, c10::string_view group) {
  const int64_t found = nfrs_group(std::string(group).c_str());
  TORCH_CHECK_VALUE(found >= 0, name(k), ": \"", group, "\" is no process group that normformer_rs was told of; give the "
                    "module sync=True, which tells it");
  return found;
}
inline std::string group_of(const Options& o) {
  char text[512];
  TORCH_CHECK_VALUE(nfrs_group_name(o.group, text, sizeof(text)), "the name of the process group is too long");
  return text;
}

inline Tensor present(const MaybeTensor& t) { return t && t->defined() ? *t : Tensor(); }

// s: rows of statistics. The buffers have each norm's own names.
inline void check_forward(int64_t k, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const Rest& rest) {
  const Argument table[] = {
      {"x", "*d", Type::FLOATING, LEADER},
      {"weight", "=d", Type::FLOATING, OPTIONAL},
      {"bias", "=d", Type::FLOATING, OPTIONAL},
      {"pad_mask", "*", Type::BOOL, OPTIONAL},
      {nfrs_column_state(k, 0), "=d", Type::FLOATING, OPTIONAL},
      {nfrs_column_state(k, 1), "=d", Type::FLOATING, OPTIONAL},
      {"iters", "=1", Type::INT64, OPTIONAL},
      {"refused", "=1", Type::INT64, OPTIONAL},
      {"stats", "sd", Type::COMPUTED, OPTIONAL},
  };
  check({nfrs_column_name(k)}, table,
        {&x, pointer(weight), pointer(bias), pointer(rest.pad), pointer(rest.first), pointer(rest.second),
         pointer(rest.iters), pointer(rest.refused), pointer(rest.given)},
        {{'s', nfrs_column_stats()}});
  if (nfrs_column_approximate(k))
    TORCH_CHECK_VALUE(pointer(rest.first) && pointer(rest.second) && pointer(rest.iters), nfrs_column_name(k),
                      " needs its buffers ", nfrs_column_state(k, 0), ", ", nfrs_column_state(k, 1), " and iters");
  if (nfrs_column_centred(k))
    TORCH_CHECK_VALUE(!pointer(rest.first) == !pointer(rest.second), nfrs_column_name(k), " needs both of its buffers ",
                      nfrs_column_state(k, 0), " and ", nfrs_column_state(k, 1), ", or neither");
}
inline void check_backward(int64_t k, const Tensor& dy, const Tensor& x, const MaybeTensor& weight, const Tensor& stats,
                           const Rest& rest) {
  const Argument table[] = {
      {"dy", "*d", Type::SAME},
      {"x", "*d", Type::FLOATING, LEADER},
      {"weight", "=d", Type::FLOATING, OPTIONAL},
      {"pad_mask", "*", Type::BOOL, OPTIONAL},
      {nfrs_column_state(k, 1), "=d", Type::FLOATING, OPTIONAL},
      {"refused", "=1", Type::INT64, OPTIONAL},
      {"stats", "sd", Type::COMPUTED},
  };
  check({nfrs_column_name(k), "_backward"}, table,
        {&dy, &x, pointer(weight), pointer(rest.pad), pointer(rest.second), pointer(rest.refused), &stats},
        {{'s', nfrs_column_stats()}});
}

inline Tensor empty_stats(const Tensor& x) {
  const c10::SymInt sizes[] = {nfrs_column_stats(), x.sym_size(-1)};
  return at::empty_symint(sizes, x.options().dtype(acc_type(x)));
}

inline Two forward_meta(int64_t k, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const Rest& rest) {
  check_forward(k, x, weight, bias, rest);
  return {at::empty_like(x, at::MemoryFormat::Contiguous), empty_stats(x)};
}

// A buffer as the kernel works on it, written back where it is done: a copy on the CPU; on a GPU, whose kernels write only
// what moves, the buffer itself if it has the type.
struct Working {
  Working(const Tensor& x, const MaybeTensor& t, at::ScalarType type)
      : buffer(present(t)), copy(buffer.defined() ? buffer.to(type, false, kernel_device(x) < 0).contiguous() : Tensor()) {}
  void write_back() const {
    if (!buffer.defined()) return;
    buffer.copy_(copy);
    written(buffer);
  }
  Tensor buffer, copy;
};

inline Tensor bytes(const MaybeTensor& mask) {
  return pointer(mask) ? mask->reshape({-1}).contiguous().view(at::kByte) : Tensor();
}
inline bool is_wide(const MaybeTensor& t) { return pointer(t) && t->scalar_type() == at::kDouble; }
// What kernels compute buffers in.
inline at::ScalarType state_type(const Tensor& x, const MaybeTensor& t) {
  return kernel_device(x) < 0 || is_wide(t) ? at::kDouble : at::kFloat;
}
// Room for what slabs of x's rows leave; undefined on the CPU.
inline Tensor partial(const Tensor& x) {
  if (kernel_device(x) < 0) return Tensor();
  const View v = view(x);
  return at::empty({nfrs_column_partial(v.rows, v.cols)}, x.options().dtype(at::kFloat));
}

// Whether kernels take this call: on a GPU not in float64, and only statistics of one process.
inline bool has_kernel(const Tensor& x, const Options& o) {
  return kernel_device(x) < 0 ? x.is_cpu() : o.group == 0 && nfrs::has_kernel(x);
}

inline Two forward_kernel(int64_t k, const Tensor& x_, const MaybeTensor& weight, const MaybeTensor& bias, const Rest& rest) {
  auto [y, stats] = forward_meta(k, x_, weight, bias, rest);
  const auto type = acc_type(x_);
  const Tensor x = x_.contiguous(), w = parameter(weight, type), b = parameter(bias, type), pad = bytes(rest.pad);
  if (pointer(rest.given)) stats.copy_(*rest.given);
  const auto state = state_type(x, rest.first);
  const Working first(x, rest.first, state), second(x, rest.second, state);
  const Working iters(x, rest.iters, at::kLong), refused(x, rest.refused, at::kLong);
  const bool measures = kernel_device(x) >= 0 && !pointer(rest.given) && (rest.options.train || !pointer(rest.first));
  const Tensor sums = measures ? partial(x) : Tensor();
  const Tensor batch = measures ? at::empty({4, x.size(-1)}, x.options().dtype(at::kDouble)) : Tensor();
  const ColumnCall call{view(x), view(w), view(b), view(pad), view(first.copy), view(second.copy), view(iters.copy),
                        view(refused.copy), is_wide(rest.first), pointer(rest.given) != nullptr, rest.options, view(y), view(stats),
                        view(sums), view(batch)};
  check_rust(nfrs_column_forward(k, &call));
  if (rest.options.train && !pointer(rest.given))
    for (const auto* state : {&first, &second, &iters, &refused})
      if (state != &second || !nfrs_column_approximate(k)) state->write_back();
  return {y, stats};
}

inline Three backward_meta(int64_t k, const Tensor& dy, const Tensor& x, const MaybeTensor& weight, const Tensor& stats,
                           const Rest& rest) {
  check_backward(k, dy, x, weight, stats, rest);
  const auto sums = at::empty_symint({x.sym_size(-1)}, x.options().dtype(acc_type(x)));
  return {at::empty_like(x, at::MemoryFormat::Contiguous), sums, at::empty_like(sums)};
}

inline Three backward_kernel(int64_t k, const Tensor& dy_, const Tensor& x_, const MaybeTensor& weight, const Tensor& stats_,
                          const Rest& rest) {
  auto [dx, dweight, dbias] = backward_meta(k, dy_, x_, weight, stats_, rest);
  const auto type = acc_type(x_);
  const Tensor x = x_.contiguous(), dy = dy_.contiguous(), w = parameter(weight, type);
  const Tensor pad = bytes(rest.pad), stats = stats_.contiguous();
  const Working second(x, rest.second, state_type(x, rest.second)), refused(x, rest.refused, at::kLong);
  const Tensor sums = partial(x);
  const Tensor slopes = sums.defined() ? at::empty({3, x.size(-1)}, sums.options()) : Tensor();
  const ColumnCall call{view(x), view(w), View{}, view(pad), View{}, view(second.copy), View{}, view(refused.copy),
                        is_wide(rest.second), false, rest.options, View{}, view(stats), view(sums), View{}};
  const ColumnGradients gradients{view(dy), view(dx), view(dweight), view(dbias), view(slopes)};
  check_rust(nfrs_column_backward(k, &call, &gradients));
  if (rest.options.train && nfrs_column_approximate(k))
    for (const auto* state : {&second, &refused}) state->write_back();
  return {dx, dweight, dbias};
}

inline Two composed(int64_t k, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const Rest& rest) {
  check_forward(k, x, weight, bias, rest);
  const Tensor* tensors[] = {&x, pointer(weight), pointer(bias), pointer(rest.pad), pointer(rest.first),
                             pointer(rest.second), pointer(rest.iters), pointer(rest.refused), pointer(rest.given)};
  Tensor* stats = nullptr;
  Tensor y = take(nfrs_column_composed(k, tensors, &rest.options, &stats));
  return {y, take(stats)};
}

inline Three composed_backward(int64_t k, const Tensor& dy, const Tensor& x, const MaybeTensor& weight,
                               const Tensor& stats, const Rest& rest) {
  check_backward(k, dy, x, weight, stats, rest);
  const Tensor* tensors[] = {&dy, &x, pointer(weight), pointer(rest.pad), pointer(rest.second), pointer(rest.refused), &stats};
  Tensor* made[3] = {nullptr, nullptr, nullptr};
  check_rust(nfrs_column_composed_backward(k, tensors, &rest.options, made));
  return {take(made[0]), take(made[1]), take(made[2])};
}

template <class Signature>
const c10::TypedOperatorHandle<Signature>& op(int64_t k, const char* suffix) {
  static const auto handles = [&] {
    std::vector<c10::TypedOperatorHandle<Signature>> all;
    for (int64_t i = 0; i < nfrs_column_count(); ++i) all.push_back(operator_handle<Signature>(name(i) + suffix));
    return all;
  }();
  return handles[k];
}

inline Two call_forward(int64_t k, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const Rest& rest) {
  const auto& o = rest.options;
  return op<Forward>(k, "").call(x, weight, bias, rest.pad, rest.first, rest.second, rest.iters, rest.refused, rest.given,
                                 o.train, o.alpha, o.eps, o.alpha_bwd, o.warmup, variant_of(o), group_of(o));
}

struct ColumnNorm : torch::autograd::Function<ColumnNorm> {
  static variable_list forward(AutogradContext* ctx, int64_t k, const Tensor& x, const MaybeTensor& weight,
                               const MaybeTensor& bias, Rest rest) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, stats] = call_forward(k, x, weight, bias, rest);
    ctx->save_for_backward({x, value(weight), value(bias), value(rest.pad), stats});
    // The buffer of ν is moved by the backward pass, not read as it was: no version to compare.
    ctx->saved_data["second"] = c10::IValue(rest.second);
    ctx->saved_data["refused"] = c10::IValue(rest.refused);
    ctx->saved_data["norm"] = k;
    ctx->saved_data["from_batch"] = rest.options.train || !pointer(rest.first);
    ctx->saved_data["train"] = rest.options.train;
    ctx->saved_data["alpha_bwd"] = rest.options.alpha_bwd;
    ctx->saved_data["eps"] = rest.options.eps;
    ctx->saved_data["release"] = rest.options.release;
    ctx->saved_data["group"] = rest.options.group;
    ctx->mark_non_differentiable({stats});
    ctx->set_materialize_grads(false);
    return {y, stats};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined()) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const int64_t k = data["norm"].toInt();
    const MaybeTensor pad = maybe(saved[3]);
    Rest rest{pad, std::nullopt, std::nullopt, std::nullopt, std::nullopt, std::nullopt,
              Options{0, data["alpha_bwd"].toDouble(), data["eps"].toDouble(), 0, data["group"].toInt(),
                      data["train"].toBool(), data["release"].toBool()}};
    if (at::GradMode::is_enabled()) {
      TORCH_CHECK_NOT_IMPLEMENTED(rest.options.group == 0, name(k), ": statistics over several ranks have no second "
                                  "derivative: train without create_graph, or without sync");
      TORCH_CHECK_NOT_IMPLEMENTED(
          !nfrs_column_approximate(k) || !rest.options.train, name(k),
          ": the gradient in training is PowerNorm's approximation (Shen et al. 2020, eq 11), which is no function's "
          "derivative and has none itself: train without create_graph, take powernorm-v, or call eval() first");
      // A formula of the batch is formed again; one of running statistics has them as constants.
      if (data["from_batch"].toBool()) rest.options.train = true;
      else rest.given = saved[4];
      auto d = higher_order({saved[0], saved[1], saved[2]}, {grads[0]}, [&](const variable_list& in) {
        if (rest.given && nfrs_column_approximate(k)) {
          // The composed form wants buffers, of which given statistics use nothing.
          rest.first = rest.second = saved[4][1];
          rest.iters = at::zeros({1}, saved[4].options().dtype(at::kLong));
        }
        return variable_list{std::get<0>(composed(k, in[0], maybe(in[1]), maybe(in[2]), rest))};
      });
      return {Tensor(), d[0], d[1], d[2], Tensor()};
    }
    const auto second = data["second"].toOptional<Tensor>(), refused = data["refused"].toOptional<Tensor>();
    auto [dx, dweight, dbias] = op<Backward>(k, "_backward").call(
        grads[0], saved[0], maybe(saved[1]), pad, second, refused, saved[4], rest.options.train, rest.options.alpha_bwd,
        variant_of(rest.options), group_of(rest.options));
    auto like = [](const Tensor& d, const Tensor& p) {
      return p.defined() ? d.to(p.scalar_type()).view_symint(p.sym_sizes()) : Tensor();
    };
    return {Tensor(), dx, like(dweight, saved[1]), like(dbias, saved[2]), Tensor()};
  }
};

inline bool is_transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

inline Two forward_autograd(int64_t k, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const Rest& rest) {
  if (is_transformed()) {
    TORCH_CHECK_NOT_IMPLEMENTED(!nfrs_column_approximate(k) || !rest.options.train, name(k),
                                ": torch.func differentiates formulas, and the gradient in training is PowerNorm's "
                                "approximation, which is no formula's: use loss.backward(), or call eval() first");
    TORCH_CHECK_NOT_IMPLEMENTED(rest.options.group == 0, name(k), ": torch.func sees one process only: train without "
                                "sync, or use loss.backward()");
    return composed(k, x, weight, bias, rest);
  }
  auto out = ColumnNorm::apply(k, x, weight, bias, rest);
  return {out[0], out[1]};
}

// Under vmap every example would have statistics of its own.
inline Two batched(int64_t k, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const Rest& rest) {
  TORCH_CHECK_NOT_IMPLEMENTED(!rest.options.train || !pointer(rest.first), name(k),
                              ": under vmap every example would move the running statistics: call eval() first, or give "
                              "no buffers");
  return composed(k, x, weight, bias, rest);
}

template <int64_t K>
struct Entry {
#define NFRS_COLUMN_ARGUMENTS                                                                                          \
  const Tensor &x, const MaybeTensor &w, const MaybeTensor &b, const MaybeTensor &pad, const MaybeTensor &first,        \
      const MaybeTensor &second, const MaybeTensor &iters, const MaybeTensor &refused, const MaybeTensor &given,        \
      bool train, double alpha, double eps, double alpha_bwd, int64_t warmup, c10::string_view variant,                  \
      c10::string_view group
#define NFRS_COLUMN_REST                                                                                               \
  Rest {                                                                                                              \
    pad, first, second, iters, refused, given,                                                                        \
        Options { alpha, alpha_bwd, eps, warmup, group_of(K, group), train, is_release(K, variant) }                  \
  }
  static Two kernel(NFRS_COLUMN_ARGUMENTS) {
    const Rest rest = NFRS_COLUMN_REST;
    return has_kernel(x, rest.options) ? forward_kernel(K, x, w, b, rest) : composed(K, x, w, b, rest);
  }
  static Two meta(NFRS_COLUMN_ARGUMENTS) { return forward_meta(K, x, w, b, NFRS_COLUMN_REST); }
  static Two autograd(NFRS_COLUMN_ARGUMENTS) { return forward_autograd(K, x, w, b, NFRS_COLUMN_REST); }
  static Two fallback(NFRS_COLUMN_ARGUMENTS) { return composed(K, x, w, b, NFRS_COLUMN_REST); }
  static Two batch(NFRS_COLUMN_ARGUMENTS) { return batched(K, x, w, b, NFRS_COLUMN_REST); }
#undef NFRS_COLUMN_ARGUMENTS
#undef NFRS_COLUMN_REST
#define NFRS_COLUMN_ARGUMENTS                                                                                     \
  const Tensor &dy, const Tensor &x, const MaybeTensor &w, const MaybeTensor &pad, const MaybeTensor &second,      \
      const MaybeTensor &refused, const Tensor &stats, bool train, double alpha_bwd, c10::string_view variant,         \
      c10::string_view group
#define NFRS_COLUMN_REST                                                                          \
  Rest {                                                                                         \
    pad, std::nullopt, second, std::nullopt, refused, std::nullopt,                              \
        Options { 0, alpha_bwd, 0, 0, group_of(K, group), train, is_release(K, variant) }        \
  }
  static Three kernel_backward(NFRS_COLUMN_ARGUMENTS) {
    const Rest rest = NFRS_COLUMN_REST;
    return has_kernel(x, rest.options) ? backward_kernel(K, dy, x, w, stats, rest)
                                       : composed_backward(K, dy, x, w, stats, rest);
  }
  static Three meta_backward(NFRS_COLUMN_ARGUMENTS) { return backward_meta(K, dy, x, w, stats, NFRS_COLUMN_REST); }
  static Three fallback_backward(NFRS_COLUMN_ARGUMENTS) { return composed_backward(K, dy, x, w, stats, NFRS_COLUMN_REST); }
#undef NFRS_COLUMN_ARGUMENTS
#undef NFRS_COLUMN_REST

  static void define(torch::Library& m) {
    if (K >= nfrs_column_count()) return;
    const auto n = name(K), first = std::string(nfrs_column_state(K, 0)), second = std::string(nfrs_column_state(K, 1));
    m.def((n + "(Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? pad_mask=None, Tensor(a!)? " + first +
           "=None, Tensor(b!)? " + second + "=None, Tensor(c!)? iters=None, Tensor(d!)? refused=None, Tensor? stats=None, *, "
           "bool train, float alpha=0.9, float eps=1e-05, float alpha_bwd=0.9, int warmup=0, str variant=\"paper\", "
           "str group=\"\") -> "
           "(Tensor, Tensor)").c_str(), {at::Tag::pt2_compliant_tag});
    m.def((n + "_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? pad_mask, Tensor(a!)? " + second +
           ", Tensor(b!)? refused, Tensor stats, *, bool train, float alpha_bwd=0.9, str variant=\"paper\", str group=\"\") -> "
           "(Tensor, Tensor, Tensor)").c_str(), {at::Tag::pt2_compliant_tag});
    m.impl(n.c_str(), c10::DispatchKey::CPU, TORCH_FN(kernel));
    m.impl(n.c_str(), c10::DispatchKey::CUDA, TORCH_FN(kernel));
    m.impl(n.c_str(), c10::DispatchKey::Meta, TORCH_FN(meta));
    m.impl(n.c_str(), c10::DispatchKey::Autograd, TORCH_FN(autograd));
    m.impl(n.c_str(), c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(fallback));
    m.impl(n.c_str(), c10::DispatchKey::FuncTorchBatched, TORCH_FN(batch));
    const auto back = n + "_backward";
    m.impl(back.c_str(), c10::DispatchKey::CPU, TORCH_FN(kernel_backward));
    m.impl(back.c_str(), c10::DispatchKey::CUDA, TORCH_FN(kernel_backward));
    m.impl(back.c_str(), c10::DispatchKey::Meta, TORCH_FN(meta_backward));
    m.impl(back.c_str(), c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(fallback_backward));
    forbid_autograd(m, back);
  }
};

template <int64_t... K>
void define_all(torch::Library& m, std::integer_sequence<int64_t, K...>) {
  (Entry<K>::define(m), ...);
}
inline void define(torch::Library& m) {
  TORCH_CHECK(nfrs_column_count() <= MOST, "column.h: raise MOST to ", nfrs_column_count());
  define_all(m, std::make_integer_sequence<int64_t, MOST>{});
}

}  // namespace nfrs::column
