// Keys and values as the native int8 cache stores them, for tests that hold them to another's bytes.
//
// Standard input: int32 D, int32 rows, then rows x D floats. Standard output, for keys and then for
// values: rows x D int8, then rows uint16, the float16 scales.
#include <cstdio>
#include <vector>

#include "kv_cache.h"

int main() {
  int32_t size[2];
  if (std::fread(size, sizeof size, 1, stdin) != 1) return 1;
  const int D = size[0], rows = size[1], B = 16;
  std::vector<float> x(static_cast<size_t>(rows) * D);
  if (std::fread(x.data(), sizeof(float), x.size(), stdin) != x.size()) return 1;
  ns::KvCache cache(1, 1, D, B, (rows + B - 1) / B, NS_INT8);
  std::vector<int32_t> slots(rows);
  for (int row = 0; row < rows; ++row) slots[row] = row;
  cache.append(0, 0, x.data(), x.data(), D, slots.data(), rows);
  std::vector<int8_t> keys, values;
  std::vector<uint16_t> key_scales, value_scales;
  for (int row = 0; row < rows; ++row) {
    uint8_t* chunk = cache.chunk(0, row / B, 0);
    const int place = row % B;
    key_scales.push_back(cache.key_scales(chunk)[place]);
    value_scales.push_back(cache.value_scales(chunk)[place]);
    for (int d = 0; d < D; ++d) {
      // Keys: groups of 16 positions, [D/4][16][4], as k + 128; values: groups of 4, [D'][4].
      uint8_t key = cache.keys<uint8_t>(chunk)[(d / 4 * B + place) * 4 + d % 4];
      keys.push_back(static_cast<int8_t>(key - 128));
      const int8_t* group = cache.values<int8_t>(chunk) + place / 4 * 4 * cache.padded_head;
      values.push_back(group[d * 4 + place % 4]);
    }
  }
  std::fwrite(keys.data(), 1, keys.size(), stdout);
  std::fwrite(key_scales.data(), 2, key_scales.size(), stdout);
  std::fwrite(values.data(), 1, values.size(), stdout);
  std::fwrite(value_scales.data(), 2, value_scales.size(), stdout);
}
