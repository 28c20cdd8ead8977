// The sixteen lanes as two AVX2 registers. See simd_portable.h for what each function means.
#pragma once

namespace ns {

constexpr const char* kIsa = "avx2";

struct F32 {
  __m256 low, high;
};
struct I32 {
  __m256i low, high;
};
struct Mask {
  __m256 low, high;  // all bits of a lane set, or none
};
struct Pairs {
  __m256i low, high;
};
struct Bytes {
  __m256i low, high;
};

inline __m256i load_256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline void store_256(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline __m256i lanes_below(int n, int first) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - first), index);
}

// Floats: memory.
inline F32 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline F32 load_first(const float* p, int n) {
  return {_mm256_maskload_ps(p, lanes_below(n, 0)), _mm256_maskload_ps(p + 8, lanes_below(n, 8))};
}
inline void store_first(float* p, F32 x, int n) {
  _mm256_maskstore_ps(p, lanes_below(n, 0), x.low);
  _mm256_maskstore_ps(p + 8, lanes_below(n, 8), x.high);
}
inline __m256 widen_bf16(const uint16_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F32 load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline __m256i round_bf16(__m256 x) {  // the 16 bits, low in each lane
  __m256i b = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), odd);
  __m256i magnitude = _mm256_and_si256(b, _mm256_set1_epi32(0x7fffffff));
  __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), magnitude);
  __m256i quiet = _mm256_or_si256(b, _mm256_set1_epi32(0x00400000));
  __m256i sign = _mm256_and_si256(b, _mm256_set1_epi32(INT32_MIN));
  up = _mm256_blendv_epi8(up, quiet, nan);
  return _mm256_srli_epi32(_mm256_blendv_epi8(up, sign, tiny), 16);
}
inline void store_bf16(uint16_t* p, F32 x) {
  __m256i mixed = _mm256_packus_epi32(round_bf16(x.low), round_bf16(x.high));
  store_256(p, _mm256_permute4x64_epi64(mixed, 0xd8));
}
inline F32 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_f16(uint16_t* p, F32 x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.low, kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.high, kNearest));
}

// Floats: arithmetic.
inline F32 operator+(F32 a, F32 b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline F32 operator-(F32 a, F32 b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline F32 operator*(F32 a, F32 b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline F32 operator/(F32 a, F32 b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline F32 fma(F32 a, F32 b, F32 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
inline F32 max(F32 a, F32 b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline F32 min(F32 a, F32 b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}

// Comparisons.
inline Mask less(F32 a, F32 b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)};
}
inline Mask less_equal(F32 a, F32 b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_LE_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LE_OQ)};
}
inline Mask equal(F32 a, F32 b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ)};
}
inline Mask first_lanes(int n) {
  return {_mm256_castsi256_ps(lanes_below(n, 0)), _mm256_castsi256_ps(lanes_below(n, 8))};
}
inline F32 select(Mask m, F32 yes, F32 no) {
  return {_mm256_blendv_ps(no.low, yes.low, m.low), _mm256_blendv_ps(no.high, yes.high, m.high)};
}
inline unsigned mask_bits(Mask m) {
  return static_cast<unsigned>(_mm256_movemask_ps(m.low)) |
         static_cast<unsigned>(_mm256_movemask_ps(m.high)) << 8;
}

// Integers.
inline I32 splat_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I32 load_i32(const int32_t* p) { return {load_256(p), load_256(p + 8)}; }
inline void store_i32(int32_t* p, I32 x) {
  store_256(p, x.low);
  store_256(p + 8, x.high);
}
inline I32 load_i8(const int8_t* p) {
  __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))};
}
inline I32 load_u8(const uint8_t* p) {
  __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))};
}
inline void store_i8(int8_t* p, I32 x) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
  __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline I32 operator+(I32 a, I32 b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
inline I32 operator-(I32 a, I32 b) {
  return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
inline I32 operator*(I32 a, I32 b) {
  return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
}
inline I32 operator&(I32 a, I32 b) {
  return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
inline I32 operator|(I32 a, I32 b) {
  return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
inline I32 operator^(I32 a, I32 b) {
  return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
}
template <int kCount>
inline I32 shift_left(I32 a) {
  return {_mm256_slli_epi32(a.low, kCount), _mm256_slli_epi32(a.high, kCount)};
}
template <int kCount>
inline I32 shift_right(I32 a) {
  return {_mm256_srli_epi32(a.low, kCount), _mm256_srli_epi32(a.high, kCount)};
}
template <int kCount>
inline I32 shift_right_signed(I32 a) {
  return {_mm256_srai_epi32(a.low, kCount), _mm256_srai_epi32(a.high, kCount)};
}

// Between the two.
inline F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline I32 to_int(F32 x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
inline I32 bits(F32 x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
inline F32 lookup(const float* sixteen, I32 index) {
  const __m256 first = _mm256_load_ps(sixteen), second = _mm256_load_ps(sixteen + 8);
  auto eight = [&](__m256i i) {  // three bits choose a lane, the fourth which eight
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, i), _mm256_permutevar8x32_ps(second, i),
                            _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
  };
  return {eight(index.low), eight(index.high)};
}
inline F32 float_from_bits(I32 x) {
  return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}

// Over the lanes.
inline float reduce_add(F32 x) {
  __m256 eight = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(F32 x) {
  __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// bf16 pairs.
inline Pairs load_pairs(const uint16_t* p) { return {load_256(p), load_256(p + 16)}; }
inline Pairs splat_pair(const uint16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
inline void store_pairs(uint16_t* p, Pairs x) {
  store_256(p, x.low);
  store_256(p + 16, x.high);
}
inline Pairs zip(const uint16_t* even, const uint16_t* odd) {
  const __m256i a = load_256(even), b = load_256(odd);
  const __m256i first = _mm256_unpacklo_epi16(a, b), second = _mm256_unpackhi_epi16(a, b);
  return {_mm256_permute2x128_si256(first, second, 0x20),
          _mm256_permute2x128_si256(first, second, 0x31)};
}
inline Pairs even_only(Pairs x) {
  const __m256i low = _mm256_set1_epi32(0xffff);
  return {_mm256_and_si256(x.low, low), _mm256_and_si256(x.high, low)};
}
inline __m256 dot_256(__m256 acc, __m256i a, __m256i b) {
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
  __m256 odd = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)),
                               _mm256_castsi256_ps(_mm256_and_si256(b, high)), acc);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
                         _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), odd);
}
inline F32 dot(F32 acc, Pairs a, Pairs b) {
  return {dot_256(acc.low, a.low, b.low), dot_256(acc.high, a.high, b.high)};
}

// Bytes.
inline Bytes load_bytes(const void* p) {
  const char* bytes = static_cast<const char*>(p);
  return {load_256(bytes), load_256(bytes + 32)};
}
inline Bytes splat_bytes(const void* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return {_mm256_set1_epi32(four), _mm256_set1_epi32(four)};
}
inline __m256i dot_256(__m256i acc, __m256i a, __m256i b) {
  // Not vpmaddubsw, which saturates: even and odd bytes as 16-bit numbers, products summed in 32.
  __m256i a_even = _mm256_and_si256(a, _mm256_set1_epi16(0xff));
  __m256i a_odd = _mm256_srli_epi16(a, 8);
  __m256i b_even = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8);
  __m256i b_odd = _mm256_srai_epi16(b, 8);
  __m256i sum = _mm256_add_epi32(acc, _mm256_madd_epi16(a_even, b_even));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a_odd, b_odd));
}
inline I32 dot(I32 acc, Bytes a, Bytes b) {
  return {dot_256(acc.low, a.low, b.low), dot_256(acc.high, a.high, b.high)};
}
inline Bytes bytes_from_bits(I32 x) { return {x.low, x.high}; }
inline I32 bits(Bytes x) { return {x.low, x.high}; }

inline void prefetch_l1(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace ns
