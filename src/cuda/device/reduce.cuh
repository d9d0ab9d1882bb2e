// A block is K_ROWS rows of K_LANES threads; K_ROWS is 1 where a row takes more than a warp. The threads of a row add
// up, or compare, in an order that only K_LANES decides.
enum { LANES = K_LANES, ROWS = K_ROWS, THREADS = LANES * ROWS, WARPS = LANES / 32 };

struct Add {
  static DEV f32 of(f32 a, f32 b) { return a + b; }
};
struct Largest {
  static DEV f32 of(f32 a, f32 b) { return fmaxf(a, b); }
};

// Where a NaN stays one.
struct LargestOrNan {
  static DEV f32 of(f32 a, f32 b) { return a > b || a != a ? a : b; }
};

// Values of one kind that a row's threads may combine at a time.
enum { MOST = 2 };

// The threads of one row.
struct Team {
  f32* shared;  // [2][MOST][WARPS]: two buffers, so that one barrier a time is enough
  int lane, row;
  int buffer;

  DEV Team(f32* shared) : shared(shared), lane(threadIdx.x % LANES), row(threadIdx.x / LANES), buffer(0) {}

  // Every thread gets the result; all the row's threads must call.
  template <class Operation, int N>
  DEV void combine(f32 (&v)[N]) {
    static_assert(N <= MOST, "shared has no room");
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
#pragma unroll
      for (int k = 0; k < N; k++) v[k] = Operation::of(v[k], __shfl_xor_sync(0xffffffffu, v[k], step));
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
      buffer ^= 1;
    }
  }
};
