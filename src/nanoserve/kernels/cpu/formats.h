// What a weight format is: how 32 columns of a matrix are packed, and multiplied with rows.
//
// A matrix [K][N] is a sequence of panels of 32 columns. A panel is one run of bytes that holds all
// its format needs (values, and scales if it has any), so that a product streams memory once, in
// order. A product never sees more than one panel and a few rows at a time; how many must not
// change a bit of any sum. Each format is one constant of type `Format`:
//
//   kFloat32Format, kBfloat16Format   gemm_float.h
//   kInt8Format, kInt8OnlyFormat      gemm_int8.h
//   kInt4Format                       gemm_int4.h
#pragma once

#include <cstddef>
#include <cstdint>

namespace ns {

constexpr int kPanel = 32;        // columns of a panel
constexpr int kPanelVectors = 2;  // ... and the vectors of sixteen lanes that they fill
constexpr int kBlockK = 256;      // inputs summed before a partial sum is added to the total
constexpr int kMaxTileRows = 96;  // no format takes more rows at once
constexpr int kMaxPreparedPanels = 2;  // ... or prepares more panels

// Some rows times one panel.
struct Tile {
  const uint8_t* panel;  // 64-byte aligned
  int K;
  const uint8_t* rows;  // prepared rows; row m at rows + m * row_stride
  size_t row_stride;    // bytes
  int num_rows;         // 1 .. tile_rows
  const uint8_t* next;  // what to prefetch, 64 bytes a step: half of a panel to come; may be null
  float* out;  // [num_rows][kPanel], every value written, without bias
  const uint8_t* target = nullptr;  // where finished row 0 will lie, to prefetch; may be null
  size_t target_stride = 0;         // bytes
};

// Finished results of some rows in adjacent panels.
struct PanelSums {
  const float* values;
  size_t panel_stride;  // floats
  int num_panels, num_rows;

  const float* row(int m, int panel) const { return values + panel_stride * panel + m * kPanel; }
};

struct Format {
  const char* name;

  // Bytes of a panel of K inputs, a multiple of 64.
  size_t (*panel_bytes)(int K);
  // `columns` [K][kPanel] in fp32; columns beyond the matrix are zero.
  void (*pack)(const float* columns, int K, uint8_t* panel);
  // One column back in fp32 (the embedding of a token is a column of the tied head): out [K].
  void (*unpack_column)(const uint8_t* panel, int K, int column, float* out);

  // Bytes of a prepared row of K inputs, a multiple of 64; 0: fp32 rows are taken as they are.
  size_t (*row_bytes)(int K);
  // One row of activations [K] in the form that `multiply` reads. Depends on this row alone.
  void (*prepare)(const float* x, int K, uint8_t* row);

  int tile_rows;  // most rows of one tile, <= kMaxTileRows
  void (*multiply)(const Tile& tile);

  // How many panels of results `prepare_panels` prepares at once, for whoever computes rows that this
  // format will read and stores them as `prepare` would: `prepared_bytes` of each row, row m's at
  // out + m * row_stride. Null where rows are taken as they are, and only there.
  int prepared_panels = 1;
  size_t prepared_bytes = 0;
  void (*prepare_panels)(const PanelSums& sums, uint8_t* out, size_t row_stride) = nullptr;
};

}  // namespace ns
