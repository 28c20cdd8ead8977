// LayerNorm of one row, with sums of one shape: sixteen lanes over the row, then the lanes' tree.
#pragma once

#include "simd.h"

namespace ns {

// out = (x - mean) / sqrt(variance + epsilon) * weight + bias over the first C values; the variance
// is the biased one. Values of `out` beyond C, up to the next multiple of 16, become zero.
inline void layer_norm(const float* x, const float* weight, const float* bias, int C, float epsilon,
                       float* out) {
  const int whole = C / kLanes * kLanes, rest = C - whole;
  const float count = static_cast<float>(C);
  F32 sum = zero();
  for (int i = 0; i < whole; i += kLanes) sum = sum + load(x + i);
  if (rest) sum = sum + load_first(x + whole, rest);
  const F32 mean = splat(reduce_add(sum) / count);

  F32 squares = zero();
  for (int i = 0; i < whole; i += kLanes) {
    F32 gap = load(x + i) - mean;
    squares = fma(gap, gap, squares);
  }
  if (rest) {
    F32 gap = select(first_lanes(rest), load_first(x + whole, rest) - mean, zero());
    squares = fma(gap, gap, squares);
  }
  const F32 variance = splat(reduce_add(squares) / count);
  const F32 scale = splat(1.0f) / sqrt(variance + splat(epsilon));

  for (int i = 0; i < whole; i += kLanes)
    store(out + i, fma((load(x + i) - mean) * scale, load(weight + i), load(bias + i)));
  if (rest) {
    F32 last = (load_first(x + whole, rest) - mean) * scale;
    last = fma(last, load_first(weight + whole, rest), load_first(bias + whole, rest));
    store(out + whole, select(first_lanes(rest), last, zero()));
  }
}

}  // namespace ns
