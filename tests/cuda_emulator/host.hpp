// What CUDA's built-ins mean when a kernel's source is compiled for the host: included before it. A kernel becomes an
// ordinary function that the emulator (driver.cpp) calls once per thread, each on a stack of its own.
#pragma once
#include <bits/c++config.h>
// Bessel functions and their like in <cmath>, which no kernel uses, take nearly half of a kernel's compilation.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <cmath>
#include <cstdint>
#include <cstring>

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct Index {
  unsigned x, y, z;
};
// What the emulator lends a kernel. `meet` is a barrier of the warp or of the block; `shared` hands out a block's memory.
struct Emulator {
  Index thread, block, threads, blocks;
  void (*barrier)();
  void (*exchange)(const void* mine, void* theirs, unsigned size, int lane);
  void* (*shared)(const char* name, unsigned size);
};
static Emulator* emulator;
extern "C" void lend(Emulator* to_kernels) { emulator = to_kernels; }

#define threadIdx (emulator->thread)
#define blockIdx (emulator->block)
#define blockDim (emulator->threads)
#define gridDim (emulator->blocks)

#define DEV inline
#define SHARED(TYPE, NAME, LENGTH) TYPE* const NAME = (TYPE*)emulator->shared(#NAME, sizeof(TYPE) * (LENGTH))
#define KERNEL(THREADS, NAME, ARGUMENTS)                                                \
  static void NAME(const ARGUMENTS& a);                                                 \
  extern "C" const unsigned NAME##_threads = THREADS;                                   \
  extern "C" void NAME##_thread(void** arguments) { NAME(*(const ARGUMENTS*)*arguments); } \
  static void NAME(const ARGUMENTS& a)

template <class To, class From>
static inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "one size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
static inline float __uint_as_float(unsigned u) { return same_bits<float>(u); }
static inline unsigned __float_as_uint(float f) { return same_bits<unsigned>(f); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
static inline unsigned half_bits(float f) { return same_bits<unsigned short>((_Float16)f); }
static inline unsigned bf16_bits(float f) {
  const unsigned bits = __float_as_uint(f);
  if (f != f) return bits >> 16 | 0x40;  // or it would round to infinity
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#define F16X2_TO_F32(LOW, HIGH, W) \
  LOW = (float)same_bits<_Float16>((unsigned short)(W)), HIGH = (float)same_bits<_Float16>((unsigned short)((W) >> 16))
#define F32_TO_F16X2(W, LOW, HIGH) W = half_bits(LOW) | half_bits(HIGH) << 16
#define F32_TO_BF16X2(W, LOW, HIGH) W = bf16_bits(LOW) | bf16_bits(HIGH) << 16

static inline void __syncthreads() { emulator->barrier(); }
template <class T>
static T __shfl_xor_sync(unsigned, T v, int mask) {
  T theirs;
  emulator->exchange(&v, &theirs, sizeof v, (int)(threadIdx.x % 32) ^ mask);
  return theirs;
}
