// A whole linear layer: tiles over rows and panels, shared out to the threads, and what happens to
// each sum on its way to memory (bias, residual, activation).
#pragma once

#include <algorithm>

#include "formats.h"
#include "model.h"
#include "pool.h"
#include "simd.h"
#include "vmath.h"

namespace ns {

enum class Then { kStore, kAdd, kActivate };

// What becomes of sums [M][N]: out = sums + bias, out += sums + bias, or out = act(sums + bias).
struct Output {
  Then then = Then::kStore;
  void* values = nullptr;  // row m at values + m * row_bytes: padded(N) floats, or what `reader` reads
  size_t row_bytes = 0;
  int32_t activation = 0;
  const Format* reader = nullptr;  // kActivate only: rows are stored as this format prepares them
  bool is_dense = false;  // kStore only: rows have N values, the next row follows at once

  // Panels that are finished together, and the bytes of each row that hold them.
  int panels_at_once() const { return reader ? reader->prepared_panels : 1; }
  size_t group_bytes() const { return reader ? reader->prepared_bytes : sizeof(float) * kPanel; }
  uint8_t* at(int row, int group) const {
    return static_cast<uint8_t*>(values) + row_bytes * row + group_bytes() * group;
  }
};

// Rows of activations as the matrix's format reads them.
struct Rows {
  const uint8_t* data;
  size_t stride;  // bytes
  int count;      // M
};

constexpr int kRowTilesPerChunk = 8;

// Finish one panel's sums [num_rows][kPanel].
template <class Use>
inline void finish_panel(const float* sums, const float* bias, int num_rows, Use&& use) {
  for (int half = 0; half < kPanel; half += kLanes) {
    const F32 added = bias ? load(bias + half) : zero();
    for (int m = 0; m < num_rows; ++m) use(m, half, load(sums + m * kPanel + half) + added);
  }
}

// One panel's sums as they are wanted, to `out`; a row that is prepared afterwards is finished in place.
inline void finish(float* sums, const float* bias, int num_rows, const Output& output,
                   uint8_t* out) {
  float* values = output.reader ? sums : reinterpret_cast<float*>(out);
  const size_t stride = output.reader ? kPanel : output.row_bytes / sizeof(float);
  switch (output.then) {
    case Then::kStore:
      return finish_panel(sums, bias, num_rows,
                          [&](int m, int half, F32 y) { store(values + m * stride + half, y); });
    case Then::kAdd:
      return finish_panel(sums, bias, num_rows, [&](int m, int half, F32 y) {
        float* at = values + m * stride + half;
        store(at, load(at) + y);
      });
    case Then::kActivate:
      with_activation(output.activation, [&](auto act) {
        finish_panel(sums, bias, num_rows,
                     [&](int m, int half, F32 y) { store(values + m * stride + half, act(y)); });
      });
  }
}

// The last panel of dense rows: what lies beyond its columns is the next row's.
inline void finish_columns(float* sums, const float* bias, int num_rows, int num_columns,
                           const Output& output, uint8_t* out) {
  Output whole = output;
  whole.row_bytes = sizeof(float) * kPanel;
  finish(sums, bias, num_rows, whole, reinterpret_cast<uint8_t*>(sums));
  for (int m = 0; m < num_rows; ++m)
    std::copy_n(sums + m * kPanel, num_columns,
                reinterpret_cast<float*>(out + output.row_bytes * m));
}

// How the work on M rows is cut. Nothing here changes a bit of a result.
struct Partition {
  int tile_rows;          // of each tile but the last
  int rows_per_chunk;     // a multiple of tile_rows
  int num_row_chunks;

  Partition(const Format& format, int M, int limit) {
    const int most = limit > 0 ? std::min(limit, format.tile_rows) : format.tile_rows;
    const int num_tiles = (M + most - 1) / most;
    tile_rows = (M + num_tiles - 1) / num_tiles;
    rows_per_chunk = tile_rows * kRowTilesPerChunk;
    num_row_chunks = (M + rows_per_chunk - 1) / rows_per_chunk;
  }
};

// output = rows [M][K] times matrix [K][N]. `tile_limit` 0: the format's own tiles.
inline void multiply(Pool& pool, const Matrix& matrix, const float* bias, const Rows& rows,
                     const Output& output, int tile_limit) {
  const Format& format = *matrix.format;
  const Partition cut(format, rows.count, tile_limit);
  const int at_once = output.panels_at_once(), num_panels = matrix.num_panels();
  const int num_groups = (num_panels + at_once - 1) / at_once;

  pool.run(num_groups * cut.num_row_chunks, [&](int chunk, int) {
    alignas(64) float sums[kMaxPreparedPanels][kMaxTileRows * kPanel];
    const int group = chunk / cut.num_row_chunks;
    const int first_panel = group * at_once;
    const int end_panel = std::min(num_panels, first_panel + at_once);
    const int first = chunk % cut.num_row_chunks * cut.rows_per_chunk;
    const int end = std::min(rows.count, first + cut.rows_per_chunk);
    // Where a panel is used by several tiles, the first two fetch one half each of a panel to come.
    const bool fetches = first == 0 && rows.count > cut.tile_rows;

    Tile tile;
    tile.K = matrix.K;
    tile.row_stride = rows.stride;
    tile.target_stride = output.row_bytes;
    for (int row = first; row < end; row += cut.tile_rows) {
      tile.rows = rows.data + rows.stride * row;
      tile.num_rows = std::min(cut.tile_rows, end - row);
      uint8_t* out = output.at(row, group);
      tile.target = out;
      for (int panel = first_panel; panel < end_panel; ++panel, tile.target = nullptr) {
        tile.panel = matrix.panels + matrix.panel_bytes * panel;
        const int half = row / cut.tile_rows;  // as long as it is 0 or 1
        tile.next = fetches && half < 2 && panel + at_once < num_panels
                        ? tile.panel + matrix.panel_bytes * at_once + half * (matrix.panel_bytes / 2)
                        : nullptr;
        tile.out = sums[panel - first_panel];
        format.multiply(tile);
        const int column = panel * kPanel;
        const float* added = bias ? bias + column : nullptr;
        if (output.is_dense && column + kPanel > matrix.N)
          finish_columns(tile.out, added, tile.num_rows, matrix.N - column, output, out);
        else
          finish(tile.out, added, tile.num_rows, output, out);
      }
      if (output.reader)
        output.reader->prepare_panels(
            {sums[0], kMaxTileRows * kPanel, end_panel - first_panel, tile.num_rows}, out,
            output.row_bytes);
    }
  });
}

}  // namespace ns
