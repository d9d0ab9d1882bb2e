// Sums and copies over a process group of torch.distributed, by torch's own functional collectives: nothing of ours
// travels. Tensors lie where the group's backend wants them (gloo: CPU, NCCL: CUDA).
#pragma once
#include "common.h"

namespace nfrs::collective {

// Boxed: from torch 2.15 on a group's name and a reduction are of the type Any instead of str.
template <class... Arguments>
Tensor call(const char* name, Arguments&&... arguments) {
  torch::jit::Stack stack;
  torch::jit::push(stack, std::forward<Arguments>(arguments)...);
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
  return stack.back().toTensor();
}

inline Tensor wait(const Tensor& t) { return call("_c10d_functional::wait_tensor", t); }

inline Tensor all_reduce(const Tensor& t, const std::string& group) {
  return wait(call("_c10d_functional::all_reduce", t, "sum", group));
}

// In place: the gradients of a model need no copy.
inline void all_reduce_(Tensor& t, const std::string& group) {
  wait(call("_c10d_functional::all_reduce_", t, "sum", group));
}

// (size, ...): the ranks' tensors in order.
inline Tensor all_gather(const Tensor& t, int64_t size, const std::string& group) {
  return wait(call("_c10d_functional::all_gather_into_tensor", t.unsqueeze(0).contiguous(), size, group));
}

// Rank 0's.
inline Tensor broadcast(const Tensor& t, const std::string& group) {
  return wait(call("_c10d_functional::broadcast", t, int64_t{0}, group));
}

}  // namespace nfrs::collective
