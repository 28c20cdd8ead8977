// Products with int8 weights: of rows quantised to int8, or of fp32 rows.
//
// A panel is [K/4][32][4] bytes, K rounded up to 64, then 32 scales: one per column. A weight w is
// stored as w + 128, because one side of a four-byte integer product is unsigned.
//
// int8 rows (`kInt8Format`): integers are summed exactly within a group of 64 inputs, then
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

constexpr int kInt8Group = 64;
using Int8Inputs = ActivationGroup<kInt8Group>;
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

template <class Kernel, int kTileRows = kQuantisedTileRows>
void multiply_quantised(const Tile& tile) {
  static constexpr auto kTable =
      quantised_table<Kernel>(std::make_integer_sequence<int, kTileRows>{});
  kTable[tile.num_rows - 1](tile);
}

// Where the sums of row m and vector v of a tile go.
inline float* sums_at(const Tile& tile, int m, int v) {
  return tile.out + m * kPanel + v * kLanes;
}

inline size_t int8_values_bytes(int K) {
  return static_cast<size_t>(Int8Inputs::count(K)) * (kInt8Group / 4) * kQuadBytes;
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

// Asks for what comes next, as quads [8 step, 8 step + 8) are begun. Few rows wait for memory, and the
// hardware's prefetch stops at the end of a page of 4 KiB: their own panel, a page ahead. More: half
// of the panel to come.
constexpr int kStepQuads = 8;
template <int kRows>
inline void fetch_ahead(const Tile& tile, int step) {
  constexpr size_t kBytes = kStepQuads * kQuadBytes;
  if (kRows < 4) {
    const uint8_t* ahead = tile.panel + step * kBytes + kPageBytes;
    for (size_t i = 0; i < kBytes; i += 64) prefetch_l2(ahead + i);
  } else if (tile.next) {
    const uint8_t* share = tile.next + step * kBytes / 2;
    for (size_t i = 0; i < kBytes / 2; i += 64) prefetch_l2(share + i);
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
    const int num_groups = Int8Inputs::count(tile.K);
    for (int g = 0; g < num_groups; ++g, inputs += sizeof(Int8Inputs)) {
      I32 sum[kRows][kVectors];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[m][v] = splat_i32(group_of_row(tile, inputs, m)->bias);
      for (int step = 0; step < kGroupSteps; ++step) {
        fetch_ahead<kRows>(tile, g * kGroupSteps + step);
#pragma GCC unroll 8
        for (int quad = 0; quad < kStepQuads; ++quad, weights += kQuadBytes) {
          Bytes w[kVectors];
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) w[v] = load_bytes(weights + v * kHalfQuad);
          const int input = 4 * (step * kStepQuads + quad);
#pragma GCC unroll 16
          for (int m = 0; m < kRows; ++m) {
            const Bytes x = splat_bytes(group_of_row(tile, inputs, m)->values + input);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) sum[m][v] = dot(sum[m][v], w[v], x);
          }
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const F32 scale = splat(group_of_row(tile, inputs, m)->scale);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          total[m][v] = fma(to_float(sum[m][v]), scale, total[m][v]);
      }
    }
    store_scaled<kRows>(tile, total);
  }

 private:
  static constexpr int kGroupSteps = kInt8Group / 4 / kStepQuads;

  static const Int8Inputs* group_of_row(const Tile& tile, const uint8_t* inputs, int m) {
    return Int8Inputs::at(inputs + m * tile.row_stride, 0);
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

// Four inputs of sixteen columns as signed bytes: flipping bit 7 subtracts 128.
inline I32 load_signed(const uint8_t* quad) {
  return bits(load_bytes(quad)) ^ splat_i32(static_cast<int32_t>(0x80808080u));
}

// Input `kByte` of each four, as a float.
template <int kByte>
inline F32 signed_byte(I32 four) {
  return to_float(shift_right_signed<24>(shift_left<24 - 8 * kByte>(four)));
}

// Sums of fp32 rows, so far of integers, times the columns' scales.
inline void scale_columns(const Tile& tile) {
  const float* scales = reinterpret_cast<const float*>(tile.panel + int8_values_bytes(tile.K));
  for (int m = 0; m < tile.num_rows; ++m)
    for (int v = 0; v < kPanelVectors; ++v) {
      float* y = sums_at(tile, m, v);
      store(y, load(y) * load(scales + v * kLanes));
    }
}

// Rows in even parts, none of more than registers hold sums of: use(first row, number of rows).
template <class Use>
inline void in_parts(int num_rows, Use&& use) {
  const int num_parts = (num_rows + kFloatTileRows - 1) / kFloatTileRows;
  for (int part = 0; part < num_parts; ++part) {
    const int row = num_rows * part / num_parts;
    use(row, num_rows * (part + 1) / num_parts - row);
  }
}

// Up to so many rows each part turns the weights into floats anew, in registers. Once for all parts
// means a pass through the first cache, which pays only with more rows.
#if defined(__AVX512F__)
constexpr int kMostUnwidenedRows = 48;
#else
constexpr int kMostUnwidenedRows = kFloatTileRows;
#endif

struct Int8OnlyKernel {
  template <int kRows>
  static void multiply(const Tile& tile) {
    constexpr int kVectors = kVectorsAtOnce<kRows>;
    for (int first = 0; first < kPanelVectors; first += kVectors)
      for (int block = 0; block < tile.K; block += kBlockK)
        multiply_block<kRows, kVectors>(tile, first, block, std::min(tile.K, block + kBlockK));
    scale_columns(tile);
  }

 private:
  // Inputs [block, end) times kVectors vectors of columns, added to what the tile's sums are so far.
  template <int kRows, int kVectors>
  static void multiply_block(const Tile& tile, int first, int block, int end) {
    F32 sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[m][v] = zero();
    const uint8_t* weights = tile.panel + int8_index(block, first * kLanes);
    const uint8_t* inputs = tile.rows + sizeof(float) * block;
    int num_left = end - block;
    for (; num_left >= 4; num_left -= 4, weights += kQuadBytes, inputs += 4 * sizeof(float))
      add_inputs<4>(weights, inputs, tile.row_stride, sum);
    if (num_left == 3) add_inputs<3>(weights, inputs, tile.row_stride, sum);
    if (num_left == 2) add_inputs<2>(weights, inputs, tile.row_stride, sum);
    if (num_left == 1) add_inputs<1>(weights, inputs, tile.row_stride, sum);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        float* total = sums_at(tile, m, first + v);
        store(total, block == 0 ? sum[m][v] : load(total) + sum[m][v]);
      }
  }

  // The first kCount of four inputs.
  template <int kCount, int kRows, int kVectors>
  static void add_inputs(const uint8_t* weights, const uint8_t* inputs, size_t row_stride,
                         F32 (&sum)[kRows][kVectors]) {
    I32 four[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) four[v] = load_signed(weights + v * kHalfQuad);
    add_input<0>(four, inputs, row_stride, sum);
    if (kCount > 1) add_input<1>(four, inputs, row_stride, sum);
    if (kCount > 2) add_input<2>(four, inputs, row_stride, sum);
    if (kCount > 3) add_input<3>(four, inputs, row_stride, sum);
  }

  template <int kByte, int kRows, int kVectors>
  static void add_input(const I32 (&four)[kVectors], const uint8_t* inputs, size_t row_stride,
                        F32 (&sum)[kRows][kVectors]) {
    F32 w[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) w[v] = signed_byte<kByte>(four[v]);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const F32 x = splat(reinterpret_cast<const float*>(inputs + m * row_stride)[kByte]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[m][v] = fma(x, w[v], sum[m][v]);
    }
  }
};

// Weights [first, first + count) of a panel's inputs as floats: [count][kPanel].
inline void widen_block(const uint8_t* panel, int first, int count, float* out) {
  for (int k = 0; k < count; k += 4)
    for (int v = 0; v < kPanelVectors; ++v) {
      const I32 four = load_signed(panel + int8_index(first + k, v * kLanes));
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
          store(total, block.is_first ? sum[m][v] : load(total) + sum[m][v]);
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
  for (int first = 0; first < tile.K; first += kBlockK) {
    const int count = std::min(kBlockK, tile.K - first);
    widen_block(tile.panel, first, count, weights);
    in_parts(tile.num_rows, [&](int row, int num_rows) {
      kTable[num_rows - 1]({weights, count, tile.rows + row * tile.row_stride + 4 * first,
                            tile.row_stride, tile.out + row * kPanel, first == 0});
    });
  }
  scale_columns(tile);
}

inline void multiply_int8_only(const Tile& tile) {
  constexpr auto multiply_part = multiply_quantised<Int8OnlyKernel, kFloatTileRows>;
  if (tile.num_rows <= kFloatTileRows) return multiply_part(tile);
  if (tile.num_rows > kMostUnwidenedRows) return multiply_widened(tile);
  in_parts(tile.num_rows, [&](int row, int num_rows) {
    Tile part = tile;
    part.rows += row * tile.row_stride;
    part.num_rows = num_rows;
    part.out += row * kPanel;
    multiply_part(part);
  });
}

inline size_t fp32_rows(int) { return 0; }

inline constexpr Format kInt8Format = {"int8",
                                       int8_panel_bytes,
                                       pack_int8,
                                       unpack_int8,
                                       Int8Inputs::row_bytes,
                                       prepare_quantised<kInt8ZeroPoint, kInt8Group>,
                                       kQuantisedTileRows,
                                       multiply_quantised<Int8Kernel>,
                                       kInt8Group / kPanel,
                                       sizeof(Int8Inputs),
                                       prepare_quantised_panels<kInt8ZeroPoint, kInt8Group>};

inline constexpr Format kInt8OnlyFormat = {"int8-weight-only",
                                           int8_panel_bytes,
                                           pack_int8,
                                           unpack_int8,
                                           fp32_rows,
                                           nullptr,
                                           kMaxTileRows,
                                           multiply_int8_only};

}  // namespace ns
