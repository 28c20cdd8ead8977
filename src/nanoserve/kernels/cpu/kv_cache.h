// Keys and values in the format they are stored in, and where each of them lies.
//
// Positions live in blocks of B, as `engine.batch.StepBatch` numbers them. What one head stores in
// one block is a chunk: its keys, its values and, in int8, a scale for each of them.
//
//   keys    groups of 16 positions, the last of a block maybe narrower (`width`):
//           floats [D][width], int8 [D/4][width][4] (as k + 128: one side of an integer product is
//           unsigned), so that 16 keys are the lanes of one register
//   values  floats [B][D'], D' = D rounded up to 16; int8 groups of 4 positions [D'][width]
//   scales  int8 only: float16 [B] of the keys, then [B] of the values
//
// A layout with blocks of one position therefore stores plain rows, and one with blocks of a
// multiple of 16 the tiles that attention reads in place. Nothing read depends on what an unused
// position holds. A page of memory exists once it is written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "memory.h"
#include "ns.h"
#include "quantise.h"
#include "simd.h"

namespace ns {

constexpr int kRowsAhead = 3;  // how far ahead of its use a row of activations is asked for

constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// `width` positions of a block from `start` on, stored side by side; `lane` is the one asked for.
struct KvGroup {
  int start, width, lane;
};

inline KvGroup group_of(int offset, int unit, int block_size) {
  int start = offset / unit * unit;
  return {start, std::min(unit, block_size - start), offset - start};
}

// The element types. Keys move in units of KeyUnit (int8: four values), values in groups of
// kValueGroup positions.
template <class Element>
struct FloatKv {
  using Stored = Element;
  using KeyUnit = Element;
  static constexpr int kValueGroup = 1;
  static int key_units(int head_size) { return head_size; }
};
struct Float32Kv : FloatKv<float> {
  static F32 load(const Stored* p) { return ns::load(p); }
  static void store(Stored* p, F32 x) { ns::store(p, x); }
};
struct Bfloat16Kv : FloatKv<uint16_t> {
  static F32 load(const Stored* p) { return load_bf16(p); }
  static void store(Stored* p, F32 x) { store_bf16(p, x); }
};
struct Float16Kv : FloatKv<uint16_t> {
  static F32 load(const Stored* p) { return load_f16(p); }
  static void store(Stored* p, F32 x) { store_f16(p, x); }
};
struct Int8Kv {
  using Stored = int8_t;
  using KeyUnit = uint32_t;
  // Sixteen units as they are; only ever moved.
  static F32 load(const KeyUnit* p) { return ns::load(reinterpret_cast<const float*>(p)); }
  static void store(KeyUnit* p, F32 x) { ns::store(reinterpret_cast<float*>(p), x); }
  static constexpr int kValueGroup = 4;
  static int key_units(int head_size) { return (head_size + 3) / 4; }
};

class KvCache {
 public:
  // `dtype` is an NsDtype; of no blocks, it holds nothing. Throws NoMemory.
  KvCache(int num_layers, int num_heads, int head_size, int block_size, int num_blocks, int dtype)
      : num_layers(num_layers), num_heads(num_heads), head_size(head_size),
        padded_head(round_up(head_size, kLanes)), block_size(block_size), num_blocks(num_blocks),
        dtype(dtype) {
    size_t element = dtype == NS_FLOAT32 ? 4 : dtype == NS_INT8 ? 1 : 2;
    size_t key_bytes = (dtype == NS_INT8 ? round_up(head_size, 4) : head_size) * element;
    values_at_ = block_size * key_bytes;
    scales_at_ = values_at_ + block_size * padded_head * element;
    chunk_bytes_ = scales_at_ + (dtype == NS_INT8 ? 2 * sizeof(uint16_t) * block_size : 0);
    memory_ = Memory(static_cast<size_t>(nbytes()),
                     "the KV cache (--kv-cache-memory-bytes, --max-num-seqs, --max-model-len)");
  }

  int64_t nbytes() const {
    return static_cast<int64_t>(chunk_bytes_) * num_layers * num_blocks * num_heads;
  }

  // Where head `head` of a layer keeps block `block`, and the parts of that chunk.
  uint8_t* chunk(int layer, int block, int head) const {
    size_t index = (static_cast<size_t>(layer) * num_blocks + block) * num_heads + head;
    return memory_.data() + index * chunk_bytes_;
  }
  template <class Stored>
  static Stored* keys(uint8_t* chunk) {
    return reinterpret_cast<Stored*>(chunk);
  }
  template <class Stored>
  Stored* values(uint8_t* chunk) const {
    return reinterpret_cast<Stored*>(chunk + values_at_);
  }
  uint16_t* key_scales(uint8_t* chunk) const {
    return reinterpret_cast<uint16_t*>(chunk + scales_at_);
  }
  uint16_t* value_scales(uint8_t* chunk) const { return key_scales(chunk) + block_size; }

  // Block `source` over block `destination` in every layer; before any append of a step.
  void copy_block(int source, int destination) {
    for (int layer = 0; layer < num_layers; ++layer)
      std::memcpy(chunk(layer, destination, 0), chunk(layer, source, 0), chunk_bytes_ * num_heads);
  }

  // NaN in every key and value of a block (int8: in every scale).
  void poison(int block) {
    for (int layer = 0; layer < num_layers; ++layer)
      for (int head = 0; head < num_heads; ++head) poison_chunk(chunk(layer, block, head));
  }

  // Store one head of some rows: row i's D values start at k + i * stride and v + i * stride and go
  // to slot slots[i]. Threads may append different heads at once.
  void append(int layer, int head, const float* k, const float* v, int64_t stride,
              const int32_t* slots, int num_rows) {
    for (int row = 0; row < num_rows; ++row, k += stride, v += stride) {
      fetch_row(k + kRowsAhead * stride);
      fetch_row(v + kRowsAhead * stride);
      uint8_t* target = chunk(layer, slots[row] / block_size, head);
      int offset = slots[row] % block_size;
      switch (dtype) {
        case NS_FLOAT32: write_floats<Float32Kv>(target, offset, k, v); break;
        case NS_BFLOAT16: write_floats<Bfloat16Kv>(target, offset, k, v); break;
        case NS_FLOAT16: write_floats<Float16Kv>(target, offset, k, v); break;
        default: write_int8(target, offset, k, v);
      }
    }
  }

  const int num_layers, num_heads;
  const int head_size, padded_head;  // D, D'
  const int block_size, num_blocks;
  const int dtype;

 private:
  // One head of rows that lie far apart: no hardware guesses the next.
  void fetch_row(const float* x) const {
    for (int d = 0; d < head_size; d += kLanes) prefetch_l1(x + d);
  }

  template <class Kv>
  void write_floats(uint8_t* target, int offset, const float* k, const float* v) {
    using Stored = typename Kv::Stored;
    KvGroup group = group_of(offset, kLanes, block_size);
    Stored* key = keys<Stored>(target) + group.start * head_size + group.lane;
    Stored* value = values<Stored>(target) + offset * padded_head;
    for (int d = 0; d < head_size; d += kLanes) {
      int count = std::min(kLanes, head_size - d);
      Stored column[kLanes];
      Kv::store(column, load_first(k + d, count));
      for (int i = 0; i < count; ++i) key[(d + i) * group.width] = column[i];
      Kv::store(value + d, load_first(v + d, count));
    }
  }

  void write_int8(uint8_t* target, int offset, const float* k, const float* v) {
    KvGroup keys16 = group_of(offset, kLanes, block_size);
    KvGroup values4 = group_of(offset, 4, block_size);
    int8_t* key = keys<int8_t>(target) + keys16.start * round_up(head_size, 4) + keys16.lane * 4;
    KvScale key_scale = kv_scale(k, head_size), value_scale = kv_scale(v, head_size);
    key_scales(target)[offset] = key_scale.half;
    value_scales(target)[offset] = value_scale.half;
    for (int d = 0; d < head_size; d += kLanes) {
      int count = std::min(kLanes, head_size - d);
      int8_t row[kLanes];
      store_low_bytes(row, quantise_kv(load_first(k + d, count), key_scale) + splat_i32(128));
      for (int i = 0; i < count; i += 4)
        std::memcpy(key + (d + i) * keys16.width, row + i, 4);
      const I32 steps = quantise_kv(load_first(v + d, count), value_scale);
      put_among(values<int8_t>(target) + values4.start * padded_head + d * values4.width, values4,
                steps);
    }
  }

  // Sixteen bytes of one position into its group's [16][width]. Four positions share each int32:
  // one masked store in place of sixteen single bytes.
  static void put_among(int8_t* bytes, const KvGroup& group, I32 x) {
    if (group.width != 4) {
      int8_t row[kLanes];
      store_i8(row, x);
      for (int i = 0; i < kLanes; ++i) bytes[i * group.width + group.lane] = row[i];
      return;
    }
    I32 put = x & splat_i32(255), replaced = splat_i32(255);
    for (int i = 0; i < group.lane; ++i)
      put = shift_left<8>(put), replaced = shift_left<8>(replaced);
    int32_t* four = reinterpret_cast<int32_t*>(bytes);
    store_i32(four, (load_i32(four) & (replaced ^ splat_i32(-1))) | put);
  }

  void poison_chunk(uint8_t* target) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    if (dtype == NS_FLOAT32)
      std::fill(keys<float>(target), keys<float>(target + chunk_bytes_), nan);
    else if (dtype == NS_INT8)
      std::fill(key_scales(target), value_scales(target) + block_size, f16_of(nan));
    else  // 0x7fff is a NaN in both 16-bit formats
      std::fill(keys<uint16_t>(target), keys<uint16_t>(target + chunk_bytes_), uint16_t{0x7fff});
  }

  Memory memory_;
  size_t values_at_, scales_at_, chunk_bytes_;
};

}  // namespace ns
