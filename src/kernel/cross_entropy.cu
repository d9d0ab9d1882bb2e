// Label-smoothed cross-entropy (cross_entropy.rs), with p the softmax over V_t, the columns where the mask is not 0:
//   loss = A*nll + B*(sum of -log p over V_t),  nll = -log p of the target
//   dz = scale*((A + B*|V_t|)*p - A*[v is the target] - B) on V_t, 0 outside
// Each block computes one row. K_GRADIENT is NO (only losses), FROM_LSE (the gradient from the forward pass's lse) or
// IN_PLACE (losses, then the gradient in the place of the logits). The host cannot check targets without waiting for
// the device, so a target outside V_t makes its row's loss and gradient NaN.
enum { NO = 0, FROM_LSE = 1, IN_PLACE = 2 };

struct CrossEntropy {
  const void* logits;
  const i64* target;
  const u8* mask;    // null if every column is in V_t
  f32 *loss, *nll;   // not written by FROM_LSE
  f32* lse;          // per row, max z and sum of exp(z - max): read by FROM_LSE, written by NO, null for IN_PLACE
  const f32* dloss;  // the scale of each row, for FROM_LSE
  void* dlogits;
  i64 ignore_index;
  double nll_weight, uniform_weight;
  const double* scale;  // for IN_PLACE
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
  // IN_PLACE overwrites the logits, so z of the target is read first. The barriers in team.combine separate the read
  // from the writes.
  const Values near = load<K_X>(a.logits, first + target / VEC);
  // Comparisons choose the number, because a variable index would move registers to memory.
  f32 at_target = near.v[0];
#pragma unroll
  for (int j = 1; j < VEC; j++) at_target = target % VEC == j ? near.v[j] : at_target;

  // Each thread keeps its largest logit so far, and a sum of exponentials relative to that logit.
  f32 most[1] = {-__uint_as_float(0x7f800000u)};
  f32 sums[2] = {0.f, 0.f};  // of exp(z - most), and of z - at_target
  f32 size[1] = {0.f};       // |V_t|, all that FROM_LSE needs
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
    // Before sums are added, each thread's sum is made relative to the row's maximum.
    const f32 own = most[0];
    team.combine<Largest>(most);
    sums[0] *= own == most[0] ? 1.f : expf(own - most[0]);
    team.combine<Add>(sums);
    shift = most[0], total = sums[0];
    if (team.lane == 0) {
      // The maximum is subtracted, never added again, so logits may share an offset of any size.
      const double exact = ((double)shift - at_target) + log((double)total);
      const f32 nll = (f32)exact;
      double loss = a.nll_weight * exact;
      // Without smoothing, a logit of -inf would give 0*inf.
      if (a.uniform_weight != 0.0) loss += a.uniform_weight * (size[0] * exact - sums[1]);
      // If nll is infinite the loss is too: inf - inf would give NaN, but no p is above 1.
      a.loss[row] = nll == __uint_as_float(0x7f800000u) ? nll : (f32)loss;
      a.nll[row] = nll;
      if (a.lse) a.lse[2 * row] = shift, a.lse[2 * row + 1] = total;
    }
  }
  if (K_GRADIENT == NO) return;
  const f32 scale = K_GRADIENT == FROM_LSE ? a.dloss[row] : (f32)*a.scale;
  // With e = exp(z - shift): dz = all*e - uniform, or all*e - of_target at the target.
  const f32 all = (f32)(a.nll_weight + a.uniform_weight * size[0]) * scale / total;
  const f32 uniform = (f32)a.uniform_weight * scale;
  // The target's gradient is rounded only once, from double: it is the row's largest, and A + B has no exact f32.
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
