// cross_entropy.rs: with p the softmax over V_t, where the mask is not 0,
//   loss = A*nll + B*sum of -log p over V_t,  nll = -log p of the target
//   dz = scale*((A + B*|V_t|)*p - A*[v is the target] - B) on V_t, 0 outside
// A block takes a row. K_GRADIENT: NO (losses), FROM_LSE (the gradient from the forward's lse) or IN_PLACE (losses, then
// the gradient where the logits were). A target outside V_t, which the host cannot see without waiting, makes its row's
// loss and gradient NaN.
enum { NO = 0, FROM_LSE = 1, IN_PLACE = 2 };

struct CrossEntropy {
  const void* logits;
  const i64* target;
  const u8* mask;    // null: every column is in V_t
  f32 *loss, *nll;   // not written from lse
  f32* lse;          // max and sum of exp(z - max), row by row: read from lse; null in place
  const f32* dloss;  // from lse: the scale, row by row
  void* dlogits;
  i64 ignore_index;
  double nll_weight, uniform_weight;
  const double* scale;  // in place
  int chunks;
};

static DEV bool inside(const u8* mask, int column) { return !mask || mask[column]; }

KERNEL(THREADS, cross_entropy, CrossEntropy) {
  SHARED(f32, shared, 2 * MOST * WARPS);
  Team team(shared);
  const i64 row = blockIdx.x, first = row * a.chunks;
  const i64 target = a.target[row];
  const bool ignored = target == a.ignore_index;
  const int cols = a.chunks * VEC;
  const bool known = target >= 0 && target < cols && inside(a.mask, (int)target);
  const f32 nan = __uint_as_float(0x7fc00000u);
  if (ignored || !known) {
    const f32 all = ignored ? 0.f : nan;
    if (K_GRADIENT != NO) {
      Values v;
#pragma unroll
      for (int j = 0; j < VEC; j++) v.v[j] = all;
      for (int chunk = team.lane; chunk < a.chunks; chunk += LANES) store<K_X>(a.dlogits, first + chunk, v);
    }
    if (K_GRADIENT != FROM_LSE && team.lane == 0) {
      a.loss[row] = a.nll[row] = all;
      if (a.lse) a.lse[2 * row] = a.lse[2 * row + 1] = all;
    }
    return;
  }
  // Read before anybody writes, with the barriers of the sums between.
  const Values near = load<K_X>(a.logits, first + target / VEC);
  f32 at_target = near.v[0];
#pragma unroll
  for (int j = 1; j < VEC; j++) at_target = target % VEC == j ? near.v[j] : at_target;

  // Each thread keeps the largest logit it has met, and its exponentials relative to it.
  f32 most[1] = {-__uint_as_float(0x7f800000u)};
  f32 sums[2] = {0.f, 0.f};  // of exponentials, and of z - at_target
  f32 size[1] = {0.f};
  for (int chunk = team.lane; chunk < a.chunks; chunk += LANES) {
    const Values z = load<K_X>(a.logits, first + chunk);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
      if (!inside(a.mask, chunk * VEC + j)) continue;
      size[0] += 1.f;
      if (K_GRADIENT == FROM_LSE) continue;
      if (z.v[j] > most[0]) {
        sums[0] *= expf(most[0] - z.v[j]);
        most[0] = z.v[j];
      }
      sums[0] += z.v[j] == most[0] ? 1.f : expf(z.v[j] - most[0]);
      sums[1] += z.v[j] - at_target;
    }
  }
  team.combine<Add>(size);
  // p = exp(z - shift)/total
  f32 shift = K_GRADIENT == FROM_LSE ? a.lse[2 * row] : 0.f, total = K_GRADIENT == FROM_LSE ? a.lse[2 * row + 1] : 1.f;
  if (K_GRADIENT != FROM_LSE) {
    const f32 own = most[0];
    team.combine<Largest>(most);
    sums[0] *= own == most[0] ? 1.f : expf(own - most[0]);
    team.combine<Add>(sums);
    shift = most[0], total = sums[0];
    if (team.lane == 0) {
      // The maximum is not added to the log of the sum: logits may share an offset of any size.
      const double exact = ((double)shift - at_target) + log((double)total);
      const f32 nll = (f32)exact;
      double loss = a.nll_weight * exact;
      // Not 0*inf where nothing is smoothed and a logit is -inf.
      if (a.uniform_weight != 0.0) loss += a.uniform_weight * (size[0] * exact - sums[1]);
      // Not inf - inf: no p is above 1.
      a.loss[row] = nll == __uint_as_float(0x7f800000u) ? nll : (f32)loss;
      a.nll[row] = nll;
      if (a.lse) a.lse[2 * row] = shift, a.lse[2 * row + 1] = total;
    }
  }
  if (K_GRADIENT == NO) return;
  const f32 scale = K_GRADIENT == FROM_LSE ? a.dloss[row] : (f32)*a.scale;
  const f32 all = (f32)(a.nll_weight + a.uniform_weight * size[0]) * scale / total;
  const f32 uniform = (f32)a.uniform_weight * scale;
  // Rounded once: the target's gradient is the row's largest, and A + B has no exact f32.
  const double of_target = (a.nll_weight + a.uniform_weight) * scale;
  for (int chunk = team.lane; chunk < a.chunks; chunk += LANES) {
    Values z = load<K_X>(a.logits, first + chunk);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
      const int column = chunk * VEC + j;
      const f32 e = expf(z.v[j] - shift);
      const f32 dz = column == target ? (f32)((double)all * e - of_target) : fmaf(all, e, -uniform);
      z.v[j] = inside(a.mask, column) ? dz : 0.f;
    }
    store<K_X>(a.dlogits, first + chunk, z);
  }
}
