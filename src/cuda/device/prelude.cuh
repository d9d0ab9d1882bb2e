// The beginning of every program: storage types and their conversions. Nothing is included, because NVRTC has only
// built-ins, and a machine that runs kernels need not have CUDA's headers.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef float f32;

#ifdef __CUDACC__
#if __CUDA_ARCH__ < 800
#error "the kernels need compute capability 8.0 or newer"
#endif
#define DEV __device__ __forceinline__
#define SHARED(TYPE, NAME, LENGTH) __shared__ TYPE NAME[LENGTH]
// Declares a kernel, which takes one struct; Rust declares a struct with the same fields.
#define KERNEL(THREADS, NAME, ARGUMENTS) extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const ARGUMENTS a)
#define F16X2_TO_F32(LOW, HIGH, W)                                                                      \
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(LOW), "=f"(HIGH) : "r"(W))
// cvt puts its second operand into the low half.
#define F32_TO_F16X2(W, LOW, HIGH) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(W) : "f"(HIGH), "f"(LOW))
#define F32_TO_BF16X2(W, LOW, HIGH) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(W) : "f"(HIGH), "f"(LOW))
#endif

// The 16-bit types convert two numbers at a time, the halves of a word; the first number is in the low half.
struct bf16 {
  u16 bits;
  static DEV void unpair(u32 word, f32& low, f32& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  }
  static DEV u32 pair(f32 low, f32 high) {
    u32 word;
    F32_TO_BF16X2(word, low, high);
    return word;
  }
};
struct f16 {
  u16 bits;
  static DEV void unpair(u32 word, f32& low, f32& high) { F16X2_TO_F32(low, high, word); }
  static DEV u32 pair(f32 low, f32 high) {
    u32 word;
    F32_TO_F16X2(word, low, high);
    return word;
  }
};

// N neighbouring numbers of a row, loaded and stored together: one number, or whole words, up to 16 bytes at a time.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
  u32 words[N * sizeof(T) / 4];
};
template <>
struct Pack<bf16, 1> {
  u16 bits;
};
template <>
struct Pack<f16, 1> {
  u16 bits;
};

template <int N>
static DEV void widen(const Pack<f32, N>& p, f32 (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = __uint_as_float(p.words[i]);
}
template <class T, int N>
static DEV void widen(const Pack<T, N>& p, f32 (&v)[N]) {
  if constexpr (N == 1) {
    f32 none;
    T::unpair(p.bits, v[0], none);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) T::unpair(p.words[i / 2], v[i], v[i + 1]);
  }
}
template <int N>
static DEV void narrow(const f32 (&v)[N], Pack<f32, N>& p) {
#pragma unroll
  for (int i = 0; i < N; i++) p.words[i] = __float_as_uint(v[i]);
}
template <class T, int N>
static DEV void narrow(const f32 (&v)[N], Pack<T, N>& p) {
  if constexpr (N == 1) {
    p.bits = (u16)T::pair(v[0], 0.f);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) p.words[i / 2] = T::pair(v[i], v[i + 1]);
  }
}

// Loads or stores a pack 16 bytes at a time. If the struct were copied whole, the compiler might copy its members one
// by one.
template <class P>
static DEV P fetch(const P* from) {
  P pack;
  if constexpr (sizeof(P) >= 16) {
#pragma unroll
    for (int i = 0; i < (int)sizeof(P) / 16; i++) {
      const uint4 words = ((const uint4*)from)[i];
      pack.words[4 * i] = words.x, pack.words[4 * i + 1] = words.y;
      pack.words[4 * i + 2] = words.z, pack.words[4 * i + 3] = words.w;
    }
  } else {
    pack = *from;
  }
  return pack;
}
template <class P>
static DEV void put(P* to, const P& pack) {
  if constexpr (sizeof(P) >= 16) {
#pragma unroll
    for (int i = 0; i < (int)sizeof(P) / 16; i++) {
      uint4 words;
      words.x = pack.words[4 * i], words.y = pack.words[4 * i + 1];
      words.z = pack.words[4 * i + 2], words.w = pack.words[4 * i + 3];
      ((uint4*)to)[i] = words;
    }
  } else {
    *to = pack;
  }
}
