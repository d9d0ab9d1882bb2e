// What a norm over the last dimension says of itself. With shift and scale numbers of the row,
//   xhat = (x - shift)*scale,  y = w*xhat + b
// and with g = w*dy the gradient is scale*g - pull*xhat - (the mean of scale*g, where the shift is the row's mean).
// A norm is a struct Norm with
//   STATS                               numbers kept per row: 0 (no norm), 1 (scale) or 2 (shift, the mean, and scale)
//   scale(Length, cols, eps)            from the length of x - shift
//   pull(scale, cols, eps, sum_gx)      from the sum of g*xhat

// unit*root is the length of a row, which itself, or whose square, may leave the range.
struct Length {
  f32 unit, root;
};
