// Products of fp32 rows with fp32 panels, and of bf16 rows with bf16 panels.
//
// A panel is [K / KU][32][KU] with KU = 1 (fp32) or 2 (bf16): 128 bytes a step, in the order in
// which they are used. Each step multiplies one broadcast input (or pair) of each row with 32
// columns: an outer product, so no sum ever runs across lanes. The order of every sum is that of
// docs/EXACTNESS.md: inputs ascending in blocks of 256, block sums added in order, whatever the
// number of rows or panels.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "formats.h"
#include "memory.h"
#include "simd.h"

namespace ns {

constexpr int kStepBytes = 4 * kPanel;    // of a panel; a row has 4 bytes a step
constexpr int kHalfBytes = 4 * kLanes;    // of a step: the columns of one vector
constexpr size_t kFetchAhead = 12288;     // bytes of a stream

struct Float32Kind {
  using Vector = F32;
  static constexpr int kInputs = 1;  // a step
  static Vector load_weights(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static Vector splat_input(const uint8_t* p) { return splat(*reinterpret_cast<const float*>(p)); }
  static F32 multiply_add(Vector x, Vector w, F32 sum) { return fma(x, w, sum); }
};

struct Bfloat16Kind {
  using Vector = Pairs;
  static constexpr int kInputs = 2;
  static Vector load_weights(const uint8_t* p) {
    return load_pairs(reinterpret_cast<const uint16_t*>(p));
  }
  static Vector splat_input(const uint8_t* p) {
    return splat_pair(reinterpret_cast<const uint16_t*>(p));
  }
  static F32 multiply_add(Vector x, Vector w, F32 sum) { return dot(sum, x, w); }
};

template <class Kind>
int num_steps(int K) {
  return (K + Kind::kInputs - 1) / Kind::kInputs;
}

template <class Kind>
size_t float_panel_bytes(int K) {
  return static_cast<size_t>(num_steps<Kind>(K)) * kStepBytes;
}

// A finished row is stored to lines that another thread or layer left far away: asked for only when
// they are written, they hold up the products. A few with each block of inputs keep the queue of
// misses short, which the panel needs as well. A dense row may begin anywhere in a line: of the
// three it then touches, the first is the panel before's as well.
inline void fetch_targets(const Tile& tile, int num_rows, int block, int num_blocks) {
  for (int m = num_rows * block / num_blocks; m < num_rows * (block + 1) / num_blocks; ++m)
    for (int line = 0; line < kPanelVectors; ++line)
      prefetch_to_write(tile.target + m * tile.target_stride + line * 64 + 63);
}

// kRows rows times kVectors vectors of the panel's columns, the first being `first_vector`.
template <class Kind, int kRows, int kVectors>
inline void multiply_vectors(const Tile& tile, int first_vector) {
  constexpr int kBlock = kBlockK / Kind::kInputs;
  const int steps = num_steps<Kind>(tile.K);
  const uint8_t* weights = tile.panel + first_vector * kHalfBytes;
  const size_t row_stride = tile.row_stride;
  // Few rows wait for memory anyway, and the hardware's own prefetch serves one sequential stream
  // best. More rows keep the core so busy that it lags: then the stream is fetched well ahead.
  constexpr bool kFetches = kRows >= 6;
  const uint8_t* fetched = tile.next ? tile.next : weights + kFetchAhead;
  const size_t fetch_step = tile.next ? 64 : kStepBytes;
  for (int block = 0; block < steps; block += kBlock) {
    F32 sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[m][v] = zero();
    const int stop = std::min(steps, block + kBlock);
    if (kFetches && tile.target)  // asked here: inside the call g++ 12 makes slower code of the loop
      fetch_targets(tile, kRows, block / kBlock, (steps + kBlock - 1) / kBlock);
    for (int step = block; step < stop; ++step) {
      typename Kind::Vector w[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        w[v] = Kind::load_weights(weights + static_cast<size_t>(step) * kStepBytes +
                                  v * kHalfBytes);
      if (kFetches) {
        prefetch_l2(fetched);
        prefetch_l2(fetched + fetch_step / 2);  // without `next` the step's second line
        fetched += fetch_step;
      }
      const uint8_t* inputs = tile.rows + static_cast<size_t>(step) * 4;
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        typename Kind::Vector x = Kind::splat_input(inputs + m * row_stride);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[m][v] = Kind::multiply_add(x, w[v], sum[m][v]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* out = tile.out + m * kPanel + (first_vector + v) * kLanes;
        store(out, block == 0 ? sum[m][v] : load(out) + sum[m][v]);
      }
  }
}

// How many accumulators a machine holds decides the shape of a tile, and nothing else.
#if defined(__AVX512F__)
constexpr int kFloatTileRows = 12;
template <int kRows>
constexpr int kVectorsAtOnce = kPanelVectors;
#else
constexpr int kFloatTileRows = 6;
template <int kRows>
constexpr int kVectorsAtOnce = kRows <= 2 ? kPanelVectors : 1;
#endif

template <class Kind, int kRows>
void multiply_rows(const Tile& tile) {
  constexpr int kVectors = kVectorsAtOnce<kRows>;
  for (int vector = 0; vector < kPanelVectors; vector += kVectors)
    multiply_vectors<Kind, kRows, kVectors>(tile, vector);
}

template <class Kind, int... kIndex>
constexpr auto multiply_table(std::integer_sequence<int, kIndex...>) {
  return std::array<void (*)(const Tile&), sizeof...(kIndex)>{multiply_rows<Kind, kIndex + 1>...};
}

template <class Kind>
void multiply_floats(const Tile& tile) {
  static constexpr auto kTable =
      multiply_table<Kind>(std::make_integer_sequence<int, kFloatTileRows>{});
  kTable[tile.num_rows - 1](tile);
}

inline void pack_float32(const float* columns, int K, uint8_t* panel) {
  std::copy(columns, columns + static_cast<size_t>(K) * kPanel, reinterpret_cast<float*>(panel));
}

inline void unpack_float32(const uint8_t* panel, int K, int column, float* out) {
  const float* values = reinterpret_cast<const float*>(panel) + column;
  for (int k = 0; k < K; ++k) out[k] = values[static_cast<size_t>(k) * kPanel];
}

inline void pack_bfloat16(const float* columns, int K, uint8_t* panel) {
  uint16_t* out = reinterpret_cast<uint16_t*>(panel);
  for (int k = 0; k < K + K % 2; ++k)
    for (int n = 0; n < kPanel; ++n)
      out[(static_cast<size_t>(k / 2) * kPanel + n) * 2 + k % 2] =
          k < K ? bf16_of(columns[static_cast<size_t>(k) * kPanel + n]) : uint16_t{0};
}

inline void unpack_bfloat16(const uint8_t* panel, int K, int column, float* out) {
  const uint16_t* values = reinterpret_cast<const uint16_t*>(panel) + 2 * column;
  for (int k = 0; k < K; ++k)
    out[k] = float_of_bf16(values[static_cast<size_t>(k / 2) * (2 * kPanel) + k % 2]);
}

inline size_t no_row_bytes(int) { return 0; }

inline size_t bfloat16_row_bytes(int K) { return align_up(2 * static_cast<size_t>(K), 64); }

inline void prepare_bfloat16(const float* x, int K, uint8_t* row) {
  uint16_t* out = reinterpret_cast<uint16_t*>(row);
  int k = 0;
  for (; k + kLanes <= K; k += kLanes) store_bf16(out + k, load(x + k));
  if (k < K) store_bf16(out + k, load_first(x + k, K - k));
}

inline void prepare_bfloat16_panel(const PanelSums& sums, uint8_t* out, size_t row_stride) {
  for (int m = 0; m < sums.num_rows; ++m)
    prepare_bfloat16(sums.row(m, 0), kPanel, out + m * row_stride);
}

inline constexpr Format kFloat32Format = {
    "float32",    float_panel_bytes<Float32Kind>, pack_float32,   unpack_float32,
    no_row_bytes, nullptr,                        kFloatTileRows, multiply_floats<Float32Kind>};

inline constexpr Format kBfloat16Format = {"bfloat16",
                                           float_panel_bytes<Bfloat16Kind>,
                                           pack_bfloat16,
                                           unpack_bfloat16,
                                           bfloat16_row_bytes,
                                           prepare_bfloat16,
                                           kFloatTileRows,
                                           multiply_floats<Bfloat16Kind>,
                                           1,
                                           2 * kPanel,
                                           prepare_bfloat16_panel};

}  // namespace ns
