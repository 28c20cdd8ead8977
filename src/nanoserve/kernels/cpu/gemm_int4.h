// Products of int8 rows with int4 weights in groups of 32 inputs.
//
// A panel is one record after another, each 32 inputs of 32 columns: [4][32][4] bytes, whose low
// halves are inputs 0..15 and whose high halves are inputs 16..31, then 32 float16 scales. That is
// 4.5 bits a weight. A weight is scale * (stored - 8), stored being 0..15.
//
//   y = fma over groups, ascending: (exact integer sum of the group) * (column's scale * row's scale)
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "formats.h"
#include "gemm_int8.h"
#include "quantise.h"
#include "simd.h"

namespace ns {

constexpr int kInt4ZeroPoint = 8;
constexpr int kInt4Group = 32;
using Int4Inputs = ActivationGroup<kInt4Group>;
constexpr int kInt4ValuesBytes = kInt4Group * kPanel / 2;
constexpr int kInt4GroupBytes = kInt4ValuesBytes + 2 * kPanel;

inline size_t int4_panel_bytes(int K) {
  return static_cast<size_t>(Int4Inputs::count(K)) * kInt4GroupBytes;
}

// Byte of input k (0..31 of a group) and column n; inputs from 16 on are its high half.
inline int int4_index(int k, int n) { return k % 16 / 4 * kQuadBytes + 4 * n + k % 4; }

inline F32 int4_steps(F32 x, F32 inverse) {
  F32 steps = to_float(to_int(x * inverse));
  return min(max(steps, splat(-8.0f)), splat(7.0f));
}

// Scales of one group of 16 columns `x` [K'][kPanel]: of some candidates, that with the smallest
// squared error. Each maps the value of largest magnitude near the end of the range that has one
// step more (-8), or near the other (7). Infinity, so that no answer is silently wrong, where a
// weight is beyond what a float16 scale reaches.
inline F32 int4_scales(const float* x, int K) {
  F32 lowest = zero(), highest = zero();
  for (int k = 0; k < K; ++k) {
    lowest = min(lowest, load(x + k * kPanel));
    highest = max(highest, load(x + k * kPanel));
  }
  const F32 extreme = select(less(highest, -lowest), lowest, highest);
  F32 best = splat(std::numeric_limits<float>::infinity()), best_error = splat(3e38f);
  for (float divisor : {-8.0f, -8.6f, -9.3f, -7.5f, -10.2f, 7.0f, 7.5f, 8.1f}) {
    const F32 scale = round_to_half(extreme / splat(divisor));
    const Mask usable = less(splat(kTiny), abs(scale));
    const F32 inverse = splat(1.0f) / select(usable, scale, splat(1.0f));
    F32 error = zero();
    for (int k = 0; k < K; ++k) {
      const F32 value = load(x + k * kPanel);
      const F32 missed = fma(-scale, int4_steps(value, inverse), value);
      error = fma(missed, missed, error);
    }
    const Mask better = less(error, best_error);
    best = select(better, select(usable, scale, zero()), best);
    best_error = select(better, error, best_error);
  }
  return best;
}

inline void pack_int4_group(const float* columns, int K, uint8_t* group) {
  uint16_t* scales = reinterpret_cast<uint16_t*>(group + kInt4ValuesBytes);
  std::memset(group, kInt4ZeroPoint | kInt4ZeroPoint << 4, kInt4ValuesBytes);
  for (int n = 0; n < kPanel; n += kLanes) {
    const F32 scale = int4_scales(columns + n, K);
    store_f16(scales + n, scale);
    const F32 inverse =
        splat(1.0f) / select(equal(scale, zero()), splat(std::numeric_limits<float>::max()), scale);
    for (int k = 0; k < K; ++k) {
      int32_t values[kLanes];
      store_i32(values, to_int(int4_steps(load(columns + k * kPanel + n), inverse)));
      for (int i = 0; i < kLanes; ++i) {
        uint8_t& byte = group[int4_index(k, n + i)];
        const int stored = values[i] + kInt4ZeroPoint;
        byte = static_cast<uint8_t>(k < 16 ? (byte & 0xf0) | stored : (byte & 0x0f) | stored << 4);
      }
    }
  }
}

inline void pack_int4(const float* columns, int K, uint8_t* panel) {
  for (int g = 0; g < Int4Inputs::count(K); ++g)
    pack_int4_group(columns + static_cast<size_t>(g) * kInt4Group * kPanel,
                    std::min(kInt4Group, K - g * kInt4Group), panel + g * kInt4GroupBytes);
}

inline void unpack_int4(const uint8_t* panel, int K, int column, float* out) {
  for (int k = 0; k < K; ++k) {
    const uint8_t* group = panel + k / kInt4Group * kInt4GroupBytes;
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(group + kInt4ValuesBytes);
    const int byte = group[int4_index(k % kInt4Group, column)];
    const int stored = k % kInt4Group < 16 ? byte & 15 : byte >> 4;
    out[k] = static_cast<float>(stored - kInt4ZeroPoint) * float_of_f16(scales[column]);
  }
}

struct Int4Kernel {
  template <int kRows>
  static void multiply(const Tile& tile) {
    constexpr int kVectors = kPanelVectors;
    const uint8_t* group = tile.panel;
    const uint8_t* fetched = tile.next ? tile.next : tile.panel;
    const size_t fetch_step = tile.next ? 64 : 0;
    const I32 low_halves = splat_i32(0x0f0f0f0f);
    F32 total[kRows][kVectors];
    for (auto& row : total)
      for (F32& lanes : row) lanes = zero();
    for (int g = 0; g < Int4Inputs::count(tile.K); ++g, group += kInt4GroupBytes) {
      I32 sum[kRows][kVectors];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          sum[m][v] = splat_i32(Int4Inputs::at(tile.rows + m * tile.row_stride, g)->bias);
      for (int quad = 0; quad < kInt4Group / 8; ++quad) {
        Bytes low[kVectors], high[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const I32 both = bits(load_bytes(group + quad * kQuadBytes + v * kHalfQuad));
          low[v] = bytes_from_bits(both & low_halves);
          high[v] = bytes_from_bits(shift_right<4>(both) & low_halves);
        }
        if (kRows >= 4) {
          prefetch_l2(fetched);
          fetched += fetch_step;
        }
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          const int8_t* x = Int4Inputs::at(tile.rows + m * tile.row_stride, g)->values + 4 * quad;
          const Bytes x_low = splat_bytes(x), x_high = splat_bytes(x + 16);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v)
            sum[m][v] = dot(dot(sum[m][v], low[v], x_low), high[v], x_high);
        }
      }
      const uint16_t* stored = reinterpret_cast<const uint16_t*>(group + kInt4ValuesBytes);
      F32 scales[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) scales[v] = load_f16(stored + v * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const F32 scale = splat(Int4Inputs::at(tile.rows + m * tile.row_stride, g)->scale);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          total[m][v] = fma(to_float(sum[m][v]), scales[v] * scale, total[m][v]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) store(sums_at(tile, m, v), total[m][v]);
  }
};

inline constexpr Format kInt4Format = {"int4",
                                       int4_panel_bytes,
                                       pack_int4,
                                       unpack_int4,
                                       Int4Inputs::row_bytes,
                                       prepare_quantised<kInt4ZeroPoint, kInt4Group>,
                                       kQuantisedTileRows,
                                       multiply_quantised<Int4Kernel>,
                                       kInt4Group / kPanel,
                                       sizeof(Int4Inputs),
                                       prepare_quantised_panels<kInt4ZeroPoint, kInt4Group>};

}  // namespace ns
