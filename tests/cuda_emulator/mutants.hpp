// The mutants of a kernel (mutants.py), all in one program: `mutant(n)` is true in a process whose MOCK_MUTANT is n.
// MOCK_REACHED=file: the numbers of the mutants that were met are appended to it, each once.
#pragma once
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <type_traits>

static const int planted = getenv("MOCK_MUTANT") ? atoi(getenv("MOCK_MUTANT")) : -1;
static const int reached = getenv("MOCK_REACHED") ? open(getenv("MOCK_REACHED"), O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;

static inline bool mutant(int n) {
  static bool met[1 << 14];
  if (reached >= 0 && !met[n]) {
    met[n] = true;
    dprintf(reached, "%d\n", n);
  }
  return n == planted;
}
static inline int flip(int n) { return mutant(n) ? -1 : 1; }

// The left side of a comparison of floating-point numbers; the mutant answers the other way where one is NaN.
template <class T>
struct Compared {
  T v;
  int n;
};
template <class T, class O>
static inline bool operator<(Compared<T> a, O b) { return mutant(a.n) ? !(a.v >= b) : a.v < b; }
template <class T, class O>
static inline bool operator<=(Compared<T> a, O b) { return mutant(a.n) ? !(a.v > b) : a.v <= b; }
template <class T, class O>
static inline bool operator>(Compared<T> a, O b) { return mutant(a.n) ? !(a.v <= b) : a.v > b; }
template <class T, class O>
static inline bool operator>=(Compared<T> a, O b) { return mutant(a.n) ? !(a.v < b) : a.v >= b; }
template <class T>
static inline auto compared(int n, T v) {
  if constexpr (std::is_floating_point_v<T>)
    return Compared<T>{v, n};
  else
    return v;
}

// A function with its first two arguments exchanged, where they are of one type.
#define SWAPPED(N, FUNCTION)                                                        \
  [&](const auto& one, const auto& two, const auto&... rest) {                      \
    if constexpr (std::is_same_v<decltype(one), decltype(two)>)                     \
      if (mutant(N)) return FUNCTION(two, one, rest...);                            \
    return FUNCTION(one, two, rest...);                                             \
  }
