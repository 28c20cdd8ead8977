// The sixteen lanes as one AVX-512 register. See simd_portable.h for what each function means.
#pragma once

namespace ns {

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
constexpr const char* kIsa = "avx512_bf16_vnni";
#else
constexpr const char* kIsa = "avx512";
#endif

struct F32 {
  __m512 v;
};
struct I32 {
  __m512i v;
};
struct Mask {
  __mmask16 v;
};
struct Pairs {
  __m512i v;
};
struct Bytes {
  __m512i v;
};

inline __mmask16 lane_mask(int n) {
  return n <= 0 ? 0 : n >= kLanes ? 0xffff : static_cast<__mmask16>((1u << n) - 1u);
}

// Floats: memory.
inline F32 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F32 zero() { return {_mm512_setzero_ps()}; }
inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
inline F32 load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(lane_mask(n), p)}; }
inline void store_first(float* p, F32 x, int n) { _mm512_mask_storeu_ps(p, lane_mask(n), x.v); }
inline F32 load_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store_bf16(uint16_t* p, F32 x) {
#if defined(__AVX512BF16__)
  __m256bh rounded = _mm512_cvtneps_pbh(x.v);
  std::memcpy(p, &rounded, 32);
#else
  __m512i b = _mm512_castps_si512(x.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd);
  __m512i magnitude = _mm512_and_si512(b, _mm512_set1_epi32(0x7fffffff));
  __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  __mmask16 tiny = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x00800000));
  up = _mm512_mask_or_epi32(up, nan, b, _mm512_set1_epi32(0x00400000));
  up = _mm512_mask_and_epi32(up, tiny, b, _mm512_set1_epi32(INT32_MIN));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
#endif
}
inline F32 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_f16(uint16_t* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Floats: arithmetic.
inline F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }

// Comparisons.
inline Mask less(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask less_equal(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
inline Mask equal(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
inline Mask first_lanes(int n) { return {lane_mask(n)}; }
inline F32 select(Mask m, F32 yes, F32 no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
inline unsigned mask_bits(Mask m) { return m.v; }

// Integers.
inline I32 splat_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I32 load_i32(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_i32(int32_t* p, I32 x) { _mm512_storeu_si512(p, x.v); }
inline I32 load_i8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline I32 load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store_i8(int8_t* p, I32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.v));
}
inline I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I32 operator*(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I32 operator&(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I32 operator|(I32 a, I32 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I32 operator^(I32 a, I32 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int kCount>
inline I32 shift_left(I32 a) {
  return {_mm512_slli_epi32(a.v, kCount)};
}
template <int kCount>
inline I32 shift_right(I32 a) {
  return {_mm512_srli_epi32(a.v, kCount)};
}
template <int kCount>
inline I32 shift_right_signed(I32 a) {
  return {_mm512_srai_epi32(a.v, kCount)};
}

// Between the two.
inline F32 to_float(I32 x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline I32 to_int(F32 x) { return {_mm512_cvtps_epi32(x.v)}; }
inline I32 bits(F32 x) { return {_mm512_castps_si512(x.v)}; }
inline F32 lookup(const float* sixteen, I32 index) {
  return {_mm512_permutexvar_ps(index.v, _mm512_load_ps(sixteen))};
}
inline F32 float_from_bits(I32 x) { return {_mm512_castsi512_ps(x.v)}; }

// Over the lanes.
inline float reduce_add(F32 x) {
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(F32 x) {
  __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// bf16 pairs.
inline Pairs load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
inline Pairs splat_pair(const uint16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return {_mm512_set1_epi32(pair)};
}
inline void store_pairs(uint16_t* p, Pairs x) { _mm512_storeu_si512(p, x.v); }
inline Pairs zip(const uint16_t* even, const uint16_t* odd) {
  const __m512i order =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                       23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i both = _mm512_inserti64x4(
      _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even))),
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)), 1);
  return {_mm512_permutexvar_epi16(order, both)};
}
inline Pairs even_only(Pairs x) { return {_mm512_and_si512(x.v, _mm512_set1_epi32(0xffff))}; }
inline F32 dot(F32 acc, Pairs a, Pairs b) {
#if defined(__AVX512BF16__)
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  __m512 odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a.v, high)),
                               _mm512_castsi512_ps(_mm512_and_si512(b.v, high)), acc.v);
  return {_mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)),
                          _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16)), odd)};
#endif
}

// Bytes.
inline Bytes load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes splat_bytes(const void* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return {_mm512_set1_epi32(four)};
}
inline I32 dot(I32 acc, Bytes a, Bytes b) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpbusd_epi32(acc.v, a.v, b.v)};
#else
  // Not vpmaddubsw, which saturates: even and odd bytes as 16-bit numbers, products summed in 32.
  __m512i a_even = _mm512_and_si512(a.v, _mm512_set1_epi16(0xff));
  __m512i a_odd = _mm512_srli_epi16(a.v, 8);
  __m512i b_even = _mm512_srai_epi16(_mm512_slli_epi16(b.v, 8), 8);
  __m512i b_odd = _mm512_srai_epi16(b.v, 8);
  __m512i sum = _mm512_add_epi32(acc.v, _mm512_madd_epi16(a_even, b_even));
  return {_mm512_add_epi32(sum, _mm512_madd_epi16(a_odd, b_odd))};
#endif
}
inline Bytes bytes_from_bits(I32 x) { return {x.v}; }
inline I32 bits(Bytes x) { return {x.v}; }

inline void prefetch_l1(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace ns
