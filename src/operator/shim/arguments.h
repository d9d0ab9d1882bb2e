// Checks an operator's tensors against its table. The checks run before any pointer is read, on every device, and also
// for tensors without memory.
#pragma once
#include "declared.h"
#include "memory.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/StringUtil.h>

#include <cstring>

namespace nfrs {

inline bool is_floating(at::ScalarType t) {
  return t == at::kFloat || t == at::kDouble || t == at::kBFloat16 || t == at::kHalf;
}

// Returns true for a digit in `Argument::sizes`; every other character of a size is a letter.
inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The sizes that the letters and the "*" of `Argument::sizes` stand for in one call.
struct Sizes {
  const c10::SymInt* letters[26] = {};  // for a to z; null if the letter has no value yet
  c10::SymIntArrayRef first;            // the leading dimensions for "*"
  bool has_first = false;               // true if `first` is known

  // `letters` points to these values if a letter is no dimension: integer arguments, and the number of elements that
  // "=" counts.
  c10::SymInt numbers[2], count;

  // Returns the pointer to a letter's value, which is null if the letter has no value yet. Callers may set it.
  const c10::SymInt*& of(char letter) { return letters[letter - 'a']; }
  // Gives a letter the value of the i-th integer argument.
  void set_number(size_t i, char letter, int64_t number) {
    numbers[i] = number;
    of(letter) = &numbers[i];
  }

  // Returns true if `size` is the wanted digit or the value of the wanted letter. A letter without a value takes it.
  bool is(char wanted, const c10::SymInt& size) {
    if (is_digit(wanted)) return size == wanted - '0';
    auto& known = of(wanted);
    if (!known) known = &size;
    return known == &size || *known == size;
  }

  // Returns true if the number of t's elements is the wanted digit or the value of the wanted letter. A letter without
  // a value takes it.
  bool counts(char wanted, const Tensor& t) {
    const auto elements = t.sym_numel();
    if (is_digit(wanted)) return elements == wanted - '0';
    auto& known = of(wanted);
    if (!known) count = elements, known = &count;
    return elements == *known;
  }

  // Returns true if t has the sizes that `wanted` describes, in the notation of `Argument::sizes`. A letter or "*"
  // without a value takes the size that t has.
  bool match(const char* wanted, const Tensor& t) {
    if (*wanted == '=') return counts(wanted[1], t);
    // "1|d" or "1|d#": a matrix is allowed only with "#", and one of its sides must be d.
    if (*wanted && wanted[1] == '|') {
      if (t.dim() == 2 && wanted[3] == '#') return is(wanted[2], t.sym_size(0)) || is(wanted[2], t.sym_size(1));
      return t.dim() <= 1 && (t.sym_numel() == 1 || counts(wanted[2], t));
    }
    // First the leading dimensions that "*" stands for are compared, then each other one with its letter or digit.
    auto sizes = t.sym_sizes();
    if (*wanted == '*') {
      const size_t rest = std::strlen(++wanted);
      if (sizes.size() < rest) return false;
      const auto leading = sizes.slice(0, sizes.size() - rest);
      if (has_first && !leading.equals(first)) return false;
      first = leading, has_first = true;
      sizes = sizes.slice(leading.size());
    } else if (sizes.size() != std::strlen(wanted)) {
      return false;
    }
    for (const auto& size : sizes)
      if (!is(*wanted++, size)) return false;
    return true;
  }

  // Returns the shape that `wanted` describes; all its letters must have values.
  at::SmallVector<c10::SymInt, 6> build(const char* wanted) const {
    at::SmallVector<c10::SymInt, 6> shape;
    if (*wanted == '*') ++wanted, shape.append(first.begin(), first.end());
    for (; *wanted; ++wanted) shape.push_back(is_digit(*wanted) ? c10::SymInt(*wanted - '0') : *letters[*wanted - 'a']);
    return shape;
  }

  // Returns the wanted sizes in words: "hold 1 or 8 numbers", "have shape [3, 8]".
  std::string describe(const char* wanted) {
    // A letter that has no value yet stays a letter.
    const auto number = [&](char c) { return is_digit(c) || !of(c) ? std::string(1, c) : c10::str(*of(c)); };
    if (*wanted == '=') return c10::str("hold ", number(wanted[1]), wanted[1] == '1' ? " number" : " numbers");
    if (*wanted && wanted[1] == '|')
      return c10::str("hold 1 or ", number(wanted[2]), " numbers", wanted[3] == '#' ? ", or be a matrix with such a side" : "");
    std::vector<std::string> sizes;
    if (*wanted == '*') {
      ++wanted;
      if (!has_first) sizes.push_back("…");
      for (const auto& size : first) sizes.push_back(c10::str(size));
    }
    for (; *wanted; ++wanted) sizes.push_back(number(*wanted));
    return c10::str("have shape [", c10::Join(", ", sizes), "]");
  }
};

// Returns the type in which kernels compute for a leader of this type.
inline at::ScalarType computing(at::ScalarType leader) { return leader == at::kDouble ? at::kDouble : at::kFloat; }

// Returns true if `type` is what `wanted` asks for; `leader` is the leader's type.
inline bool is_of(Type wanted, at::ScalarType type, at::ScalarType leader) {
  switch (wanted) {
    case Type::FLOATING: return is_floating(type);
    case Type::SAME: return type == leader;
    case Type::WIDTH: return is_floating(type) && (type == at::kDouble) == (leader == at::kDouble);
    case Type::COMPUTED: return type == computing(leader);
    case Type::FLOAT32: return type == at::kFloat;
    case Type::FLOAT64: return type == at::kDouble;
    case Type::INT64: return type == at::kLong;
    case Type::BOOL: return type == at::kBool;
    case Type::MOMENT: return type == at::kFloat || type == at::kBFloat16;
    default: return false;
  }
}

// Returns the wanted type in words: "float32, as x is". `leader` is the leader's name and `type` its type.
inline std::string describe(Type wanted, const char* leader, at::ScalarType type) {
  const bool is_double = type == at::kDouble;
  switch (wanted) {
    case Type::FLOATING: return "float32, float64, bfloat16 or float16";
    case Type::SAME: return c10::str(type, ", as ", leader, " is");
    case Type::WIDTH:
      return c10::str(is_double ? "float64, as " : "float32, bfloat16 or float16, for ", leader, " is ", type);
    case Type::COMPUTED: return c10::str(is_double ? "float64" : "float32", ", which ", leader, " is computed in");
    case Type::FLOAT32: return "float32";
    case Type::FLOAT64: return "float64";
    case Type::INT64: return "int64";
    case Type::BOOL: return "bool";
    case Type::MOMENT: return "float32 or bfloat16";
    default: return "";
  }
}

// Errors if t, which is given for the argument a, breaks a rule of the table. `op` is the operator's name in messages,
// `leader` the leader's name, and x the leader itself.
inline void check_one(const char* op, const Argument& a, const Tensor& t, const char* leader, const Tensor& x,
                      Sizes& sizes) {
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided, op, ": ", a.name,
                              " must be a dense (strided) tensor, got layout ", t.layout(), ": call to_dense() first");
  TORCH_CHECK_TYPE(is_of(a.type, t.scalar_type(), x.scalar_type()), op, ": ", a.name, " must be ",
                   describe(a.type, leader, x.scalar_type()), "; got ", t.scalar_type());
  TORCH_CHECK_VALUE(sizes.match(a.sizes, t), op, ": ", a.name, " must ", sizes.describe(a.sizes), ", got ",
                    t.dim() == 0 ? "a scalar" : c10::str("shape ", t.sym_sizes()));
  TORCH_CHECK(missing_bytes(t) <= 0, op, ": ", a.name, " has shape ", t.sym_sizes(), " and only ", t.storage().nbytes(),
              " bytes of storage");
  TORCH_CHECK_VALUE(t.device() == x.device() || ((a.is & HOST) && t.is_cpu()), op, ": ", a.name, " must be where ",
                    leader, " is, on ", x.device(), ", got ", t.device());
}

// Errors if argument i of the table, which is written to, is not contiguous or shares memory with another argument.
// `name` is the operator's name in messages.
inline void check_written(const char* name, const Op& op, Args args, size_t i) {
  const Tensor& t = entry(op, args, i);
  TORCH_CHECK_VALUE(t.is_contiguous(), name, ": ", op.table[i].name, " must be contiguous: it is written to");
  for (size_t k = 0; k < op.table.size(); ++k)
    if (const Tensor& other = entry(op, args, k); k != i && other.defined()) at::assert_no_overlap(t, other);
}

// Errors if an argument breaks a rule of the operator's table. The leader is checked first, the rest in the table's
// order. `sizes` gets the values of all letters.
inline void check(const Op& op, Args args, Sizes& sizes) {
  const char* name = op.title >= 0 ? args[op.title].toStringRef().c_str() : op.name;
  const char* leader_name = op.table[op.leader].name;
  const Tensor& x = leader(op, args);
  for (size_t i = 0; i < op.numbers.size(); ++i)
    sizes.set_number(i, *op.numbers[i].sizes, args[op.numbers[i].place].toInt());
  const auto check_entry = [&](size_t i) {
    const Tensor& t = entry(op, args, i);
    if (t.defined()) return check_one(name, op.table[i], t, leader_name, x, sizes);
    TORCH_CHECK_VALUE(op.table[i].is & OPTIONAL, name, ": ", op.table[i].name, " is missing");
  };
  check_entry(op.leader);
  for (size_t i = 0; i < op.table.size(); ++i)
    if (i != op.leader) check_entry(i);
  for (size_t i = 0; i < op.table.size(); ++i)
    if (op.table[i].is & WRITTEN) check_written(name, op, args, i);
  for (const auto& row : op.lists)
    for (const auto& t : args[row.place].toListRef())
      if (tensor(t).defined()) check_one(name, row, tensor(t), leader_name, x, sizes);
  if (op.dtype < 0 || args[op.dtype].isNone()) return;
  const auto type = args[op.dtype].toScalarType();
  TORCH_CHECK_TYPE(is_of(Type::WIDTH, type, x.scalar_type()), name, ": dtype must be ",
                   describe(Type::WIDTH, leader_name, x.scalar_type()), "; got ", type);
}

}  // namespace nfrs
