// The second stage of a sum over rows: adds up partial[block][column] over all blocks, always in the same order. Here a
// block processes 32 columns, and each of its eight warps every eighth row of `partial`. Neighbouring columns may
// belong to different outputs.
struct Output {
  void* to;
  int first;  // the first of the columns that go to this output
  int dtype;  // the type of the output: 0 f32, 2 bf16, 3 f16
};
template <class T>
static DEV void set(void* to, int at, f32 v) {
  const f32 one[1] = {v};
  narrow(one, ((Pack<T, 1>*)to)[at]);
}
enum { OUTPUTS = 6 };
struct Sums {
  const f32* partial;
  int blocks, columns;
  int stride;  // the distance between the columns of two blocks
  Output outputs[OUTPUTS];  // sorted by their first columns
};

KERNEL(256, sum_partials, Sums) {
  SHARED(f32, parts, 256);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
  f32 sum = 0.f;
  if (column < a.columns)
    for (int b = warp; b < a.blocks; b += 8) sum += a.partial[(i64)b * a.stride + column];
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (warp > 0 || column >= a.columns) return;
  for (int w = 1; w < 8; w++) sum += parts[32 * w + lane];
  // The loop has only constant indices: with a variable index, the compiler would copy the arguments to local memory.
  Output output = a.outputs[0];
#pragma unroll
  for (int k = 1; k < OUTPUTS; k++)
    if (column >= a.outputs[k].first) output = a.outputs[k];
  const int at = column - output.first;
  if (output.dtype == 0)
    set<f32>(output.to, at, sum);
  else if (output.dtype == 2)
    set<bf16>(output.to, at, sum);
  else
    set<f16>(output.to, at, sum);
}
