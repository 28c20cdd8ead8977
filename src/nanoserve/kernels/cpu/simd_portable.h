// The sixteen lanes as plain arrays: the definition the vector versions are held to.
//
// Compiled without hardware FMA this calls std::fma lane by lane: slow, and right.
#pragma once

namespace ns {

constexpr const char* kIsa = "portable";

struct F32 {
  float lane[kLanes];
};
struct I32 {
  int32_t lane[kLanes];
};
struct Mask {
  uint16_t bits;
};
struct Pairs {
  uint32_t lane[kLanes];
};
struct Bytes {
  uint32_t lane[kLanes];
};

template <class F>
inline F32 map_f32(F f) {
  F32 r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = f(i);
  return r;
}
template <class F>
inline I32 map_i32(F f) {
  I32 r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = static_cast<int32_t>(f(i));
  return r;
}
template <class F>
inline Mask map_mask(F f) {
  unsigned bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<unsigned>(f(i)) << i;
  return {static_cast<uint16_t>(bits)};
}

// Floats: memory.
inline F32 splat(float x) {
  return map_f32([&](int) { return x; });
}
inline F32 zero() { return splat(0.0f); }
inline F32 load(const float* p) {
  F32 r;
  std::memcpy(r.lane, p, sizeof r.lane);
  return r;
}
inline void store(float* p, F32 x) { std::memcpy(p, x.lane, sizeof x.lane); }
// The first `n` (0..16) lanes; the others are zero, their memory is not touched.
inline F32 load_first(const float* p, int n) {
  return map_f32([&](int i) { return i < n ? p[i] : 0.0f; });
}
inline void store_first(float* p, F32 x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x.lane[i];
}
inline F32 load_bf16(const uint16_t* p) {
  return map_f32([&](int i) { return float_of_bf16(p[i]); });
}
inline void store_bf16(uint16_t* p, F32 x) {
  for (int i = 0; i < kLanes; ++i) p[i] = bf16_of(x.lane[i]);
}
inline F32 load_f16(const uint16_t* p) {
  return map_f32([&](int i) { return float_of_f16(p[i]); });
}
inline void store_f16(uint16_t* p, F32 x) {
  for (int i = 0; i < kLanes; ++i) p[i] = f16_of(x.lane[i]);
}

// Floats: arithmetic, each operation rounded once.
inline F32 operator+(F32 a, F32 b) {
  return map_f32([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline F32 operator-(F32 a, F32 b) {
  return map_f32([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline F32 operator*(F32 a, F32 b) {
  return map_f32([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline F32 operator/(F32 a, F32 b) {
  return map_f32([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline F32 fma(F32 a, F32 b, F32 c) {  // a b + c, rounded once
  return map_f32([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
inline F32 sqrt(F32 a) {
  return map_f32([&](int i) { return std::sqrt(a.lane[i]); });
}
inline F32 max(F32 a, F32 b) {  // b where either is NaN
  return map_f32([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline F32 min(F32 a, F32 b) {  // b where either is NaN
  return map_f32([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}

// Comparisons: false where either is NaN.
inline Mask less(F32 a, F32 b) {
  return map_mask([&](int i) { return a.lane[i] < b.lane[i]; });
}
inline Mask less_equal(F32 a, F32 b) {
  return map_mask([&](int i) { return a.lane[i] <= b.lane[i]; });
}
inline Mask equal(F32 a, F32 b) {
  return map_mask([&](int i) { return a.lane[i] == b.lane[i]; });
}
inline Mask first_lanes(int n) {  // lanes below n; n may be outside 0..16
  return map_mask([&](int i) { return i < n; });
}
inline F32 select(Mask m, F32 yes, F32 no) {
  return map_f32([&](int i) { return (m.bits >> i) & 1 ? yes.lane[i] : no.lane[i]; });
}
inline unsigned mask_bits(Mask m) { return m.bits; }  // bit i: lane i

// Integers.
inline I32 splat_i32(int32_t x) {
  return map_i32([&](int) { return x; });
}
inline I32 load_i32(const int32_t* p) {
  I32 r;
  std::memcpy(r.lane, p, sizeof r.lane);
  return r;
}
inline void store_i32(int32_t* p, I32 x) { std::memcpy(p, x.lane, sizeof x.lane); }
inline I32 load_i8(const int8_t* p) {
  return map_i32([&](int i) { return p[i]; });
}
inline I32 load_u8(const uint8_t* p) {
  return map_i32([&](int i) { return p[i]; });
}
inline void store_i8(int8_t* p, I32 x) {  // saturates
  for (int i = 0; i < kLanes; ++i) {
    int32_t v = x.lane[i];
    p[i] = static_cast<int8_t>(v < -128 ? -128 : v > 127 ? 127 : v);
  }
}
inline uint32_t unsigned_lane(I32 x, int i) {  // so that an overflow wraps
  return static_cast<uint32_t>(x.lane[i]);
}
inline I32 operator+(I32 a, I32 b) {
  return map_i32([&](int i) { return unsigned_lane(a, i) + unsigned_lane(b, i); });
}
inline I32 operator-(I32 a, I32 b) {
  return map_i32([&](int i) { return unsigned_lane(a, i) - unsigned_lane(b, i); });
}
inline I32 operator*(I32 a, I32 b) {
  return map_i32([&](int i) { return unsigned_lane(a, i) * unsigned_lane(b, i); });
}
inline I32 operator&(I32 a, I32 b) {
  return map_i32([&](int i) { return a.lane[i] & b.lane[i]; });
}
inline I32 operator|(I32 a, I32 b) {
  return map_i32([&](int i) { return a.lane[i] | b.lane[i]; });
}
inline I32 operator^(I32 a, I32 b) {
  return map_i32([&](int i) { return a.lane[i] ^ b.lane[i]; });
}
template <int kCount>
inline I32 shift_left(I32 a) {
  return map_i32([&](int i) { return static_cast<uint32_t>(a.lane[i]) << kCount; });
}
template <int kCount>
inline I32 shift_right(I32 a) {  // logical
  return map_i32([&](int i) { return static_cast<uint32_t>(a.lane[i]) >> kCount; });
}
template <int kCount>
inline I32 shift_right_signed(I32 a) {
  return map_i32([&](int i) { return a.lane[i] >> kCount; });
}

// Between the two.
inline F32 to_float(I32 x) {
  return map_f32([&](int i) { return static_cast<float>(x.lane[i]); });
}
inline I32 to_int(F32 x) {  // to nearest, ties to even; INT32_MIN where it does not fit
  return map_i32([&](int i) {
    float r = std::nearbyint(x.lane[i]);
    return r >= -2147483648.0f && r < 2147483648.0f ? static_cast<int32_t>(r) : INT32_MIN;
  });
}
inline I32 bits(F32 x) {
  I32 r;
  std::memcpy(r.lane, x.lane, sizeof r.lane);
  return r;
}
// Of sixteen 64-byte aligned floats, that of each index modulo 16.
inline F32 lookup(const float* sixteen, I32 index) {
  return map_f32([&](int i) { return sixteen[index.lane[i] & 15]; });
}
inline F32 float_from_bits(I32 x) {
  F32 r;
  std::memcpy(r.lane, x.lane, sizeof r.lane);
  return r;
}

// Over the lanes: i + (i + 8), then + 4, + 2, + 1.
inline float reduce_add(F32 x) {
  for (int width = 8; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) x.lane[i] = x.lane[i] + x.lane[i + width];
  return x.lane[0];
}
inline float reduce_max(F32 x) {
  for (int width = 8; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i)
      x.lane[i] = x.lane[i] > x.lane[i + width] ? x.lane[i] : x.lane[i + width];
  return x.lane[0];
}

// bf16 pairs: acc + odd a * odd b, rounded, then + even a * even b, rounded.
inline Pairs load_pairs(const uint16_t* p) {
  Pairs r;
  std::memcpy(r.lane, p, sizeof r.lane);
  return r;
}
inline Pairs splat_pair(const uint16_t* p) {
  uint32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  Pairs r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = pair;
  return r;
}
inline void store_pairs(uint16_t* p, Pairs x) { std::memcpy(p, x.lane, sizeof x.lane); }
inline Pairs zip(const uint16_t* even, const uint16_t* odd) {  // a pair of each of 16 columns
  Pairs r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = even[i] | static_cast<uint32_t>(odd[i]) << 16;
  return r;
}
inline Pairs even_only(Pairs x) {  // zero is the odd one of each pair
  for (uint32_t& pair : x.lane) pair &= 0xffffu;
  return x;
}
inline F32 dot(F32 acc, Pairs a, Pairs b) {
  return map_f32([&](int i) {
    float odd = std::fma(float_of(a.lane[i] & 0xffff0000u), float_of(b.lane[i] & 0xffff0000u),
                         acc.lane[i]);
    return std::fma(float_of(a.lane[i] << 16), float_of(b.lane[i] << 16), odd);
  });
}

// Four unsigned bytes of a times four signed bytes of b, summed into acc; exact modulo 2^32.
inline Bytes load_bytes(const void* p) {
  Bytes r;
  std::memcpy(r.lane, p, sizeof r.lane);
  return r;
}
inline Bytes splat_bytes(const void* p) {  // the four bytes at p, sixteen times
  uint32_t four;
  std::memcpy(&four, p, sizeof four);
  Bytes r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = four;
  return r;
}
inline I32 dot(I32 acc, Bytes a_unsigned, Bytes b_signed) {
  return map_i32([&](int i) {
    uint32_t sum = static_cast<uint32_t>(acc.lane[i]);
    for (int byte = 0; byte < 4; ++byte) {
      int32_t a = static_cast<uint8_t>(a_unsigned.lane[i] >> (8 * byte));
      int32_t b = static_cast<int8_t>(b_signed.lane[i] >> (8 * byte));
      sum += static_cast<uint32_t>(a * b);
    }
    return sum;
  });
}
inline Bytes bytes_from_bits(I32 x) {
  Bytes r;
  std::memcpy(r.lane, x.lane, sizeof r.lane);
  return r;
}
inline I32 bits(Bytes x) {
  I32 r;
  std::memcpy(r.lane, x.lane, sizeof r.lane);
  return r;
}

inline void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace ns
