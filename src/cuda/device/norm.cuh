// What a norm over the last dimension says of itself. With shift and scale numbers of the row,
//   xhat = (x - shift)*scale,  y = w*xhat + b
// and with g = w*dy the gradient is scale*g - pull*xhat - (the mean of scale*g, where the shift is the row's mean).
// A norm is a struct Norm with
//   STATS                               numbers kept per row: 0 (no norm), 1 (scale) or 2 (shift, the mean, and scale)
//   scale(Length, cols, eps)            from the length of x - shift
//   pull(scale, cols, eps, sum_gx)      from the sum of g*xhat
// Lengths are sqrt(sum x^2), and xhat is their slope; lp_norm.rs has others (K_ORDER).
// A curve, which measures nothing, is a struct Norm of Curve with
//   value(z), slope(z, value)           f and f' of z = scale*x + shift, two learned numbers; xhat = f(z)
// and its gradient is scale*u, u = g*f'(z); scale's is the sum of u*x, and shift's of u.

// unit*root is the length of a row, which itself, or whose square, may leave the range.
struct Length {
  f32 unit, root;
};

// A norm that measures its rows, or none.
struct Straight {
  enum { CURVED = 0 };
  static DEV f32 value(f32 z) { return z; }
  static DEV f32 slope(f32, f32) { return 1.f; }
};
struct Curve {
  enum { CURVED = 1, STATS = 0 };
  static DEV f32 scale(Length, f32, f32) { return 1.f; }
  static DEV f32 pull(f32, f32, f32, f32) { return 0.f; }
};

// p of the length (sum |x|^p)^(1/p); 0: the largest |x|.
#ifndef K_ORDER
#define K_ORDER 2
#endif
constexpr f32 ORDER = K_ORDER;
constexpr bool EUCLIDEAN = ORDER == 2.f, OF_LARGEST = ORDER == 0.f;
