// The interface of a norm over the last dimension. With a shift and a scale per row,
//   xhat = (x - shift)*scale,  y = w*xhat + b
// and with g = w*dy the gradient is dx = scale*g - pull*xhat, minus the mean of scale*g if the shift is the row's
// mean. A norm is a struct Norm with
//   STATS                               numbers kept per row: 0 (no norm), 1 (scale) or 2 (shift, the mean, and scale)
//   scale(Length, cols, eps)            returns the scale from the length of x - shift
//   pull(scale, cols, eps, sum_gx)      returns pull from the sum of g*xhat
// The length is sqrt(sum x^2), and xhat is its derivative up to a factor; lp_norm.rs has other lengths (K_ORDER). A
// curve, which has no statistics, is a struct Norm : Curve with
//   value(z), slope(z, value)           return f and f' of z = scale*x + shift, with learned scale, shift; xhat = f(z)
// With u = g*f'(z) its gradients are dx = scale*u, the sum of u*x for scale, and the sum of u for shift.

// The length of a row as a product, unit*root, because the length or its square may overflow or underflow in f32.
struct Length {
  f32 unit, root;
};

// The base of a norm that is not a curve.
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

// The order p of the length (sum |x|^p)^(1/p); 0 stands for infinity, the largest |x|.
#ifndef K_ORDER
#define K_ORDER 2
#endif
constexpr f32 ORDER = K_ORDER;
constexpr bool EUCLIDEAN = ORDER == 2.f, OF_LARGEST = ORDER == 0.f;
