// Sums and copies over a process group of torch.distributed, by torch's own functional collectives: nothing of ours
// travels. Tensors lie where the group's backend wants them (gloo: CPU, NCCL: CUDA).
#pragma once
#include "common.h"

namespace nfrs::collective {

inline Tensor wait(const Tensor& t) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                             .typed<Tensor(const Tensor&)>();
  return op.call(t);
}

inline Tensor all_reduce(const Tensor& t, const std::string& group) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::all_reduce", "")
                             .typed<Tensor(const Tensor&, std::string, std::string)>();
  return wait(op.call(t, "sum", group));
}

// In place: the gradients of a model need no copy.
inline void all_reduce_(Tensor& t, const std::string& group) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::all_reduce_", "")
                             .typed<Tensor&(Tensor&, std::string, std::string)>();
  wait(op.call(t, "sum", group));
}

// (size, ...): the ranks' tensors in order.
inline Tensor all_gather(const Tensor& t, int64_t size, const std::string& group) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::all_gather_into_tensor", "")
                             .typed<Tensor(const Tensor&, int64_t, std::string)>();
  return wait(op.call(t.unsqueeze(0).contiguous(), size, group));
}

// Rank 0's.
inline Tensor broadcast(const Tensor& t, const std::string& group) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::broadcast", "")
                             .typed<Tensor(const Tensor&, int64_t, std::string)>();
  return wait(op.call(t, 0, group));
}

}  // namespace nfrs::collective
