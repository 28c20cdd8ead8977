// From floats to small integers: one row of activations, one key, one column of weights.
//
// A quantised value stands for `integer * scale`. Each row, group and column is scaled by its own
// largest magnitude and by nothing else, so who shares a batch or a step cannot change a value.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "formats.h"
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

// A prepared row: groups of kInputs inputs, each with a scale of its own, because a few inputs of a
// trained GPT-2 are far larger than the rest and would leave nothing of a row with one scale.
// A weight w is stored unsigned as w + zero point, so a product has (zero point * sum of the group)
// too much; `bias` takes it away.
template <int kInputs>
struct ActivationGroup {
  int8_t values[kInputs];
  float scale;
  int32_t bias;  // -zero point * sum of values

  static int count(int K) { return (K + kInputs - 1) / kInputs; }
  static size_t row_bytes(int K) { return align_up(count(K) * sizeof(ActivationGroup), 64); }
  static const ActivationGroup* at(const uint8_t* row, int g) {
    return reinterpret_cast<const ActivationGroup*>(row) + g;
  }
};

// One group. A value that is not finite makes the scale NaN, and with it every product of the row.
template <int kZeroPoint, int kInputs>
inline void quantise_group(const F32 (&x)[kInputs / kLanes], ActivationGroup<kInputs>* group) {
  F32 magnitudes = zero();
  for (F32 values : x) magnitudes = max(magnitudes, abs(values));
  const float largest = reduce_max(magnitudes);
  const float steps = largest > kTiny ? kMaxInt8 / largest : 0.0f;
  I32 total = splat_i32(0);
  for (int i = 0; i < kInputs / kLanes; ++i) {
    const I32 integers = to_int(x[i] * splat(steps));
    store_i8(group->values + i * kLanes, integers);
    total = total + integers;
  }
  // Sums of so few bytes are small integers: exact as floats, in any order. Zero times a value adds
  // nothing, or NaN; then the integers mean nothing, but their sum must not overflow.
  F32 sums = to_float(total);
  for (F32 values : x) sums = fma(values, zero(), sums);
  const float sum = reduce_add(sums);
  const float limit = kInputs * kMaxInt8;
  group->bias = -kZeroPoint * static_cast<int32_t>(std::min(limit, std::max(-limit, sum)));
  group->scale = largest / kMaxInt8 + (sum - sum);
}

template <int kZeroPoint, int kInputs>
void prepare_quantised(const float* x, int K, uint8_t* row) {
  auto* group = reinterpret_cast<ActivationGroup<kInputs>*>(row);
  for (int k = 0; k < K; k += kInputs) {
    F32 values[kInputs / kLanes];
    for (int i = 0; i < kInputs / kLanes; ++i)
      values[i] = load_first(x + k + i * kLanes, K - k - i * kLanes);
    quantise_group<kZeroPoint, kInputs>(values, group++);
  }
}

// One group of some rows, from panels of them: see Format.
template <int kZeroPoint, int kInputs>
void prepare_quantised_panels(const PanelSums& sums, uint8_t* out, size_t row_stride) {
  constexpr int kVectors = kPanel / kLanes;
  for (int m = 0; m < sums.num_rows; ++m) {
    F32 values[kInputs / kLanes];
    for (int i = 0; i < kInputs / kLanes; ++i)
      values[i] = i / kVectors < sums.num_panels
                      ? load(sums.row(m, i / kVectors) + i % kVectors * kLanes)
                      : zero();
    quantise_group<kZeroPoint, kInputs>(
        values, reinterpret_cast<ActivationGroup<kInputs>*>(out + m * row_stride));
  }
}

}  // namespace ns
