// Attention of consecutive queries of one sequence and one head, over keys and values as stored.
//
// For a query that sees N keys, with q' = q * scale rounded once:
//
//   s[t] = q' . k[t]            one lane a key: blocks of 256 d, fused, ascending, added in order
//   p[t] = exp(s[t] - max s)    lanes beyond N are exact zeros
//   l    = sum of p             lane i adds p[i], p[16 + i], ... in order; then `reduce_add`
//   o[d] = sum of p[t] v[t][d]  blocks of 256 t, fused and ascending, added in order; times 1 / l
//
// Nothing in it knows of other queries, of blocks or of tiles: a query alone, in a prefill and in
// any layout gives the same bits. Tiles below decide speed only.
//
// bf16 multiplies pairs: q' and p[t] are rounded to bf16 as well, d and t go two at a time, the odd
// one first (docs/EXACTNESS.md); the last of an odd number is paired with zero. l is a sum of the
// p[t] before they are rounded.
//
// int8 multiplies integers, so its sums are exact in any order. A query is two signed bytes a value
// (q' = unit * (128 high + low)); so are the weights p[t] * scale of v[t] (unit * (256 high + low),
// unsigned). What is lost there is far below what int8 keys and values lost already.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "formats.h"
#include "kv_cache.h"
#include "memory.h"
#include "quantise.h"
#include "simd.h"
#include "transpose.h"
#include "vmath.h"

namespace ns {

constexpr int kQueryChunk = 64;               // queries that share what is read of the cache
constexpr int kKeyTiles = 4;                  // tiles of 16 keys multiplied at once
constexpr int kSpan = kKeyTiles * kLanes;     // ... and the keys in them
constexpr int kValueTiles = kBlockK / kLanes;  // tiles of 16 values in one block of a sum
constexpr int kTilesAhead = kKeyTiles;         // how far ahead of its use memory is asked for
constexpr int kManyQueries = 8;  // so many share tiles that were brought into a better form first

// The last query sees `context_len` keys, the one before it one less, and so on: a prefill may be
// cut into tasks anywhere; cuts at multiples of kQueryChunk rows are the cheapest.
struct AttendTask {
  int layer, head;
  const int32_t* table;  // the sequence's row of block_tables
  int context_len;       // keys that the last query sees
  int num_queries;
  const float* q;  // query i's D values at q + i * q_stride
  int64_t q_stride;
  float* out;  // query i's result [D] at out + i * out_stride
  int64_t out_stride;
  float scale;  // of this layer's scores
};

// Where 16 consecutive positions of a sequence are: from `offset` in block number `block` of its
// table, `whole` if they lie side by side there.
struct TilePlace {
  int block, offset;
  bool whole;
};

// One head of one sequence as tiles of 16 positions: read in place where the cache stores a whole
// tile side by side, gathered into `staging` where blocks cut it. Positions from `context_len` on
// are never gathered: nobody knows what their slots hold.
template <class Kv>
class KvTiles {
 public:
  using Stored = typename Kv::Stored;
  using KeyUnit = typename Kv::KeyUnit;

  KvTiles(const KvCache& cache, const AttendTask& task, int context_len, TilePlace* places)
      : cache_(cache), task_(task), context_len_(context_len), places_(places) {
    int block = 0, offset = 0;  // counted up: divisions here would cost more than the products
    for (int first = 0; first < context_len; first += kLanes) {
      const bool whole = offset % kLanes == 0 && offset + kLanes <= cache.block_size;
      *places++ = {block, offset, whole};
      for (offset += kLanes; offset >= cache.block_size; offset -= cache.block_size) ++block;
    }
  }

  const KeyUnit* keys(int tile, KeyUnit* staging) const {
    const int count = Kv::key_units(cache_.head_size);
    if (places_[tile].whole)
      return KvCache::keys<KeyUnit>(chunk(tile)) + places_[tile].offset * count;
    if (cache_.block_size == 1 && filled(tile) == kLanes && count % kLanes == 0) {
      gather_rows(tile, count, staging);
      return staging;
    }
    each_lane(tile, [&](int lane, uint8_t* chunk, int offset) {
      const KvGroup group = group_of(offset, kLanes, cache_.block_size);
      const KeyUnit* stored = KvCache::keys<KeyUnit>(chunk) + group.start * count + group.lane;
      for (int i = 0; i < count; ++i) staging[i * kLanes + lane] = stored[i * group.width];
    });
    return staging;
  }

  const Stored* values(int tile, Stored* staging) const {
    constexpr int kUnit = Kv::kValueGroup;
    const int count = cache_.padded_head;
    if (places_[tile].whole)
      return cache_.values<Stored>(chunk(tile)) + places_[tile].offset * count;
    each_lane(tile, [&](int lane, uint8_t* chunk, int offset) {
      const KvGroup group = group_of(offset, kUnit, cache_.block_size);
      const Stored* stored = cache_.values<Stored>(chunk) + group.start * count + group.lane;
      Stored* gathered = staging + lane / kUnit * kUnit * count + lane % kUnit;
      if (kUnit == 1)
        std::copy_n(stored, count, gathered);
      else
        for (int i = 0; i < count; ++i) gathered[i * kUnit] = stored[i * group.width];
    });
    return staging;
  }

  // Asks for a tile that will be read soon: blocks lie anywhere, so no hardware guesses them.
  void prefetch_keys(int tile) const {
    if (tile * kLanes >= context_len_) return;
    const int count = Kv::key_units(cache_.head_size);
    if (places_[tile].whole)
      return prefetch(keys(tile, nullptr), kLanes * count * sizeof(KeyUnit));
    each_lane(tile, [&](int, uint8_t* chunk, int offset) {
      if (offset == 0 && cache_.block_size < kLanes)
        prefetch(chunk, cache_.block_size * count * sizeof(KeyUnit));
    });
  }
  void prefetch_values(int tile) const {
    if (tile * kLanes >= context_len_) return;
    const size_t row_bytes = cache_.padded_head * sizeof(Stored);
    if (places_[tile].whole) return prefetch(values(tile, nullptr), kLanes * row_bytes);
    each_lane(tile, [&](int, uint8_t* chunk, int offset) {
      prefetch(reinterpret_cast<uint8_t*>(cache_.values<Stored>(chunk)) + offset * row_bytes,
               row_bytes);
    });
  }

  // int8: the scales of a tile as floats; zero beyond the context.
  F32 key_scales(int tile) const {
    return scales(tile, [this](uint8_t* chunk) { return cache_.key_scales(chunk); });
  }
  F32 value_scales(int tile) const {
    return scales(tile, [this](uint8_t* chunk) { return cache_.value_scales(chunk); });
  }

 private:
  static void prefetch(const void* p, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) prefetch_l2(static_cast<const uint8_t*>(p) + i);
  }
  // A whole tile of keys, each a row of its own.
  void gather_rows(int tile, int count, KeyUnit* staging) const {
    const KeyUnit* keys[kLanes];
    each_lane(tile, [&](int lane, uint8_t* chunk, int) {
      keys[lane] = KvCache::keys<KeyUnit>(chunk);
    });
    for (int d = 0; d < count; d += kLanes) {
      F32 rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = Kv::load(keys[i] + d);
      transpose(rows);
      for (int i = 0; i < kLanes; ++i) Kv::store(staging + (d + i) * kLanes, rows[i]);
    }
  }

  uint8_t* chunk_of(int block) const {
    return cache_.chunk(task_.layer, task_.table[block], task_.head);
  }
  uint8_t* chunk(int tile) const { return chunk_of(places_[tile].block); }
  int filled(int tile) const { return std::min(kLanes, context_len_ - tile * kLanes); }

  // visit(lane, chunk, offset) for each position of a tile that the sequence has.
  template <class Visit>
  void each_lane(int tile, Visit visit) const {
    int block = places_[tile].block, offset = places_[tile].offset;
    for (int lane = 0; lane < filled(tile); ++lane, ++offset) {
      if (offset == cache_.block_size) offset = 0, ++block;
      visit(lane, chunk_of(block), offset);
    }
  }

  template <class Part>
  F32 scales(int tile, Part part) const {
    if (places_[tile].whole && filled(tile) == kLanes)
      return load_f16(part(chunk(tile)) + places_[tile].offset);
    uint16_t gathered[kLanes] = {};
    each_lane(tile, [&](int lane, uint8_t* chunk, int offset) {
      gathered[lane] = part(chunk)[offset];
    });
    return load_f16(gathered);
  }

  const KvCache& cache_;
  const AttendTask& task_;
  const int context_len_;
  const TilePlace* places_;
};

// Scores [N] -> weights, handed on sixteen at a time: keep(i, weights i .. i + 15), those beyond N
// zero, for every i below `padded`. Returns 1 / their sum.
template <class Keep>
inline float softmax(const float* scores, int context_len, int padded, Keep keep) {
  const F32 nothing = splat(-std::numeric_limits<float>::infinity());
  F32 largest = nothing;
  for (int i = 0; i < context_len; i += kLanes)
    largest = max(largest, select(first_lanes(context_len - i), load(scores + i), nothing));
  F32 top = splat(reduce_max(largest)), sum = zero();
  for (int i = 0; i < context_len; i += kLanes) {
    F32 weight = exp(load(scores + i) - top);
    weight = select(first_lanes(context_len - i), weight, zero());
    sum = sum + weight;
    keep(i, weight);
  }
  for (int i = round_up(context_len, kLanes); i < padded; i += kLanes) keep(i, zero());
  return 1.0f / reduce_add(sum);
}

// Adds one block's sum to the total; the first one's becomes the total.
inline void add_block(float* total, F32 sum, bool is_first) {
  store(total, is_first ? sum : load(total) + sum);
}
inline void add_block(int32_t* total, I32 sum, bool is_first) {
  store_i32(total, is_first ? sum : load_i32(total) + sum);
}

// Whether a tile is the one before it once more: a chunk's last stands for those it has not.
template <class Element>
inline bool is_repeated(const Element* const* tiles, int t) {
  return t > 0 && tiles[t] == tiles[t - 1];
}

// Calls visit(number, d) for all columns of a head: `number` vectors of them at once, from d on.
template <class Visit>
inline void each_columns(int padded_head, Visit visit) {
  int d = 0;
  for (; d + 4 * kLanes <= padded_head; d += 4 * kLanes)
    visit(std::integral_constant<int, 4>{}, d);
  for (; d < padded_head; d += kLanes) visit(std::integral_constant<int, 1>{}, d);
}

// fp32 and fp16 keys and values: products and sums of floats.
template <class Kv>
class FloatMath {
 public:
  using Stored = typename Kv::Stored;
  static constexpr int kRows = 4;  // queries of a register tile

  FloatMath(const KvCache& cache, int /*padded_context*/, Arena& arena)
      : head_size_(cache.head_size), padded_head_(cache.padded_head),
        q_(arena.take<float>(static_cast<size_t>(kQueryChunk) * cache.padded_head)),
        mixed_(arena.take<float>(static_cast<size_t>(kQueryChunk) * cache.padded_head)),
        widened_(arena.take<float>(static_cast<size_t>(kIsWide ? 0 : kBlockK) *
                                   cache.padded_head)) {}

  void begin(const KvTiles<Kv>&, int /*num_tiles*/) {}

  void prepare(int row, const float* q, float scale) {
    for (int d = 0; d < head_size_; d += kLanes)
      store(q_ + row * padded_head_ + d,
            load_first(q + d, std::min(kLanes, head_size_ - d)) * splat(scale));
  }

  // Calls multiply(elements, tiles) with tiles [tile_rows][row_size] in the form that suits
  // `num_queries`: for many, floats that were converted once, not every few queries. The values are
  // the same.
  template <class Multiply>
  void with_tiles(const Stored* const* tiles, int num_tiles, int tile_rows, int row_size,
                  int num_queries, Multiply multiply) {
    if (kIsWide || num_queries < kManyQueries) return multiply(Kv{}, tiles);
    const float* widened[kValueTiles];
    const int size = tile_rows * row_size;
    for (int t = 0; t < num_tiles; ++t) {
      if (is_repeated(tiles, t)) {
        widened[t] = widened[t - 1];
        continue;
      }
      float* out = widened_ + t * size;
      widened[t] = out;
      for (int i = 0; i < size; i += kLanes) store(out + i, Kv::load(tiles[t] + i));
    }
    multiply(Float32Kv{}, widened);
  }

  // Scores of `kCount` queries with kKeyTiles tiles of keys.
  template <int kCount, class Elements>
  void score(Elements, int row, const typename Elements::Stored* const* tiles, int /*first_tile*/,
             float* scores, size_t stride) const {
    const float* q = q_ + row * padded_head_;
    for (int block = 0; block < head_size_; block += kBlockK) {
      F32 sum[kCount][kKeyTiles];
      for (auto& query : sum)
        for (F32& lanes : query) lanes = zero();
      int end = std::min(head_size_, block + kBlockK);
      for (int d = block; d < end; ++d) {
        F32 key[kKeyTiles];
#pragma GCC unroll 4
        for (int t = 0; t < kKeyTiles; ++t) key[t] = Elements::load(tiles[t] + d * kLanes);
#pragma GCC unroll 4
        for (int m = 0; m < kCount; ++m) {
          F32 x = splat(q[m * padded_head_ + d]);
#pragma GCC unroll 4
          for (int t = 0; t < kKeyTiles; ++t) sum[m][t] = fma(x, key[t], sum[m][t]);
        }
      }
      for (int m = 0; m < kCount; ++m)
        for (int t = 0; t < kKeyTiles; ++t)
          add_block(scores + m * stride + t * kLanes, sum[m][t], block == 0);
    }
  }

  // The scores of `seen` keys become the weights of their values, zeros up to `padded`; returns 1 over
  // what the weights add up to.
  float weigh(int /*row*/, float* scores, int seen, int padded) {
    return softmax(scores, seen, padded, [&](int i, F32 weight) { store(scores + i, weight); });
  }

  // Add the block of positions from `first` on; query `row` sees `seen` keys, the next one more.
  // `fetch(tile)` asks for a tile; one query alone waits for memory, several wait for sums.
  template <int kCount, class Elements, class Fetch>
  void mix(Elements, int row, const typename Elements::Stored* const* tiles, int first, int seen,
           const float* weights, size_t stride, Fetch fetch) {
    each_columns(padded_head_, [&](auto vectors, int d) {
      mix_vectors<Elements, kCount, vectors>(row, d, tiles, first, seen, weights, stride, fetch);
    });
  }

  F32 result(int row, int d, float inverse_sum) const {
    return load(mixed_ + row * padded_head_ + d) * splat(inverse_sum);
  }

 private:
  static constexpr bool kIsWide = std::is_same_v<Stored, float>;

  template <class Elements, int kCount, int kVectors, class Fetch>
  void mix_vectors(int row, int d, const typename Elements::Stored* const* tiles, int first,
                   int seen, const float* weights, size_t stride, Fetch fetch) {
    F32 sum[kCount][kVectors];
    for (auto& query : sum)
      for (F32& lanes : query) lanes = zero();
    const int shared = std::max(0, std::min(kBlockK, seen - first));
    const int end = std::min(kBlockK, seen + kCount - 1 - first);
    for (int t = 0; t < shared;) {
      const auto* value = value_at(tiles, t, d);
      if (kCount == 1 && d == 0) fetch(t / kLanes + kTilesAhead);
      for (int stop = std::min(shared, t + kLanes); t < stop; ++t, value += padded_head_) {
        F32 v[kVectors];
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) v[c] = Elements::load(value + c * kLanes);
#pragma GCC unroll 4
        for (int m = 0; m < kCount; ++m) {
          F32 p = splat(weights[m * stride + t]);
#pragma GCC unroll 4
          for (int c = 0; c < kVectors; ++c) sum[m][c] = fma(p, v[c], sum[m][c]);
        }
      }
    }
    for (int t = shared; t < end; ++t) {  // what only later queries see: 0 times NaN is no zero
      const auto* value = value_at(tiles, t, d);
#pragma GCC unroll 4
      for (int m = 1; m < kCount; ++m)
        if (first + t < seen + m) {
          F32 p = splat(weights[m * stride + t]);
#pragma GCC unroll 4
          for (int c = 0; c < kVectors; ++c)
            sum[m][c] = fma(p, Elements::load(value + c * kLanes), sum[m][c]);
        }
    }
    for (int m = 0; m < kCount; ++m) {
      if (seen + m <= first) continue;  // it sees nothing of this block: -0 + 0 would be 0
      for (int c = 0; c < kVectors; ++c)
        add_block(mixed_ + (row + m) * padded_head_ + d + c * kLanes, sum[m][c], first == 0);
    }
  }

  template <class Element>
  const Element* value_at(const Element* const* tiles, int t, int d) const {
    return tiles[t / kLanes] + t % kLanes * padded_head_ + d;
  }

  const int head_size_, padded_head_;
  float *q_, *mixed_;  // [kQueryChunk][D']
  float* widened_;     // fp16: tiles as floats, up to [kBlockK][D']
};

// Pairs of rows `row` (even) and `row + 1`, sixteen columns from `column` on. `odd` false: no second
// row counts, whatever is there; zero stands for it. From rows as stored, or woven beforehand.
struct StoredRows {
  static Pairs pair(const uint16_t* tile, int row, int row_size, int column, bool odd) {
    const uint16_t* even = tile + row * row_size + column;
    return odd ? zip(even, even + row_size) : even_only(zip(even, even));
  }
};
struct WovenRows {
  static Pairs pair(const uint16_t* tile, int row, int row_size, int column, bool odd) {
    const Pairs both = load_pairs(tile + row * row_size + 2 * column);
    return odd ? both : even_only(both);
  }
};

// bf16 keys and values, with queries and weights rounded to bf16: two products in one.
class PairMath {
 public:
  static constexpr int kRows = 4;  // queries of a register tile

  PairMath(const KvCache& cache, int padded_context, Arena& arena)
      : head_size_(cache.head_size), padded_head_(cache.padded_head), context_(padded_context),
        q_(arena.take<uint16_t>(static_cast<size_t>(kQueryChunk) * cache.padded_head)),
        weights_(arena.take<uint16_t>(static_cast<size_t>(kQueryChunk) * padded_context)),
        mixed_(arena.take<float>(static_cast<size_t>(kQueryChunk) * cache.padded_head)),
        woven_(arena.take<uint16_t>(static_cast<size_t>(kBlockK) * cache.padded_head)) {}

  void begin(const KvTiles<Bfloat16Kv>&, int /*num_tiles*/) {}

  void prepare(int row, const float* q, float scale) {
    for (int d = 0; d < head_size_; d += kLanes)
      store_bf16(q_ + row * padded_head_ + d,
                 load_first(q + d, std::min(kLanes, head_size_ - d)) * splat(scale));
  }

  // See FloatMath: for many queries, rows are woven once.
  template <class Multiply>
  void with_tiles(const uint16_t* const* tiles, int num_tiles, int tile_rows, int row_size,
                  int num_queries, Multiply multiply) {
    if (num_queries < kManyQueries) return multiply(StoredRows{}, tiles);
    const uint16_t* woven[kValueTiles];
    const int size = round_up(tile_rows, 2) * row_size;
    for (int t = 0; t < num_tiles; ++t) {
      if (is_repeated(tiles, t)) {
        woven[t] = woven[t - 1];
        continue;
      }
      uint16_t* out = woven_ + t * size;
      woven[t] = out;
      for (int row = 0; row < tile_rows; row += 2)
        for (int column = 0; column < row_size; column += kLanes, out += 2 * kLanes)
          store_pairs(out, StoredRows::pair(tiles[t], row, row_size, column, row + 1 < tile_rows));
    }
    multiply(WovenRows{}, woven);
  }

  template <int kCount, class Rows>
  void score(Rows, int row, const uint16_t* const* tiles, int /*first_tile*/, float* scores,
             size_t stride) const {
    const uint16_t* q = q_ + row * padded_head_;
    for (int block = 0; block < head_size_; block += kBlockK) {
      F32 sum[kCount][kKeyTiles];
      for (auto& query : sum)
        for (F32& lanes : query) lanes = zero();
      auto add_pair = [&](int d, bool odd) {
        Pairs key[kKeyTiles];
#pragma GCC unroll 4
        for (int t = 0; t < kKeyTiles; ++t) key[t] = Rows::pair(tiles[t], d, kLanes, 0, odd);
#pragma GCC unroll 4
        for (int m = 0; m < kCount; ++m) {
          const Pairs x = splat_pair(q + m * padded_head_ + d);
#pragma GCC unroll 4
          for (int t = 0; t < kKeyTiles; ++t) sum[m][t] = dot(sum[m][t], x, key[t]);
        }
      };
      const int end = std::min(head_size_, block + kBlockK);
      int d = block;
      for (; d + 1 < end; d += 2) add_pair(d, true);
      if (d < end) add_pair(d, false);
      for (int m = 0; m < kCount; ++m)
        for (int t = 0; t < kKeyTiles; ++t)
          add_block(scores + m * stride + t * kLanes, sum[m][t], block == 0);
    }
  }

  // See FloatMath; rounded as they come.
  float weigh(int row, const float* scores, int seen, int padded) {
    uint16_t* rounded = weights_ + row * static_cast<size_t>(context_);
    return softmax(scores, seen, padded,
                   [&](int i, F32 weight) { store_bf16(rounded + i, weight); });
  }

  // See FloatMath.
  template <int kCount, class Rows, class Fetch>
  void mix(Rows, int row, const uint16_t* const* tiles, int first, int seen, const float*,
           size_t, Fetch fetch) {
    each_columns(padded_head_, [&](auto vectors, int d) {
      mix_vectors<Rows, kCount, vectors>(row, d, tiles, first, seen, fetch);
    });
  }

  F32 result(int row, int d, float inverse_sum) const {
    return load(mixed_ + row * padded_head_ + d) * splat(inverse_sum);
  }

 private:
  template <class Rows, int kCount, int kVectors, class Fetch>
  void mix_vectors(int row, int d, const uint16_t* const* tiles, int first, int seen, Fetch fetch) {
    F32 sum[kCount][kVectors];
    for (auto& query : sum)
      for (F32& lanes : query) lanes = zero();
    const uint16_t* weights = weights_ + row * static_cast<size_t>(context_) + first;
    auto value = [&](int t, int c, bool odd) {
      return Rows::pair(tiles[t / kLanes], t % kLanes, padded_head_, d + c * kLanes, odd);
    };
    const int shared = std::max(0, std::min(kBlockK, seen - first)) / 2 * 2;
    const int end = std::min(kBlockK, seen + kCount - 1 - first);
    for (int t = 0; t < shared; t += 2) {
      if (kCount == 1 && d == 0 && t % kLanes == 0) fetch(t / kLanes + kTilesAhead);
      Pairs v[kVectors];
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) v[c] = value(t, c, true);
#pragma GCC unroll 4
      for (int m = 0; m < kCount; ++m) {
        const Pairs p = splat_pair(weights + m * static_cast<size_t>(context_) + t);
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) sum[m][c] = dot(sum[m][c], p, v[c]);
      }
    }
    for (int t = shared; t < end; t += 2)  // what not every query sees: 0 times NaN is no zero
#pragma GCC unroll 4
      for (int m = 0; m < kCount; ++m) {
        const int left = seen + m - first - t;
        if (left <= 0) continue;
        const Pairs p = splat_pair(weights + m * static_cast<size_t>(context_) + t);
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) sum[m][c] = dot(sum[m][c], p, value(t, c, left > 1));
      }
    for (int m = 0; m < kCount; ++m) {
      if (seen + m <= first) continue;  // it sees nothing of this block: -0 + 0 would be 0
      for (int c = 0; c < kVectors; ++c)
        add_block(mixed_ + (row + m) * padded_head_ + d + c * kLanes, sum[m][c], first == 0);
    }
  }

  const int head_size_, padded_head_, context_;
  uint16_t* q_;        // [kQueryChunk][D']
  uint16_t* weights_;  // [kQueryChunk][padded context]
  float* mixed_;       // [kQueryChunk][D']
  uint16_t* woven_;    // tiles of woven rows, up to [kBlockK][D']
};

// Keys and values as bytes; queries and weights as two bytes each.
class Int8Math {
 public:
  static constexpr int kRows = 2;  // queries of a register tile

  Int8Math(const KvCache& cache, int padded_context, Arena& arena)
      : head_size_(cache.head_size), padded_head_(cache.padded_head), context_(padded_context),
        q_(arena.take<int8_t>(static_cast<size_t>(2 * kQueryChunk) * cache.padded_head)),
        queries_(arena.take<Query>(kQueryChunk)),
        key_scales_(arena.take<float>(padded_context)),
        value_scales_(arena.take<float>(padded_context)),
        weights_(arena.take<uint8_t>(static_cast<size_t>(2 * kQueryChunk) * padded_context)),
        weight_units_(arena.take<float>(kQueryChunk)),
        mixed_(arena.take<int32_t>(static_cast<size_t>(2 * kQueryChunk) * cache.padded_head)) {}

  void begin(const KvTiles<Int8Kv>& tiles, int num_tiles) {
    for (int tile = 0; tile < num_tiles; ++tile) {
      store(key_scales_ + tile * kLanes, tiles.key_scales(tile));
      store(value_scales_ + tile * kLanes, tiles.value_scales(tile));
    }
  }

  void prepare(int row, const float* q, float scale) {
    int8_t* high = q_high(row);
    float largest = magnitude(q, head_size_) * std::fabs(scale);
    float steps = largest > kTiny ? kQuerySteps / largest : 0.0f;
    I32 high_sum = splat_i32(0), low_sum = splat_i32(0);
    for (int d = 0; d < padded_head_; d += kLanes) {
      F32 x = load_first(q + d, std::max(0, std::min(kLanes, head_size_ - d)));
      I32 step = to_int((x * splat(scale)) * splat(steps));
      I32 upper = shift_right_signed<7>(step + splat_i32(64));
      store_i8(high + d, upper);
      store_i8(high + padded_head_ + d, step - shift_left<7>(upper));
      high_sum = high_sum + load_i8(high + d);
      low_sum = low_sum + load_i8(high + padded_head_ + d);
    }
    queries_[row] = {largest / kQuerySteps, -128 * sum_of(high_sum), -128 * sum_of(low_sum)};
  }

  // See FloatMath: bytes are multiplied as they are.
  template <class Element, class Multiply>
  void with_tiles(const Element* const* tiles, int, int, int, int, Multiply multiply) {
    multiply(Int8Kv{}, tiles);
  }

  template <int kCount>
  void score(Int8Kv, int row, const uint32_t* const* tiles, int first_tile, float* scores,
             size_t stride) const {
    I32 high[kCount][kKeyTiles], low[kCount][kKeyTiles];
    for (int m = 0; m < kCount; ++m)
      for (int t = 0; t < kKeyTiles; ++t) {
        high[m][t] = splat_i32(queries_[row + m].high_bias);
        low[m][t] = splat_i32(queries_[row + m].low_bias);
      }
    const int8_t* q = q_high(row);
    for (int d = 0; d < head_size_; d += 4) {
      Bytes key[kKeyTiles];
#pragma GCC unroll 4
      for (int t = 0; t < kKeyTiles; ++t) key[t] = load_bytes(tiles[t] + d / 4 * kLanes);
#pragma GCC unroll 4
      for (int m = 0; m < kCount; ++m) {
        Bytes upper = splat_bytes(q + 2 * m * padded_head_ + d);
        Bytes lower = splat_bytes(q + (2 * m + 1) * padded_head_ + d);
#pragma GCC unroll 4
        for (int t = 0; t < kKeyTiles; ++t) {
          high[m][t] = dot(high[m][t], key[t], upper);
          low[m][t] = dot(low[m][t], key[t], lower);
        }
      }
    }
    for (int m = 0; m < kCount; ++m)
      for (int t = 0; t < kKeyTiles; ++t) {
        F32 unit = splat(queries_[row + m].unit) * load(key_scales_ + (first_tile + t) * kLanes);
        F32 steps = fma(to_float(high[m][t]), splat(128.0f), to_float(low[m][t]));
        store(scores + m * stride + t * kLanes, steps * unit);
      }
  }

  // See FloatMath: p[t] * scale of v[t], as two bytes and a unit of their own for this query.
  float weigh(int row, float* scores, int seen, int padded) {
    F32 largest = zero(), unfinite = zero();
    const float inverse_sum = softmax(scores, seen, padded, [&](int i, F32 weight) {
      weight = weight * load(value_scales_ + i);
      weight = select(first_lanes(seen - i), weight, zero());  // 0 times an unseen NaN is no zero
      largest = max(largest, weight);
      unfinite = fma(weight, zero(), unfinite);
      store(scores + i, weight);
    });
    float top = reduce_max(largest);
    float steps = top > kTiny ? kWeightSteps / top : 0.0f;
    weight_units_[row] = top / kWeightSteps + reduce_add(unfinite);
    uint8_t* high = weight_high(row);
    for (int i = 0; i < padded; i += kLanes) {
      I32 step = to_int(load(scores + i) * splat(steps));
      store_low_bytes(high + i, shift_right<8>(step));
      store_low_bytes(high + context_ + i, step & splat_i32(255));
    }
    return inverse_sum;
  }

  // Weights of positions that a query does not see are zero bytes: they add nothing.
  template <int kCount, class Fetch>
  void mix(Int8Kv, int row, const int8_t* const* tiles, int first, int seen, const float*, size_t,
           Fetch fetch) {
    const int count = std::min(kBlockK, seen + kCount - 1 - first);
    each_columns(padded_head_, [&](auto vectors, int d) {
      mix_vectors<kCount, vectors>(row, d, tiles, first, count, fetch);
    });
  }

  F32 result(int row, int d, float inverse_sum) const {
    const int32_t* high = mixed_ + 2 * row * padded_head_ + d;
    F32 steps = fma(to_float(load_i32(high)), splat(256.0f),
                    to_float(load_i32(high + padded_head_)));
    return steps * splat(weight_units_[row] * inverse_sum);
  }

 private:
  // Keys are stored as k + 128: the biases take 128 times the query's bytes away again.
  struct Query {
    float unit;
    int32_t high_bias, low_bias;
  };
  // Sums of a few hundred bytes: exact as floats.
  static int32_t sum_of(I32 bytes) { return static_cast<int32_t>(reduce_add(to_float(bytes))); }

  static constexpr float kQuerySteps = 127.0f * 128.0f;
  static constexpr float kWeightSteps = 65535.0f;

  int8_t* q_high(int row) const { return q_ + 2 * row * padded_head_; }
  uint8_t* weight_high(int row) const { return weights_ + 2 * row * static_cast<size_t>(context_); }

  template <int kCount, int kVectors, class Fetch>
  void mix_vectors(int row, int d, const int8_t* const* tiles, int first, int count,
                   Fetch fetch) {
    I32 high[kCount][kVectors], low[kCount][kVectors];
    for (int m = 0; m < kCount; ++m)
      for (int c = 0; c < kVectors; ++c) high[m][c] = low[m][c] = splat_i32(0);
    const uint8_t* weights = weight_high(row) + first;
    for (int t = 0; t < count; t += 4) {
      if (kCount == 1 && d == 0 && t % kLanes == 0) fetch(t / kLanes + kTilesAhead);
      const int8_t* value = tiles[t / kLanes] + t % kLanes * padded_head_ + 4 * d;
      Bytes v[kVectors];
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) v[c] = load_bytes(value + 4 * c * kLanes);
#pragma GCC unroll 4
      for (int m = 0; m < kCount; ++m) {
        Bytes upper = splat_bytes(weights + 2 * m * static_cast<size_t>(context_) + t);
        Bytes lower = splat_bytes(weights + (2 * m + 1) * static_cast<size_t>(context_) + t);
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) {
          high[m][c] = dot(high[m][c], upper, v[c]);
          low[m][c] = dot(low[m][c], lower, v[c]);
        }
      }
    }
    for (int m = 0; m < kCount; ++m)
      for (int c = 0; c < kVectors; ++c) {
        int32_t* total = mixed_ + 2 * (row + m) * padded_head_ + d + c * kLanes;
        add_block(total, high[m][c], first == 0);
        add_block(total + padded_head_, low[m][c], first == 0);
      }
  }

  const int head_size_, padded_head_, context_;
  int8_t* q_;       // [kQueryChunk][2][D'], high bytes then low bytes
  Query* queries_;  // [kQueryChunk]
  float *key_scales_, *value_scales_;  // [padded context]
  uint8_t* weights_;                   // [kQueryChunk][2][padded context]
  float* weight_units_;                // [kQueryChunk]
  int32_t* mixed_;                     // [kQueryChunk][2][D']
};

template <class Kv>
struct MathOf {
  using Type = FloatMath<Kv>;
};
template <>
struct MathOf<Bfloat16Kv> {
  using Type = PairMath;
};
template <>
struct MathOf<Int8Kv> {
  using Type = Int8Math;
};

// At most kQueryChunk queries of a task, in one thread's scratch.
template <class Kv>
class ChunkAttention {
 public:
  using Stored = typename Kv::Stored;
  using KeyUnit = typename Kv::KeyUnit;
  using Math = typename MathOf<Kv>::Type;

  ChunkAttention(const KvCache& cache, int max_context, Arena arena)
      : cache_(cache), context_(round_up(max_context, kSpan) + kLanes), arena_(arena),
        math_(cache, context_, arena_),
        scores_(arena_.take<float>(static_cast<size_t>(kQueryChunk) * context_)),
        inverse_sums_(arena_.take<float>(kQueryChunk)),
        key_staging_(arena_.take<KeyUnit>(static_cast<size_t>(kSpan) * cache.head_size)),
        value_staging_(arena_.take<Stored>(static_cast<size_t>(kBlockK) * cache.padded_head)),
        places_(arena_.take<TilePlace>(context_ / kLanes)) {}

  size_t scratch_bytes() const { return arena_.used(); }

  // Queries first .. first + count - 1 of the task.
  void run(const AttendTask& task, int first, int count) {
    count_ = count;
    seen_ = task.context_len - (task.num_queries - first - count);
    KvTiles<Kv> tiles(cache_, task, seen_, places_);
    int num_tiles = round_up(seen_, kLanes) / kLanes;
    math_.begin(tiles, num_tiles);
    for (int row = 0; row < count; ++row) {
      const float* q = task.q + (first + row) * task.q_stride;
      for (int d = 0; d < cache_.head_size; d += kLanes)
        prefetch_l1(q + kRowsAhead * task.q_stride + d);
      math_.prepare(row, q, task.scale);
    }
    score(tiles, num_tiles);
    for (int t = 0; t < kKeyTiles; ++t) tiles.prefetch_values(t);
    for (int row = 0; row < count; ++row) {
      inverse_sums_[row] =
          math_.weigh(row, scores_of(row), seen_by(row), num_tiles * kLanes);
    }
    mix(tiles, num_tiles);
    for (int row = 0; row < count; ++row)
      write(row, task.out + (first + row) * task.out_stride);
  }

 private:
  int seen_by(int row) const { return seen_ - (count_ - 1 - row); }
  float* scores_of(int row) const { return scores_ + row * static_cast<size_t>(context_); }

  void score(const KvTiles<Kv>& tiles, int num_tiles) {
    for (int first = 0; first < num_tiles; first += kKeyTiles) {
      const KeyUnit* keys[kKeyTiles];
      for (int t = 0; t < kKeyTiles; ++t) {  // beyond the last tile: the last once more
        int tile = std::min(first + t, num_tiles - 1);
        keys[t] = tile == first + t ? tiles.keys(tile, key_staging_ + t * kLanes * cache_.head_size)
                                    : keys[t - 1];
        tiles.prefetch_keys(first + kKeyTiles + t);
      }
      auto score_rows = [&](auto elements, auto* const* tiles_of_keys) {
        each_rows(first * kLanes, [&](auto rows, int row) {
          math_.template score<rows>(elements, row, tiles_of_keys, first,
                                     scores_of(row) + first * kLanes, context_);
        });
      };
      const int num_units = Kv::key_units(cache_.head_size);
      math_.with_tiles(keys, kKeyTiles, num_units, kLanes, count_, score_rows);
    }
  }

  // Calls visit(number, row) for the queries that see `position`: a register tile of them at once,
  // or one.
  template <class Visit>
  void each_rows(int position, Visit visit) {
    for (int row = 0; row < count_;) {
      const bool several = row + Math::kRows <= count_;
      const int rows = several ? Math::kRows : 1;
      if (seen_by(row + rows - 1) > position) {
        if (several)
          visit(std::integral_constant<int, Math::kRows>{}, row);
        else
          visit(std::integral_constant<int, 1>{}, row);
      }
      row += rows;
    }
  }

  void mix(const KvTiles<Kv>& tiles, int num_tiles) {
    const int tile_size = kLanes * cache_.padded_head;
    for (int first = 0; first < num_tiles; first += kValueTiles) {
      const Stored* values[kValueTiles];
      const int count = std::min(kValueTiles, num_tiles - first);
      for (int t = 0; t < count; ++t)
        values[t] = tiles.values(first + t, value_staging_ + t * tile_size);
      const int position = first * kLanes;
      auto fetch = [&](int tile) { tiles.prefetch_values(first + tile); };
      auto mix_rows = [&](auto elements, auto* const* tiles_of_values) {
        each_rows(position, [&](auto rows, int row) {
          math_.template mix<rows>(elements, row, tiles_of_values, position, seen_by(row),
                                   scores_of(row) + position, context_, fetch);
        });
      };
      math_.with_tiles(values, count, kLanes, cache_.padded_head, count_, mix_rows);
    }
  }

  void write(int row, float* out) const {
    for (int d = 0; d < cache_.head_size; d += kLanes)
      store_first(out + d, math_.result(row, d, inverse_sums_[row]),
                  std::min(kLanes, cache_.head_size - d));
  }

  const KvCache& cache_;
  const int context_;  // the longest context, rounded up; no power of two, rows share no cache set
  Arena arena_;
  Math math_;
  float* scores_;  // [kQueryChunk][context_]
  float* inverse_sums_;
  KeyUnit* key_staging_;
  Stored* value_staging_;
  TilePlace* places_;
  int count_ = 0, seen_ = 0;  // queries of this chunk, and the keys its last one sees
};

// Calls `body` with the type of the cache's format.
template <class Body>
auto with_format(const KvCache& cache, Body body) {
  switch (cache.dtype) {
    case NS_FLOAT32: return body(Float32Kv{});
    case NS_BFLOAT16: return body(Bfloat16Kv{});
    case NS_FLOAT16: return body(Float16Kv{});
    default: return body(Int8Kv{});
  }
}

// Bytes of scratch, 64-byte aligned, a thread needs for tasks of up to `max_context` keys.
inline size_t attend_scratch_bytes(const KvCache& cache, int max_context) {
  return with_format(cache, [&](auto kv) {
    return ChunkAttention<decltype(kv)>(cache, max_context, Arena(nullptr)).scratch_bytes();
  });
}

inline void attend(const KvCache& cache, const AttendTask& task, void* scratch) {
  with_format(cache, [&](auto kv) {
    ChunkAttention<decltype(kv)> chunk(cache, task.context_len, Arena(scratch));
    for (int first = 0; first < task.num_queries; first += kQueryChunk)
      chunk.run(task, first, std::min(kQueryChunk, task.num_queries - first));
  });
}

}  // namespace ns
