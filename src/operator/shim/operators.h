// Registers the operators that Rust declares: one boxed kernel for each dispatch key. Nothing here knows any operator.
#pragma once
#include "node.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

namespace nfrs {

struct Boxed : c10::OperatorKernel {
  using Run = void (*)(const Op&, c10::DispatchKeySet, Stack*);
  Boxed(const Op& op, Run run) : op(op), run(run) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) { run(op, keys, stack); }
  const Op& op;
  const Run run;
};

inline std::string text(const Text& t) { return {t.data, static_cast<size_t>(t.length)}; }
// The place of what has this name, or -1.
template <class All>
int64_t place_of(const All& all, const std::string& name) {
  const auto at = std::find_if(all.begin(), all.end(), [&](const auto& a) { return name == std::string(a.name); });
  return at == all.end() ? -1 : at - all.begin();
}

// Reads the rows of arguments and outputs.
inline void read_rows(Op& op, const OperatorRow& row) {
  const auto argument = [&](const std::string& name) {
    const auto at = op.handle.schema().argumentIndexWithName(name);
    TORCH_CHECK(at, op.name, " has no argument ", name);
    return static_cast<int64_t>(*at);
  };
  const auto keep = [&](std::string t) { return op.texts.emplace_back(std::move(t)).c_str(); };
  for (const auto& r : at::ArrayRef<ArgumentRow>(row.arguments, row.n_arguments)) {
    const auto at = argument(text(r.name));
    switch (const auto type = static_cast<Type>(r.type)) {
      case Type::NUMBER: op.told = at, op.letter = *r.sizes.data; break;
      case Type::DTYPE: op.dtype = at; break;
      case Type::TITLE: op.title = at; break;
      default: {
        const Argument row{keep(text(r.name)), keep(text(r.sizes)), type, r.is};
        if (op.handle.schema().arguments()[at].type()->kind() == c10::TypeKind::ListType) {
          op.lists.emplace_back(row, at);
          break;
        }
        if (r.is & LEADER) op.leader = op.table.size();
        op.table.push_back(row);
        op.readings.push_back(static_cast<Reading>(r.reading));
        op.positions.push_back(at);
      }
    }
  }
  for (const auto& r : at::ArrayRef<ArgumentRow>(row.outputs, row.n_outputs)) {
    op.made.push_back({keep(text(r.name)), keep(text(r.sizes)), static_cast<Type>(r.type), r.is});
    op.like.push_back(r.like.length ? place_of(op.table, text(r.like)) : op.leader);
    TORCH_CHECK(op.like.back() >= 0, op.name, ": ", text(r.name), " is like no argument");
  }
  for (size_t i = 0; i < op.n_args; ++i) {
    const auto& a = op.handle.schema().arguments()[i];
    const bool is_tensor = a.type()->isSubtypeOf(*c10::OptionalType::ofTensor());
    TORCH_CHECK(!is_tensor || place_of(op.table, a.name()) >= 0, op.name, " does not say what ", a.name(), " must be");
    op.plain.push_back(!is_tensor);
    if (a.name() == "p") op.p = i;
  }
  TORCH_CHECK(op.made.size() == op.handle.schema().returns().size(), op.name, " does not say what its outputs are");
}

// Where a backward operator's arguments come from, by their names: `dNAME` is the gradient of output NAME; any other is
// the forward operator's output or argument of that name, which a node keeps. Its output `dNAME` is the gradient of
// argument NAME.
inline void connect(Op& f, Op& b, const OperatorRow& row) {
  const auto& arguments = b.handle.schema().arguments();
  f.has_gradient.resize(f.made.size());
  std::vector<bool> is_kept(f.n_args);
  for (size_t i = 0; i < b.n_args; ++i) {
    const std::string& name = arguments[i].name();
    const auto gradient = name[0] == 'd' ? place_of(f.made, name.substr(1)) : -1, output = place_of(f.made, name);
    const auto argument = f.handle.schema().argumentIndexWithName(name);
    Source s{Source::NOTHING, 0};
    if (gradient >= 0) {
      if (!(f.made[gradient].is & FIXED)) s = {Source::GRADIENT, size_t(gradient)}, f.has_gradient[gradient] = true;
    } else if (output >= 0) {
      s = {Source::OUTPUT, size_t(output)};
      f.saved.push_back(s);
    } else {
      TORCH_CHECK(argument, b.name, ": what is ", name, "?");
      s = {Source::ARGUMENT, size_t(*argument)};
      if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) f.plain[s.index] = true;
      else is_kept[s.index] = true;
    }
    b.sources.push_back(s);
  }
  for (const auto& r : at::ArrayRef<ArgumentRow>(row.arguments, row.n_arguments))
    if (r.like.length) b.sources[*b.handle.schema().argumentIndexWithName(text(r.name))].only_for =
        *f.handle.schema().argumentIndexWithName(text(r.like));
  for (size_t i = 0; i < f.table.size(); ++i) {
    const auto at = f.positions[i];
    if (f.table[i].is & PLAIN) f.plain[at] = true;
    // What the formula needs is everything.
    const bool is_needed = is_kept[at] || (f.table[i].is & KEPT) || !(f.is & DIFFERENTIATES);
    if (is_needed && !f.plain[at]) f.saved.push_back({Source::ARGUMENT, at});
  }
  for (const auto& made : b.made) {
    const auto at = place_of(f.table, made.name + 1);
    TORCH_CHECK(*made.name == 'd' && at >= 0, b.name, ": whose gradient is ", made.name, "?");
    b.results.push_back(at);
  }
  f.backward = &b;
}

inline Op& define(torch::Library& m, const OperatorRow& row) {
  using Key = c10::DispatchKey;
  static std::deque<Op> all;  // stays where it is
  const std::string schema = text(row.schema), name = schema.substr(0, schema.find('('));
  m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(("normformer_rs::" + name).c_str(), "");
  Op& op = all.emplace_back(Op{row.rust, row.is, handle, name});
  op.n_args = op.handle.schema().arguments().size();
  read_rows(op, row);
  const auto impl = [&](Key key, Boxed::Run run) {
    m.impl(name.c_str(), key, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Boxed>(op, run)));
  };
  if (row.is & COMPOSITION) {
    // Under vmap torch batches what the formula is made of; without the second line torch 2.15 calls it one example
    // after the other.
    impl(Key::CompositeImplicitAutograd, fallback<DEVICE>);
    impl(Key::FuncTorchBatched, fallback<DEVICE>);
    return op;
  }
  impl(Key::CPU, kernel);
  if (row.is & (ON_GPU | COMPOSED)) impl(Key::CUDA, kernel);
  impl(Key::Meta, meta);
  if (row.is & COMPOSED) impl(Key::CompositeExplicitAutograd, fallback<DEVICE>);
  if (row.is & BATCHED) impl(Key::FuncTorchBatched, fallback<BATCH>);
  if (row.backward) {
    connect(op, define(m, *row.backward), *row.backward);
    impl(Key::Autograd, autograd);
  } else {
    m.impl(name.c_str(), Key::Autograd, torch::autograd::autogradNotImplementedFallback());
  }
  return op;
}

}  // namespace nfrs
