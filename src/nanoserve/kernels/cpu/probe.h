// Loads that show what this machine can do at best, through the same threads and products as a step:
// a read of a long buffer, and one product in a weight format. They are ceilings, so nothing in them
// waits for anything but memory or arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "linear.h"
#include "memory.h"
#include "model.h"
#include "pool.h"
#include "simd.h"

namespace ns {

constexpr size_t kReadChunk = size_t{1} << 18;  // bytes a thread takes at once
constexpr size_t kReadLine = 256;               // ... and reads in one turn of the loop
constexpr size_t kReadAhead = 4096;

// The bitwise or of `bytes` (a multiple of kReadLine), which no compiler can leave out.
template <bool kFetches>
I32 read_all(const uint8_t* data, size_t bytes) {
  I32 sum[4] = {splat_i32(0), splat_i32(0), splat_i32(0), splat_i32(0)};
  for (size_t i = 0; i < bytes; i += kReadLine)
#pragma GCC unroll 4
    for (size_t line = 0; line < 4; ++line) {
      const uint8_t* at = data + i + 64 * line;
      if (kFetches) prefetch_l2(at + kReadAhead);
      sum[line] = sum[line] | load_i32(reinterpret_cast<const int32_t*>(at));
    }
  return (sum[0] | sum[1]) | (sum[2] | sum[3]);
}

// One product [M][K] times [K][N] of made-up numbers in a weight format.
class ProbeProduct {
 public:
  // Throws NoMemory, and std::invalid_argument for a size or format that is none.
  ProbeProduct(Pool& pool, int32_t weights, int32_t M, int32_t K, int32_t N) : M_(M), N_(N) {
    require(M >= 1 && K >= 1 && N >= 1 && std::max({M, K, N}) <= kMaxWidth,
            "a product's M, K and N must be at least 1 and at most " + std::to_string(kMaxWidth));
    matrix_.format = &format_of(weights);
    matrix_.K = K;
    matrix_.N = N;
    matrix_.panel_bytes = matrix_.format->panel_bytes(K);
    memory_ = Memory(matrix_.panel_bytes * matrix_.num_panels(), "a probe's matrix");
    matrix_.panels = memory_.data();
    pack(pool);
    prepare();
    sums_ = Memory(sizeof(float) * M * padded(N), "a probe's product");
  }

  void run(Pool& pool) {
    Output output;
    output.values = reinterpret_cast<float*>(sums_.data());
    output.row_bytes = sizeof(float) * padded(N_);
    multiply(pool, matrix_, nullptr, {rows_.data(), row_bytes_, M_}, output, 0);
  }

 private:
  static float made_up(size_t i) { return static_cast<float>(i * 7919 % 2001) * 1e-3f - 1.0f; }

  void pack(Pool& pool) {
    std::vector<float> columns(static_cast<size_t>(matrix_.K) * kPanel);
    for (size_t i = 0; i < columns.size(); ++i) columns[i] = made_up(i);
    pool.run(matrix_.num_panels(), [&](int panel, int) {
      matrix_.format->pack(columns.data(), matrix_.K, matrix_.panels + matrix_.panel_bytes * panel);
    });
  }

  void prepare() {
    const Format& format = *matrix_.format;
    const size_t prepared_bytes = format.row_bytes(matrix_.K);
    row_bytes_ = prepared_bytes ? prepared_bytes : sizeof(float) * padded(matrix_.K);
    rows_ = Memory(row_bytes_ * M_, "a probe's rows");
    std::vector<float> row(padded(matrix_.K));
    for (int m = 0; m < M_; ++m) {
      for (int k = 0; k < matrix_.K; ++k) row[k] = made_up(k + static_cast<size_t>(m) * 31);
      uint8_t* at = rows_.data() + row_bytes_ * m;
      if (prepared_bytes)
        format.prepare(row.data(), matrix_.K, at);
      else
        std::copy(row.begin(), row.end(), reinterpret_cast<float*>(at));
    }
  }

  const int M_, N_;
  Matrix matrix_;
  size_t row_bytes_ = 0;
  Memory memory_, rows_, sums_;
};

// Threads of its own, and at most one product.
class Probe {
 public:
  explicit Probe(int32_t num_threads)
      : pool_(new Pool(checked_threads(num_threads))), sums_(pool_->num_threads()) {}
  ~Probe() {
    if (pool_->belongs_to_another_process()) (void)pool_.release();  // see Pool
  }

  void read(const uint8_t* data, size_t bytes, bool fetches) {
    const FlushDenormals flush;
    pool_->run(static_cast<int>((bytes + kReadChunk - 1) / kReadChunk), [&](int chunk, int thread) {
      const size_t first = chunk * kReadChunk, count = std::min(kReadChunk, bytes - first);
      const I32 sum = fetches ? read_all<true>(data + first, count)
                              : read_all<false>(data + first, count);
      sums_[thread].value = sum;
    });
  }

  void put_product(int32_t weights, int32_t M, int32_t K, int32_t N) {
    product_.reset();  // first, so that two never stand side by side
    const FlushDenormals flush;
    product_ = std::make_unique<ProbeProduct>(*pool_, weights, M, K, N);
  }

  void multiply() {
    require(product_ != nullptr, "no product was put");
    const FlushDenormals flush;
    product_->run(*pool_);
  }

 private:
  struct alignas(64) Sum {
    I32 value;
  };

  std::unique_ptr<Pool> pool_;
  std::vector<Sum> sums_;  // one per thread
  std::unique_ptr<ProbeProduct> product_;
};

}  // namespace ns
