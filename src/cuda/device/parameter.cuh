// A scale or shift per column: absent, one number, or one number per column; and its gradient, a sum over rows. A
// thread keeps up to HELD chunks of a row in registers. HELD = 0 means that rows do not fit and are read again. FULL
// means that every thread has exactly HELD chunks.
enum { NONE = 0, ONE = 1, EACH = 2 };
enum { HELD = K_HELD, FULL = K_FULL };

// Returns a chunk of the parameter p of this kind: `absent` for every column if there is no parameter.
template <int KIND, class T>
static DEV Values values(const T* p, int chunk, f32 absent) {
  Values found;
  if constexpr (KIND == EACH) {
    widen(fetch((const Pack<T, VEC>*)p + chunk), found.v);
  } else {
    f32 value[1] = {absent};
    if constexpr (KIND == ONE) widen(*(const Pack<T, 1>*)p, value);
#pragma unroll
    for (int i = 0; i < VEC; i++) found.v[i] = value[0];
  }
  return found;
}

// Calls work(i, chunk) for each of a thread's chunks in a row, where i is the chunk's index in the registers.
template <class Work>
static DEV void each_chunk(int lane, int chunks, Work work) {
  if constexpr (HELD > 0) {
    if (FULL && chunks == 0) return;  // a row past the end
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (FULL || lane + i * LANES < chunks) work(i, lane + i * LANES);
  } else {
    for (int chunk = lane; chunk < chunks; chunk += LANES) work(0, chunk);
  }
}

// A sum over the rows of a block. Each thread keeps its own sums in registers. If there are too few registers, the sums
// are in the block's row of the workspace: no two threads share a column there, and chunks are read and written 16
// bytes at a time.
template <int KIND>
struct Sum {
  f32 kept[KIND == EACH && HELD > 0 ? HELD : 1][KIND == EACH && HELD > 0 ? VEC : 1];
  f32* total;  // this block's sums; null if they are not wanted

  DEV Sum(f32* totals, int width, int lane, int chunks) : total(totals ? totals + (i64)blockIdx.x * width : nullptr) {
#pragma unroll
    for (auto& chunk : kept)
#pragma unroll
      for (f32& v : chunk) v = 0.f;
    // Sums in the workspace must be zeroed there.
    if constexpr (KIND == EACH && HELD == 0) {
      if (!total) return;
      const Values zero = {};
      each_chunk(lane, chunks, [&](int, int chunk) { store<f32>(total, chunk, zero); });
    }
  }

  DEV void add(int i, int chunk, const f32 (&v)[VEC]) {
    if constexpr (KIND != NONE) {
      if (!total) return;
      if constexpr (KIND == EACH && HELD == 0) {
        Values sum = load<f32>(total, chunk);
#pragma unroll
        for (int j = 0; j < VEC; j++) sum.v[j] += v[j];
        store<f32>(total, chunk, sum);
      } else {
#pragma unroll
        for (int j = 0; j < VEC; j++) (KIND == ONE ? kept[0][0] : kept[i][j]) += v[j];
      }
    }
  }

  // Writes the block's sums to the workspace; all threads must call. `scratch` holds ROWS·32·VEC numbers.
  DEV void finish(Team& team, f32* scratch, int chunks) {
    if (KIND == NONE || !total) return;
    // One number is added up over the threads of each row, then over the rows. Of sums per column, the threads of the
    // first row add those of the other rows in the same lane. With HELD = 0 the sums are in the workspace already.
    if constexpr (KIND == ONE) {
      f32 sum[1] = {kept[0][0]};
      team.combine<Add>(sum);
      if (team.lane == 0) scratch[team.row] = sum[0];
      __syncthreads();
      if (threadIdx.x == 0) {
        f32 all = 0.f;
        for (int r = 0; r < ROWS; r++) all += scratch[r];
        *total = all;
      }
      __syncthreads();
    } else if constexpr (HELD > 0) {
#pragma unroll
      for (int i = 0; i < HELD; i++) {
        const int chunk = team.lane + i * LANES;
        Values all;
#pragma unroll
        for (int j = 0; j < VEC; j++) all.v[j] = kept[i][j];
        if constexpr (ROWS > 1) {
#pragma unroll
          for (int j = 0; j < VEC; j++) scratch[(team.row * VEC + j) * LANES + team.lane] = all.v[j];
          __syncthreads();
          if (team.row == 0)
            for (int r = 1; r < ROWS; r++)
#pragma unroll
              for (int j = 0; j < VEC; j++) all.v[j] += scratch[(r * VEC + j) * LANES + team.lane];
          __syncthreads();
        }
        if (team.row == 0 && chunk < chunks) store<f32>(total, chunk, all);
      }
    }
  }
};
