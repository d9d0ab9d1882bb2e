// What an operator's tensors must be: one table per operator, data only, and one function that reads it. It runs before
// any pointer is made, on every device and for tensors without memory alike.
#pragma once
#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <cstring>
#include <optional>

using at::Tensor;

namespace nfrs {

enum class Type : uint8_t {
  FLOATING,  // float32, float64, bfloat16 or float16
  SAME,      // the leader's
  WIDTH,     // floating, and float64 where the leader is
  COMPUTED,  // what the leader is computed in: float64 for float64, else float32
  FLOAT32,
  FLOAT64,
  INT64,
  BOOL,
  // arguments that are no tensors:
  NUMBER,  // tells a letter of sizes
  DTYPE,   // a type as wide as the leader's; of an output: the type it says, or that of what the output is like
  TITLE,   // what messages call the operator
};

// Beside these an argument is required, lies on the leader's device, and is read.
enum : uint8_t {
  LEADER = 1,    // x: the tensor that types and devices are compared with
  OPTIONAL = 2,  // may be absent
  HOST = 4,      // may lie on the CPU, too
  WRITTEN = 8,   // where it lies: contiguous, and no other tensor's memory
  KEPT = 16,     // a node keeps it, though the backward operator does not take it
  PLAIN = 32,    // so too, whatever is written to it
  // of outputs:
  FIXED = 64,    // has no derivative
  SHARED = 128,  // where it is absent the first output is this one, too
};

struct Argument {
  const char* name;
  // A letter or a digit per dimension: a letter is one number wherever it stands. "*" stands for any first dimensions,
  // the same wherever it stands. "=d": d numbers, whatever the shape. "1|d": a scalar or a vector, of 1 or d numbers.
  // Of an output also "@": the shape of what it is like.
  const char* sizes;
  Type type;
  uint8_t is = 0;
};

// An operator's name in two parts, so that no call allocates one.
struct Name {
  const char* family;
  const char* part = "";
};
inline std::ostream& operator<<(std::ostream& out, const Name& name) { return out << name.family << name.part; }

inline bool is_floating(at::ScalarType t) {
  return t == at::kFloat || t == at::kDouble || t == at::kBFloat16 || t == at::kHalf;
}

namespace arguments {

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

// What letters and "*" stand for in one call.
struct Sizes {
  const c10::SymInt* letters[26] = {};
  c10::SymIntArrayRef first;
  bool has_first = false;

  c10::SymInt told, counted;  // what a letter stands for that no dimension is

  const c10::SymInt*& of(char letter) { return letters[letter - 'a']; }
  void tell(char letter, int64_t number) {
    told = number;
    of(letter) = &told;
  }

  bool is(char wanted, const c10::SymInt& size) {
    if (is_digit(wanted)) return size == wanted - '0';
    auto& known = of(wanted);
    if (!known) known = &size;
    return known == &size || *known == size;
  }

  bool counts(char wanted, const Tensor& t) {
    const auto numbers = t.sym_numel();
    if (is_digit(wanted)) return numbers == wanted - '0';
    auto& known = of(wanted);
    if (!known) counted = numbers, known = &counted;
    return numbers == *known;
  }

  // What is not known yet stands for what is found.
  bool match(const char* wanted, const Tensor& t) {
    if (*wanted == '=') return counts(wanted[1], t);
    if (*wanted && wanted[1] == '|') return t.dim() <= 1 && (t.sym_numel() == 1 || counts(wanted[2], t));
    auto sizes = t.sym_sizes();
    if (*wanted == '*') {
      const size_t rest = std::strlen(++wanted);
      if (sizes.size() < rest) return false;
      const auto found = sizes.slice(0, sizes.size() - rest);
      if (has_first && !found.equals(first)) return false;
      first = found, has_first = true;
      sizes = sizes.slice(found.size());
    } else if (sizes.size() != std::strlen(wanted)) {
      return false;
    }
    for (const auto& size : sizes)
      if (!is(*wanted++, size)) return false;
    return true;
  }

  // A shape of what is known.
  at::SmallVector<c10::SymInt, 6> build(const char* wanted) const {
    at::SmallVector<c10::SymInt, 6> shape;
    if (*wanted == '*') ++wanted, shape.append(first.begin(), first.end());
    for (; *wanted; ++wanted) shape.push_back(is_digit(*wanted) ? c10::SymInt(*wanted - '0') : *letters[*wanted - 'a']);
    return shape;
  }

  // In words: "hold 1 or 8 numbers", "have shape [3, 8]".
  std::string describe(const char* wanted) {
    std::ostringstream text;
    const auto number = [&](char c) {
      if (is_digit(c) || !of(c)) text << c;
      else text << *of(c);
    };
    if (*wanted == '=' || (*wanted && wanted[1] == '|')) {
      text << (*wanted == '=' ? "hold " : "hold 1 or ");
      number(wanted[*wanted == '=' ? 1 : 2]);
      text << (std::strcmp(wanted, "=1") == 0 ? " number" : " numbers");
      return text.str();
    }
    text << "have shape [";
    const char* comma = "";
    if (*wanted == '*') {
      ++wanted;
      if (has_first)
        for (const auto& size : first) text << comma << size, comma = ", ";
      else text << "…", comma = ", ";
    }
    for (; *wanted; ++wanted, comma = ", ") text << comma, number(*wanted);
    text << "]";
    return text.str();
  }
};

inline at::ScalarType computed(at::ScalarType leader) { return leader == at::kDouble ? at::kDouble : at::kFloat; }

inline bool is_of(Type wanted, at::ScalarType type, at::ScalarType leader) {
  switch (wanted) {
    case Type::FLOATING: return is_floating(type);
    case Type::SAME: return type == leader;
    case Type::WIDTH: return is_floating(type) && (type == at::kDouble) == (leader == at::kDouble);
    case Type::COMPUTED: return type == computed(leader);
    case Type::FLOAT32: return type == at::kFloat;
    case Type::FLOAT64: return type == at::kDouble;
    case Type::INT64: return type == at::kLong;
    case Type::BOOL: return type == at::kBool;
    default: return false;
  }
}

inline std::string describe(Type wanted, const char* leader, at::ScalarType type) {
  const bool is_double = type == at::kDouble;
  switch (wanted) {
    case Type::FLOATING: return "float32, float64, bfloat16 or float16";
    case Type::SAME: return c10::str(type, ", as ", leader, " is");
    case Type::WIDTH: return c10::str(is_double ? "float64, as " : "float32, bfloat16 or float16, for ", leader, " is ", type);
    case Type::COMPUTED: return c10::str(is_double ? "float64" : "float32", ", which ", leader, " is computed in");
    case Type::FLOAT32: return "float32";
    case Type::FLOAT64: return "float64";
    case Type::INT64: return "int64";
    case Type::BOOL: return "bool";
    default: return "";
  }
}

// Memory may have been taken from under a tensor (FSDP does so): bytes that it lacks.
inline int64_t missing_bytes(const Tensor& t) {
  if (!t.has_storage() || t.is_meta() || t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || t.numel() == 0) return 0;
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return (last + 1) * static_cast<int64_t>(t.element_size()) - static_cast<int64_t>(t.storage().nbytes());
}

inline void check_one(const Name& op, const Argument& a, const Tensor& t, const Argument& leader, const Tensor& x, Sizes& sizes) {
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided, op, ": ", a.name, " must be a dense (strided) tensor, got layout ",
                              t.layout(), ": call to_dense() first");
  TORCH_CHECK_TYPE(is_of(a.type, t.scalar_type(), x.scalar_type()), op, ": ", a.name, " must be ",
                   describe(a.type, leader.name, x.scalar_type()), "; got ", t.scalar_type());
  TORCH_CHECK_VALUE(sizes.match(a.sizes, t), op, ": ", a.name, " must ", sizes.describe(a.sizes), ", got ",
                    t.dim() == 0 ? "a scalar" : c10::str("shape ", t.sym_sizes()));
  TORCH_CHECK(missing_bytes(t) <= 0, op, ": ", a.name, " has shape ", t.sym_sizes(), " and only ", t.storage().nbytes(),
              " bytes of storage");
  TORCH_CHECK_VALUE(t.device() == x.device() || ((a.is & HOST) && t.is_cpu()), op, ": ", a.name, " must be where ",
                    leader.name, " is, on ", x.device(), ", got ", t.device());
}

// What is written must be of one piece and nobody else's.
inline void check_written(const Name& op, const Argument* table, const Tensor* const* tensors, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (!(table[i].is & WRITTEN)) continue;
    TORCH_CHECK_VALUE(tensors[i]->is_contiguous(), op, ": ", table[i].name, " must be contiguous: it is written to");
    for (size_t k = 0; k < n; ++k)
      if (k != i && tensors[k]) at::assert_no_overlap(*tensors[i], *tensors[k]);
  }
}

// Refuses tensors that are not as the operator's table says; an absent one is null. In the order of the table, but the
// leader first.
inline void check(const Name& op, const Argument* table, const Tensor* const* tensors, size_t n, Sizes& sizes) {
  size_t leader = 0;
  while (!(table[leader].is & LEADER)) ++leader;
  bool writes = false;
  const auto one = [&](size_t i) {
    const Tensor* t = tensors[i];
    if (t && t->defined()) return check_one(op, table[i], *t, table[leader], *tensors[leader], sizes);
    TORCH_CHECK_VALUE(table[i].is & OPTIONAL, op, ": ", table[i].name, " is missing");
  };
  one(leader);
  for (size_t i = 0; i < n; ++i) {
    writes |= (table[i].is & WRITTEN) != 0;
    if (i != leader) one(i);
  }
  if (writes) check_written(op, table, tensors, n);
}

}  // namespace arguments

}  // namespace nfrs
