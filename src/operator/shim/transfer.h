// Copies between host and device that nobody waits for, and streams. torch's generic interfaces only: nothing of CUDA is needed here.
#pragma once
#include "node.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace nfrs::transfer {

// From pinned memory, which torch's allocator keeps until the copy is done.
inline Tensor upload(const Tensor& host, c10::Device device) {
  return host.pin_memory().to(device, /*non_blocking=*/true);
}

// A stream out of torch's, not the device's current one.
inline c10::Stream side_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

// Numbers on their way to the host, which have arrived when `event` has passed; it is empty where they were there.
struct Late {
  Tensor host;
  std::optional<c10::Event> event;

  explicit Late(const Tensor& t) : host(t.to(at::kCPU, /*non_blocking=*/true)) {
    if (t.is_cpu()) return;
    const c10::impl::VirtualGuardImpl device(t.device().type());
    event.emplace(t.device().type());
    event->record(device.getStream(t.device()));
  }

  Tensor read() const {
    if (event) event->synchronize();
    return host;
  }
};

}  // namespace nfrs::transfer
