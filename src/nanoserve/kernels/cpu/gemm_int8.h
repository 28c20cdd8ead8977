// Products with int8 weights: of rows quantised to int8, or of fp32 rows.
//
// A panel is [K/4][32][4] bytes, K rounded up to 32, then 32 scales: one per column. A weight w is
// stored as w + 128, because one side of a four-byte integer product is unsigned.
//
// int8 rows (`kInt8Format`): integers are summed exactly within a group of 32 inputs, then
//   y = (fma over groups, ascending: sum of the group * scale of the row's group) * column's scale.
// fp32 rows (`kInt8OnlyFormat`): the order of docs/EXACTNESS.md, with the integers as floats, then
//   times the column's scale.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "formats.h"
#include "quantise.h"
#include "simd.h"

namespace ns {

constexpr int kQuadBytes = 4 * kPanel;   // of a panel: four inputs of 32 columns
constexpr int kHalfQuad = 4 * kLanes;    // ... of 16 columns
constexpr int kInt8ZeroPoint = 128;

#if defined(__AVX512F__)
constexpr int kQuantisedTileRows = 6;  // integer sums and totals: two registers a row and vector
constexpr int kQuantisedWideRows = 3;
#else
constexpr int kQuantisedTileRows = 4;
constexpr int kQuantisedWideRows = 0;
#endif

// A kernel is a type with `multiply<kRows, kVectors>(tile, first vector)`; this chooses for a tile.
template <class Kernel, int kRows>
void multiply_quantised_rows(const Tile& tile) {
  constexpr int kVectors = kRows <= kQuantisedWideRows ? 4 : 2;
  int vector = 0;
  for (; vector + kVectors <= 2 * tile.num_panels; vector += kVectors)
    Kernel::template multiply<kRows, kVectors>(tile, vector);
  for (; vector < 2 * tile.num_panels; vector += 2)
    Kernel::template multiply<kRows, 2>(tile, vector);
}

template <class Kernel, int... kIndex>
constexpr auto quantised_table(std::integer_sequence<int, kIndex...>) {
  return std::array<void (*)(const Tile&), sizeof...(kIndex)>{
      multiply_quantised_rows<Kernel, kIndex + 1>...};
}

template <class Kernel>
void multiply_quantised(const Tile& tile) {
  static constexpr auto kTable =
      quantised_table<Kernel>(std::make_integer_sequence<int, kQuantisedTileRows>{});
  kTable[tile.num_rows - 1](tile);
}

// Where the sums of row m and vector v of a tile go.
template <int kRows>
inline float* sums_at(const Tile& tile, int m, int vector) {
  return tile.out + ((vector / 2) * kRows + m) * kPanel + (vector % 2) * kLanes;
}

inline size_t int8_values_bytes(int K) {
  return static_cast<size_t>(num_groups(K)) * kGroupQuads * kQuadBytes;
}

inline size_t int8_panel_bytes(int K) { return int8_values_bytes(K) + sizeof(float) * kPanel; }

// Byte of input k and column n within the values of a panel.
inline size_t int8_index(int k, int n) {
  return static_cast<size_t>(k / 4) * kQuadBytes + 4 * n + k % 4;
}

inline void pack_int8(const float* columns, int K, uint8_t* panel) {
  float* scales = reinterpret_cast<float*>(panel + int8_values_bytes(K));
  std::memset(panel, kInt8ZeroPoint, int8_values_bytes(K));
  for (int n = 0; n < kPanel; n += kLanes) {
    F32 largest = zero();
    for (int k = 0; k < K; ++k) largest = max(largest, abs(load(columns + k * kPanel + n)));
    const F32 usable = select(less(splat(kTiny), largest), largest, splat(1.0f));
    const F32 steps = splat(kMaxInt8) / usable;
    store(scales + n, usable / splat(kMaxInt8));
    for (int k = 0; k < K; ++k) {
      int32_t values[kLanes];
      store_i32(values, to_int(load(columns + k * kPanel + n) * steps));
      for (int i = 0; i < kLanes; ++i)
        panel[int8_index(k, n + i)] = static_cast<uint8_t>(values[i] + kInt8ZeroPoint);
    }
  }
}

inline void unpack_int8(const uint8_t* panel, int K, int column, float* out) {
  const float scale = reinterpret_cast<const float*>(panel + int8_values_bytes(K))[column];
  for (int k = 0; k < K; ++k)
    out[k] = static_cast<float>(panel[int8_index(k, column)] - kInt8ZeroPoint) * scale;
}

struct Int8Kernel {
  template <int kRows, int kVectors>
  static void multiply(const Tile& tile, int first_vector) {
    const size_t panel_bytes = int8_panel_bytes(tile.K);
    const uint8_t* panel =
        tile.panel + (first_vector / 2) * panel_bytes + (first_vector % 2) * kHalfQuad;
    const uint8_t* fetched = tile.next ? tile.next : tile.panel;
    const size_t fetch_step = tile.next ? 64 : 0;
    F32 total[kRows][kVectors];
    for (auto& row : total)
      for (F32& lanes : row) lanes = zero();
    const uint8_t* weights = panel;
    for (int g = 0; g < num_groups(tile.K); ++g) {
      I32 sum[kRows][kVectors];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          sum[m][v] = splat_i32(group_at(tile.rows + m * tile.row_stride, g)->bias);
      for (int quad = 0; quad < kGroupQuads; ++quad, weights += kQuadBytes) {
        Bytes w[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          w[v] = load_bytes(weights + (v / 2) * panel_bytes + (v % 2) * kHalfQuad);
        if (kRows >= 4) {
          prefetch_l2(fetched);
          fetched += fetch_step;
        }
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          Bytes x = splat_bytes(group_at(tile.rows + m * tile.row_stride, g)->values + 4 * quad);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sum[m][v] = dot(sum[m][v], w[v], x);
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        F32 scale = splat(group_at(tile.rows + m * tile.row_stride, g)->scale);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          total[m][v] = fma(to_float(sum[m][v]), scale, total[m][v]);
      }
    }
    store_scaled<kRows, kVectors>(tile, first_vector, total);
  }

  template <int kRows, int kVectors>
  static void store_scaled(const Tile& tile, int first_vector, F32 (&total)[kRows][kVectors]) {
    const size_t panel_bytes = int8_panel_bytes(tile.K);
    const uint8_t* scales = tile.panel + int8_values_bytes(tile.K);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int vector = first_vector + v;
      F32 scale = load(reinterpret_cast<const float*>(scales + (vector / 2) * panel_bytes) +
                       (vector % 2) * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) store(sums_at<kRows>(tile, m, vector), total[m][v] * scale);
    }
  }
};

// Input `kByte` of each four, as a float.
template <int kByte>
inline F32 signed_byte(I32 four) {
  return to_float(shift_right_signed<24>(shift_left<24 - 8 * kByte>(four)));
}

struct Int8OnlyKernel {
  template <int kRows, int kVectors>
  static void multiply(const Tile& tile, int first_vector) {
    const size_t panel_bytes = int8_panel_bytes(tile.K);
    const uint8_t* weights =
        tile.panel + (first_vector / 2) * panel_bytes + (first_vector % 2) * kHalfQuad;
    F32 total[kRows][kVectors];
    for (auto& row : total)
      for (F32& lanes : row) lanes = zero();
    for (int block = 0; block < tile.K; block += kBlockK) {
      F32 sum[kRows][kVectors];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[m][v] = zero();
      const int end = std::min(tile.K, block + kBlockK);
      for (int k = block; k < end; k += 4, weights += kQuadBytes) {
        I32 four[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)  // flipping bit 7 subtracts 128 from a byte
          four[v] = bits(load_bytes(weights + (v / 2) * panel_bytes + (v % 2) * kHalfQuad)) ^
                    splat_i32(static_cast<int32_t>(0x80808080u));
        add_input<0>(tile, k, four, sum);
        if (k + 1 < end) add_input<1>(tile, k + 1, four, sum);
        if (k + 2 < end) add_input<2>(tile, k + 2, four, sum);
        if (k + 3 < end) add_input<3>(tile, k + 3, four, sum);
      }
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) total[m][v] = total[m][v] + sum[m][v];
    }
    Int8Kernel::store_scaled<kRows, kVectors>(tile, first_vector, total);
  }

  template <int kByte, int kRows, int kVectors>
  static void add_input(const Tile& tile, int k, const I32 (&four)[kVectors],
                        F32 (&sum)[kRows][kVectors]) {
    F32 w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = signed_byte<kByte>(four[v]);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      F32 x = splat(reinterpret_cast<const float*>(tile.rows + m * tile.row_stride)[k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[m][v] = fma(x, w[v], sum[m][v]);
    }
  }
};

inline size_t fp32_rows(int) { return 0; }

inline constexpr Format kInt8Format = {"int8",
                                       int8_panel_bytes,
                                       pack_int8,
                                       unpack_int8,
                                       quantised_row_bytes,
                                       prepare_quantised<kInt8ZeroPoint>,
                                       kQuantisedTileRows,
                                       kQuantisedWideRows,
                                       multiply_quantised<Int8Kernel>};

inline constexpr Format kInt8OnlyFormat = {"int8-weight-only",
                                           int8_panel_bytes,
                                           pack_int8,
                                           unpack_int8,
                                           fp32_rows,
                                           nullptr,
                                           kQuantisedTileRows,
                                           kQuantisedWideRows,
                                           multiply_quantised<Int8OnlyKernel>};

}  // namespace ns
