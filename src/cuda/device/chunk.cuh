// A matrix is read and written in chunks of VEC columns; each row consists of whole chunks.
enum { VEC = K_VEC };

struct Values {
  f32 v[VEC];
};

// Loads chunk `at` of the matrix, whose numbers are of type T.
template <class T>
static DEV Values load(const void* rows, i64 at) {
  Values found;
  widen(fetch((const Pack<T, VEC>*)rows + at), found.v);
  return found;
}
// Rounds v to T, stores it as chunk `at`, and returns the rounded numbers.
template <class T>
static DEV Pack<T, VEC> store(void* rows, i64 at, const Values& v) {
  Pack<T, VEC> pack;
  narrow(v.v, pack);
  put((Pack<T, VEC>*)rows + at, pack);
  return pack;
}
