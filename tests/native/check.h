// What the C++ tests share: a check that counts, random numbers, bits, prepared panels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "formats.h"

inline int& failures() {
  static int count = 0;
  return count;
}

// Prints what failed and goes on; a test's main returns `failures()`.
#define CHECK(condition, ...)                                \
  do {                                                       \
    if (!(condition) && ++failures() <= 20) {                \
      std::printf("%s:%d: ", __FILE__, __LINE__);            \
      std::printf(__VA_ARGS__);                              \
      std::printf("\n");                                     \
    }                                                        \
  } while (0)

// The same numbers everywhere (std::normal_distribution differs between libraries).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint32_t bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 33);
  }
  int below(int n) { return static_cast<int>(bits() % static_cast<uint32_t>(n)); }
  // About normal, exact sums of integers so that no rounding differs.
  float number() {
    int sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<int>(bits() & 0xfffffu) - 0x80000;
    return static_cast<float>(sum) * 0x1p-20f;
  }
  std::vector<float> floats(size_t n) {
    std::vector<float> x(n);
    for (float& value : x) value = number();
    return x;
  }
  std::vector<int32_t> permutation(int n) {
    std::vector<int32_t> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    for (int i = n - 1; i > 0; --i) std::swap(order[i], order[below(i + 1)]);
    return order;
  }

 private:
  uint64_t state_;
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Rows prepared from panels of results, as whoever computes them stores them, have the bytes of rows
// prepared at once. Of five panels the last stands alone where two are prepared together.
inline void check_panels(const ns::Format& format) {
  constexpr int kPanels = 5, kRows = 3, K = kPanels * ns::kPanel;
  const std::vector<float> x = Random(8).floats(kRows * K);
  std::vector<float> values;  // [kPanels][kRows][kPanel]
  for (int p = 0; p < kPanels; ++p)
    for (int m = 0; m < kRows; ++m)
      values.insert(values.end(), &x[m * K + p * ns::kPanel], &x[m * K + p * ns::kPanel] + ns::kPanel);
  const size_t row_bytes = format.row_bytes(K), panel_stride = kRows * ns::kPanel;
  std::vector<uint8_t> at_once(kRows * row_bytes), by_panel(kRows * row_bytes);
  for (int m = 0; m < kRows; ++m) format.prepare(&x[m * K], K, &at_once[m * row_bytes]);
  for (int p = 0; p < kPanels; p += format.prepared_panels)
    format.prepare_panels({&values[p * panel_stride], panel_stride,
                           std::min(format.prepared_panels, kPanels - p), kRows},
                          &by_panel[p / format.prepared_panels * format.prepared_bytes], row_bytes);
  CHECK(by_panel == at_once, "%s: rows prepared from panels differ", format.name);
}

// FNV-1a over the bits of floats.
class Digest {
 public:
  void add(const std::vector<float>& values) {
    for (float value : values) {
      unsigned char bytes[sizeof value];
      std::memcpy(bytes, &value, sizeof value);
      for (unsigned char byte : bytes) value_ = (value_ ^ byte) * 0x100000001b3u;
    }
  }
  unsigned long long value() const { return value_; }

 private:
  unsigned long long value_ = 0xcbf29ce484222325u;
};
