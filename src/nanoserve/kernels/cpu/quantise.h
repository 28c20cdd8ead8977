// From floats to small integers: one row of activations, one key, one column of weights.
//
// A quantised value stands for `integer * scale`. Each row, group and column is scaled by its own
// largest magnitude and by nothing else, so who shares a batch or a step cannot change a value.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "memory.h"
#include "simd.h"

namespace ns {

constexpr float kMaxInt8 = 127.0f;
constexpr float kTiny = 1e-30f;  // below it a reciprocal may overflow: all such values become 0

// 0, or NaN if one of the values is NaN or infinite.
inline float unfinite(const float* x, int n) {
  F32 sum = zero();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) sum = fma(load(x + i), zero(), sum);
  if (i < n) sum = fma(load_first(x + i, n - i), zero(), sum);
  return reduce_add(sum);
}

// The largest |x| of n values; NaN if one of them is NaN or infinite.
inline float magnitude(const float* x, int n) {
  F32 largest = zero();
  for (int i = 0; i < n; i += kLanes) largest = max(largest, abs(load_first(x + i, n - i)));
  return reduce_max(largest) + unfinite(x, n);
}

// To float16 and back.
inline F32 round_to_half(F32 x) {
  uint16_t half[kLanes];
  store_f16(half, x);
  return load_f16(half);
}

// The low byte of each lane, [16].
inline void store_low_bytes(void* p, I32 x) {
  store_i8(static_cast<int8_t*>(p), shift_right_signed<24>(shift_left<24>(x)));
}

// The scale of one key or value: float16, as stored, and that same number as a float.
struct KvScale {
  uint16_t half;
  float scale;
};

inline KvScale kv_scale(const float* x, int n) {
  uint16_t half = f16_of(magnitude(x, n) / kMaxInt8);
  return {half, float_of_f16(half)};
}

// Values over the scale as it is stored; the scale was rounded, so the largest may pass 127.
inline I32 quantise_kv(F32 x, KvScale scale) {
  if (!(scale.scale > 0.0f)) return splat_i32(0);
  F32 steps = x / splat(scale.scale);
  return to_int(min(max(steps, splat(-kMaxInt8)), splat(kMaxInt8)));
}

// A prepared row: groups of 32 inputs, each with a scale of its own, because a few inputs of a
// trained GPT-2 are far larger than the rest and would leave nothing of a row with one scale.
// A weight w is stored unsigned as w + zero point, so a product has (zero point * sum of the group)
// too much; `bias` takes it away.
constexpr int kGroup = 32;
constexpr int kGroupQuads = kGroup / 4;  // four inputs are one step of an integer product

struct ActivationGroup {
  int8_t values[kGroup];
  float scale;
  int32_t bias;  // -zero point * sum of values
};

inline int num_groups(int K) { return (K + kGroup - 1) / kGroup; }

inline size_t quantised_row_bytes(int K) {
  return align_up(num_groups(K) * sizeof(ActivationGroup), 64);
}

inline const ActivationGroup* group_at(const uint8_t* row, int g) {
  return reinterpret_cast<const ActivationGroup*>(row) + g;
}

// 32 values, of which `low` are the first. One that is not finite makes the scale NaN, and with it
// every product of the row.
template <int kZeroPoint>
inline void quantise_group(F32 low, F32 high, ActivationGroup* group) {
  const float largest = reduce_max(max(abs(low), abs(high)));
  const float steps = largest > kTiny ? kMaxInt8 / largest : 0.0f;
  const I32 first = to_int(low * splat(steps)), second = to_int(high * splat(steps));
  store_i8(group->values, first);
  store_i8(group->values + kLanes, second);
  // Sums of 32 bytes are small integers: exact as floats, in any order. Zero times a value adds
  // nothing, or NaN; then the integers mean nothing, but their sum must not overflow.
  const float sum = reduce_add(fma(low, zero(), fma(high, zero(), to_float(first + second))));
  const float limit = kGroup * kMaxInt8;
  group->bias = -kZeroPoint * static_cast<int32_t>(std::min(limit, std::max(-limit, sum)));
  group->scale = largest / kMaxInt8 + (sum - sum);
}

template <int kZeroPoint>
void prepare_quantised(const float* x, int K, uint8_t* row) {
  ActivationGroup* group = reinterpret_cast<ActivationGroup*>(row);
  int k = 0;
  for (; k + kGroup <= K; k += kGroup)
    quantise_group<kZeroPoint>(load(x + k), load(x + k + kLanes), group++);
  if (k < K)
    quantise_group<kZeroPoint>(load_first(x + k, K - k), load_first(x + k + kLanes, K - k - kLanes),
                               group);
}

// A panel's width of some rows [num_rows][kPanel]: one group of each.
template <int kZeroPoint>
void prepare_quantised_panel(const float* values, int num_rows, uint8_t* out, size_t row_stride) {
  for (int m = 0; m < num_rows; ++m)
    prepare_quantised<kZeroPoint>(values + m * kGroup, kGroup, out + m * row_stride);
}

}  // namespace ns
