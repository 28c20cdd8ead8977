// int8 and int4: packing, prepared rows and products, against plain loops in double precision over
// what was packed; every tile shape gives the same bits. The digest of the last line must be the
// same on every instruction set.

#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "check.h"
#include "gemm_int4.h"
#include "gemm_int8.h"

using namespace ns;

namespace {

struct FreeAligned {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<uint8_t, FreeAligned>;

Aligned aligned(size_t bytes) {
  return Aligned(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64)));
}

template <int kInputs>
double group_input(const uint8_t* row, int k) {
  const auto* group = ActivationGroup<kInputs>::at(row, k / kInputs);
  return static_cast<double>(group->values[k % kInputs]) * group->scale;
}

// Two panels of [K][32] columns and some rows, packed and prepared.
struct Product {
  const Format& format;
  int K, num_rows;
  std::vector<float> columns[2], x;
  size_t panel_bytes, row_bytes;
  Aligned panels, rows;

  Product(const Format& format, int K, int num_rows, uint64_t seed = 1)
      : format(format), K(K), num_rows(num_rows), panel_bytes(format.panel_bytes(K)) {
    Random random(seed * 100 + static_cast<uint64_t>(K));
    for (auto& panel : columns) panel = random.floats(static_cast<size_t>(K) * kPanel);
    x = random.floats(static_cast<size_t>(K) * num_rows);
    for (int i = 0; i < num_rows; ++i) x[static_cast<size_t>(i) * K] *= 30.0f;  // an outlier
    prepare();
  }

  void prepare() {
    panels = aligned(2 * panel_bytes);
    for (int p = 0; p < 2; ++p) format.pack(columns[p].data(), K, panels.get() + p * panel_bytes);
    size_t prepared = format.row_bytes(K);
    row_bytes = prepared ? prepared : sizeof(float) * K;
    rows = aligned(row_bytes * num_rows);
    for (int m = 0; m < num_rows; ++m)
      if (prepared)
        format.prepare(&x[static_cast<size_t>(m) * K], K, rows.get() + m * row_bytes);
      else
        std::memcpy(rows.get() + m * row_bytes, &x[static_cast<size_t>(m) * K], row_bytes);
  }

  // [num_rows][2 * kPanel] by tiles of `tile_rows` rows.
  std::vector<float> multiply(int tile_rows) const {
    std::vector<float> y(static_cast<size_t>(num_rows) * 2 * kPanel);
    std::vector<float> out(static_cast<size_t>(tile_rows) * kPanel);
    for (int p = 0; p < 2; ++p)
      for (int m = 0; m < num_rows; m += tile_rows) {
        int count = std::min(tile_rows, num_rows - m);
        const uint8_t* panel = panels.get() + p * panel_bytes;
        format.multiply({panel, K, rows.get() + m * row_bytes, row_bytes, count,
                         p == 0 ? panel : nullptr, out.data()});
        for (int i = 0; i < count; ++i)
          std::memcpy(&y[(static_cast<size_t>(m) + i) * 2 * kPanel + p * kPanel],
                      &out[static_cast<size_t>(i) * kPanel], sizeof(float) * kPanel);
      }
    return y;
  }

  std::vector<float> unpacked(int column) const {
    std::vector<float> out(static_cast<size_t>(K));
    const uint8_t* panel = panels.get() + column / kPanel * panel_bytes;
    format.unpack_column(panel, K, column % kPanel, out.data());
    return out;
  }

  // Row m as the product sees it.
  double input(int m, int k) const {
    if (!format.row_bytes(K)) return x[static_cast<size_t>(m) * K + k];
    const uint8_t* row = rows.get() + m * row_bytes;
    return &format == &kInt4Format ? group_input<kInt4Group>(row, k) : group_input<kInt8Group>(row, k);
  }
};

void check_product(const Format& format, int K) {
  Product product(format, K, 7);
  std::vector<float> y = product.multiply(format.tile_rows);
  for (int n = 0; n < 2 * kPanel; n += 5) {
    std::vector<float> w = product.unpacked(n);
    for (int m = 0; m < product.num_rows; ++m) {
      double sum = 0, size = 0;
      for (int k = 0; k < K; ++k) {
        sum += product.input(m, k) * w[k];
        size += std::fabs(product.input(m, k) * w[k]);
      }
      const float got = y[m * 2 * kPanel + n];
      CHECK(std::fabs(got - sum) <= 1e-6 * size, "%s K %d row %d column %d: %g, %g", format.name, K,
            m, n, got, sum);
    }
  }
}

void check_tiles(const Format& format, int K) {
  Product product(format, K, 7);
  std::vector<float> y = product.multiply(1);
  for (int rows = 1; rows <= format.tile_rows; ++rows)
    CHECK(same_bits(y, product.multiply(rows)), "%s K %d: tiles of %d rows", format.name, K, rows);
}

// As many rows as one tile of fp32 rows may have: few, some and many are multiplied in three ways.
void check_many_rows(int K) {
  Product product(kInt8OnlyFormat, K, kMaxTileRows);
  std::vector<float> y = product.multiply(1);
  for (int rows : {7, 12, 13, 25, 48, 49, 95, 96})
    CHECK(same_bits(y, product.multiply(rows)), "K %d: tiles of %d of many rows", K, rows);
}

// The error of packing: at most half a step a weight, and about what its bits allow on the whole.
void check_packing(const Format& format, int K, double most_relative) {
  Product product(format, K, 1);
  double missed = 0, size = 0;
  for (int n = 0; n < 2 * kPanel; ++n) {
    std::vector<float> w = product.unpacked(n);
    for (int k = 0; k < K; ++k) {
      double exact = product.columns[n / kPanel][static_cast<size_t>(k) * kPanel + n % kPanel];
      missed += (w[k] - exact) * (w[k] - exact);
      size += exact * exact;
    }
  }
  double relative = std::sqrt(missed / size);
  CHECK(relative < most_relative, "%s K %d: relative error %g", format.name, K, relative);
}

void check_rows() {
  Product product(kInt8Format, 100, 3);
  for (int m = 0; m < 3; ++m)
    for (int k = 0; k < 100; ++k) {
      double exact = product.x[m * 100 + k];
      double step = Int8Inputs::at(product.rows.get() + m * product.row_bytes, k / kInt8Group)->scale;
      CHECK(std::fabs(product.input(m, k) - exact) <= 0.51 * step, "row %d input %d", m, k);
    }
}

void check_zeros(const Format& format) {
  Product product(format, 64, 2);
  std::fill(product.columns[0].begin(), product.columns[0].end(), 0.0f);
  std::fill(product.x.begin(), product.x.begin() + 64, 0.0f);
  product.prepare();
  std::vector<float> y = product.multiply(2);
  for (int n = 0; n < kPanel; ++n)
    CHECK(y[n] == 0.0f && y[2 * kPanel + n] == 0.0f && y[kPanel + n] == 0.0f, "%s zeros, column %d",
          format.name, n);
}

void check_unfinite(const Format& format, float unfinite) {
  Product product(format, 70, 2);
  product.x[69] = unfinite;
  product.prepare();
  std::vector<float> y = product.multiply(2);
  for (int n = 0; n < 2 * kPanel; ++n)
    CHECK(!std::isfinite(y[n]) && std::isfinite(y[2 * kPanel + n]), "%s %g, column %d", format.name,
          unfinite, n);
}

}  // namespace

int main() {
  FlushDenormals flush;
  Digest digest;
  for (const Format* format : {&kInt8Format, &kInt8OnlyFormat, &kInt4Format}) {
    for (int K : {1, 6, 32, 70, 256, 300, 768, 3072}) {
      check_product(*format, K);
      check_tiles(*format, K);
    }
    check_packing(*format, 768, format == &kInt4Format ? 0.09 : 0.008);
    check_zeros(*format);
    for (float unfinite : {INFINITY, NAN}) check_unfinite(*format, unfinite);
    digest.add(Product(*format, 300, 7).multiply(2));
  }
  for (int K : {6, 70, 300, 513}) check_many_rows(K);
  check_panels(kInt8Format);
  check_panels(kInt4Format);
  check_rows();
  std::printf("quantised digest %016llx\n", digest.value());
  return failures();
}
