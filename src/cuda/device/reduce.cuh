// A block has K_ROWS rows of K_LANES threads; K_ROWS is 1 if a row has more than one warp. The threads of a row add or
// compare their values in an order that depends only on K_LANES.
enum { LANES = K_LANES, ROWS = K_ROWS, THREADS = LANES * ROWS, WARPS = LANES / 32 };

struct Add {
  static DEV f32 of(f32 a, f32 b) { return a + b; }
};
struct Largest {
  static DEV f32 of(f32 a, f32 b) { return fmaxf(a, b); }
};

// Returns the larger number, or NaN if either is NaN.
struct LargestOrNan {
  static DEV f32 of(f32 a, f32 b) { return a > b || a != a ? a : b; }
};

// The maximum number of values that a row's threads combine in one call.
enum { MOST = 2 };

// The threads of one row.
struct Team {
  f32* shared;  // [2][MOST][WARPS]: two buffers in turn, so that each call needs only one barrier
  int lane, row;
  int buffer;

  DEV Team(f32* shared) : shared(shared), lane(threadIdx.x % LANES), row(threadIdx.x / LANES), buffer(0) {}

  // Combines each v[k] over the row's threads. All of them must call, and all get the result.
  template <class Operation, int N>
  DEV void combine(f32 (&v)[N]) {
    static_assert(N <= MOST, "shared has no room");
    // First within each warp, by a butterfly: at every step a lane combines its value with that of the lane whose index
    // differs in one bit.
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
#pragma unroll
      for (int k = 0; k < N; k++) v[k] = Operation::of(v[k], __shfl_xor_sync(0xffffffffu, v[k], step));
    // Then over the warps of the row, through shared memory.
    if constexpr (WARPS > 1) {
      f32* to = shared + buffer * MOST * WARPS;
      if (lane % 32 == 0)
#pragma unroll
        for (int k = 0; k < N; k++) to[k * WARPS + lane / 32] = v[k];
      __syncthreads();
#pragma unroll
      for (int k = 0; k < N; k++) {
        v[k] = to[k * WARPS];
#pragma unroll
        for (int w = 1; w < WARPS; w++) v[k] = Operation::of(v[k], to[k * WARPS + w]);
      }
      buffer ^= 1;  // slow threads may still read this buffer during the next call
    }
  }
};
