// What a norm over the last dimension says of itself. With shift and scale numbers of the row,
//   xhat = (x - shift)*scale,  y = w*xhat + b
// and with g = w*dy the gradient is scale*g - pull*xhat - (the mean of scale*g, where the shift is the row's mean).
// A norm is a struct Norm with
//   STATS                               numbers kept per row: 0 (no norm), 1 (scale) or 2 (shift, the mean, and scale)
//   scale(Length, cols, eps)            from the length of x - shift
//   pull(scale, cols, eps, sum_gx)      from the sum of g*xhat
// Lengths are sqrt(sum x^2), and xhat is their slope; lp_norm.rs has others (K_ORDER).

// unit*root is the length of a row, which itself, or whose square, may leave the range.
struct Length {
  f32 unit, root;
};

// p of the length (sum |x|^p)^(1/p); 0: the largest |x|.
#ifndef K_ORDER
#define K_ORDER 2
#endif
constexpr f32 ORDER = K_ORDER;
constexpr bool EUCLIDEAN = ORDER == 2.f, OF_LARGEST = ORDER == 0.f;
