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
#include "gemm_float.h"
#include "quantise.h"
#include "simd.h"

namespace ns {

constexpr int kQuadBytes = 4 * kPanel;   // of a panel: four inputs of 32 columns
constexpr int kHalfQuad = 4 * kLanes;    // ... of 16 columns
constexpr int kInt8ZeroPoint = 128;
constexpr int kPageBytes = 4096;

#if defined(__AVX512F__)
constexpr int kQuantisedTileRows = 6;  // integer sums and totals: two registers a row and vector
#else
constexpr int kQuantisedTileRows = 4;
#endif

// A kernel is a type with `multiply<kRows>(tile)`; this chooses for a tile.
template <class Kernel, int... kIndex>
constexpr auto quantised_table(std::integer_sequence<int, kIndex...>) {
  return std::array<void (*)(const Tile&), sizeof...(kIndex)>{
      Kernel::template multiply<kIndex + 1>...};
}

template <class Kernel>
void multiply_quantised(const Tile& tile) {
  static constexpr auto kTable =
      quantised_table<Kernel>(std::make_integer_sequence<int, kQuantisedTileRows>{});
  kTable[tile.num_rows - 1](tile);
}

// Where the sums of row m and vector v of a tile go.
inline float* sums_at(const Tile& tile, int m, int v) {
  return tile.out + m * kPanel + v * kLanes;
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

// Asks for what comes next, as group g is begun. Few rows wait for memory, and the hardware's prefetch
// stops at the end of a page of 4 KiB: their own panel, a page ahead. More: half of the panel to come.
template <int kRows>
inline void fetch_ahead(const Tile& tile, int g) {
  constexpr size_t kGroupBytes = kGroupQuads * kQuadBytes;
  if (kRows < 4) {
    const uint8_t* ahead = tile.panel + g * kGroupBytes + kPageBytes;
    for (size_t i = 0; i < kGroupBytes; i += 64) prefetch_l2(ahead + i);
  } else if (tile.next) {
    const uint8_t* share = tile.next + g * kGroupBytes / 2;
    for (size_t i = 0; i < kGroupBytes / 2; i += 64) prefetch_l2(share + i);
  }
}

struct Int8Kernel {
  template <int kRows>
  static void multiply(const Tile& tile) {
    constexpr int kVectors = kPanelVectors;
    const uint8_t* weights = tile.panel;
    const uint8_t* inputs = tile.rows;
    if (kRows >= 4 && tile.target) fetch_targets(tile, kRows, 0, 1);
    F32 total[kRows][kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) total[m][v] = zero();
    for (int g = 0; g < num_groups(tile.K); ++g, inputs += sizeof(ActivationGroup)) {
      fetch_ahead<kRows>(tile, g);
      I32 sum[kRows][kVectors];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          sum[m][v] = splat_i32(group_at(inputs + m * tile.row_stride, 0)->bias);
#pragma GCC unroll 8
      for (int quad = 0; quad < kGroupQuads; ++quad, weights += kQuadBytes) {
        Bytes w[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) w[v] = load_bytes(weights + v * kHalfQuad);
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          Bytes x = splat_bytes(group_at(inputs + m * tile.row_stride, 0)->values + 4 * quad);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) sum[m][v] = dot(sum[m][v], w[v], x);
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        F32 scale = splat(group_at(inputs + m * tile.row_stride, 0)->scale);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          total[m][v] = fma(to_float(sum[m][v]), scale, total[m][v]);
      }
    }
    store_scaled<kRows>(tile, total);
  }

  template <int kRows>
  static void store_scaled(const Tile& tile, F32 (&total)[kRows][kPanelVectors]) {
    const float* scales = reinterpret_cast<const float*>(tile.panel + int8_values_bytes(tile.K));
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) {
      const F32 scale = load(scales + v * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) store(sums_at(tile, m, v), total[m][v] * scale);
    }
  }
};

// Input `kByte` of each four, as a float.
template <int kByte>
inline F32 signed_byte(I32 four) {
  return to_float(shift_right_signed<24>(shift_left<24 - 8 * kByte>(four)));
}

// Few rows wait for memory: each weight becomes a float where it is used.
struct Int8OnlyKernel {
  template <int kRows>
  static void multiply(const Tile& tile) {
    constexpr int kVectors = kPanelVectors;
    const uint8_t* weights = tile.panel;
    F32 total[kRows][kVectors];
    for (auto& row : total)
      for (F32& lanes : row) lanes = zero();
    for (int block = 0; block < tile.K; block += kBlockK) {
      F32 sum[kRows][kVectors];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[m][v] = zero();
      const int end = std::min(tile.K, block + kBlockK);
      for (int k = block; k < end; k += 4, weights += kQuadBytes) {
        I32 four[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)  // flipping bit 7 subtracts 128 from a byte
          four[v] = bits(load_bytes(weights + v * kHalfQuad)) ^
                    splat_i32(static_cast<int32_t>(0x80808080u));
        add_input<0>(tile, k, four, sum);
        if (k + 1 < end) add_input<1>(tile, k + 1, four, sum);
        if (k + 2 < end) add_input<2>(tile, k + 2, four, sum);
        if (k + 3 < end) add_input<3>(tile, k + 3, four, sum);
      }
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) total[m][v] = total[m][v] + sum[m][v];
    }
    Int8Kernel::store_scaled<kRows>(tile, total);
  }

  template <int kByte, int kRows>
  static void add_input(const Tile& tile, int k, const I32 (&four)[kPanelVectors],
                        F32 (&sum)[kRows][kPanelVectors]) {
    F32 w[kPanelVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) w[v] = signed_byte<kByte>(four[v]);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      F32 x = splat(reinterpret_cast<const float*>(tile.rows + m * tile.row_stride)[k]);
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) sum[m][v] = fma(x, w[v], sum[m][v]);
    }
  }
};

// Weights [first, first + count) of a panel's inputs as floats: [count][kPanel].
inline void widen_block(const uint8_t* panel, int first, int count, float* out) {
  for (int k = 0; k < count; k += 4)
    for (int v = 0; v < kPanelVectors; ++v) {
      const uint8_t* quad = panel + int8_index(first + k, v * kLanes);
      const I32 four = bits(load_bytes(quad)) ^ splat_i32(static_cast<int32_t>(0x80808080u));
      float* at = out + k * kPanel + v * kLanes;
      store(at, signed_byte<0>(four));
      store(at + kPanel, signed_byte<1>(four));
      store(at + 2 * kPanel, signed_byte<2>(four));
      store(at + 3 * kPanel, signed_byte<3>(four));
    }
}

// Some rows times a block of floats [count][kPanel], added to `out`, or put there by the first block.
struct WidenedBlock {
  const float* weights;
  int count;
  const uint8_t* inputs;  // row m's at inputs + m * row_stride
  size_t row_stride;
  float* out;
  bool is_first;
};

struct WidenedKernel {
  template <int kRows>
  static void multiply(const WidenedBlock& block) {
    constexpr int kVectors = kVectorsAtOnce<kRows>;
    for (int first = 0; first < kPanelVectors; first += kVectors) {
      F32 sum[kRows][kVectors];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[m][v] = zero();
      for (int k = 0; k < block.count; ++k) {
        F32 w[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          w[v] = load(block.weights + k * kPanel + (first + v) * kLanes);
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          const F32 x =
              splat(reinterpret_cast<const float*>(block.inputs + m * block.row_stride)[k]);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) sum[m][v] = fma(x, w[v], sum[m][v]);
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
        for (int v = 0; v < kVectors; ++v) {
          float* total = block.out + m * kPanel + (first + v) * kLanes;
          store(total, (block.is_first ? zero() : load(total)) + sum[m][v]);
        }
    }
  }
};

template <int... kIndex>
constexpr auto widened_table(std::integer_sequence<int, kIndex...>) {
  return std::array<void (*)(const WidenedBlock&), sizeof...(kIndex)>{
      WidenedKernel::multiply<kIndex + 1>...};
}

// Many rows: a block becomes floats once, for all of them. The sums and their order are the same.
inline void multiply_widened(const Tile& tile) {
  static constexpr auto kTable =
      widened_table(std::make_integer_sequence<int, kFloatTileRows>{});
  alignas(64) float weights[kBlockK * kPanel];
  const int num_parts = (tile.num_rows + kFloatTileRows - 1) / kFloatTileRows;
  for (int first = 0; first < tile.K; first += kBlockK) {
    const int count = std::min(kBlockK, tile.K - first);
    widen_block(tile.panel, first, count, weights);
    for (int part = 0; part < num_parts; ++part) {
      const int row = tile.num_rows * part / num_parts;
      const int end = tile.num_rows * (part + 1) / num_parts;
      kTable[end - row - 1]({weights, count, tile.rows + row * tile.row_stride + 4 * first,
                             tile.row_stride, tile.out + row * kPanel, first == 0});
    }
  }
  const float* scales = reinterpret_cast<const float*>(tile.panel + int8_values_bytes(tile.K));
  for (int m = 0; m < tile.num_rows; ++m)
    for (int v = 0; v < kPanelVectors; ++v) {
      float* y = sums_at(tile, m, v);
      store(y, load(y) * load(scales + v * kLanes));
    }
}

inline void multiply_int8_only(const Tile& tile) {
  if (tile.num_rows > kQuantisedTileRows) return multiply_widened(tile);
  multiply_quantised<Int8OnlyKernel>(tile);
}

inline size_t fp32_rows(int) { return 0; }

inline constexpr Format kInt8Format = {"int8",
                                       int8_panel_bytes,
                                       pack_int8,
                                       unpack_int8,
                                       quantised_row_bytes,
                                       prepare_quantised<kInt8ZeroPoint>,
                                       kQuantisedTileRows,
                                       multiply_quantised<Int8Kernel>,
                                       sizeof(ActivationGroup),
                                       prepare_quantised_panel<kInt8ZeroPoint>};

static_assert(kGroup == kPanel, "a panel of results is one group of the rows that read them");

inline constexpr Format kInt8OnlyFormat = {"int8-weight-only",
                                           int8_panel_bytes,
                                           pack_int8,
                                           unpack_int8,
                                           fp32_rows,
                                           nullptr,
                                           kMaxTileRows,
                                           multiply_int8_only};

}  // namespace ns
