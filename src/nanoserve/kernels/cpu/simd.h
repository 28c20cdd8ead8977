// Sixteen logical lanes, whatever the machine's registers: one AVX-512 register, two of AVX2, or a
// plain array. Every operation is exactly rounded (or exact), so a formula written with these types
// gives the same bits on every instruction set. Sums over lanes go through one fixed tree.
//
// Types: F32 (16 floats), I32 (16 int32), Mask (16 truths), Pairs (16 pairs of bf16, as the GEMM
// packs them: even element low), Bytes (16 groups of four bytes). All are values, passed by value.
//
// Denormals are zero, in and out, in every operation of a step: whoever computes holds a
// `FlushDenormals`. vdpbf16ps has no other mode, so this makes all paths alike.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace ns {

constexpr int kLanes = 16;

// While it lives, this thread reads denormals as zero and writes zero for them.
class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }  // FTZ | DAZ
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | (uint64_t{1} << 24)));  // FZ
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FlushDenormals() {}
  ~FlushDenormals() {}
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Round to nearest even; denormals to zero, NaN stays NaN. The bits of vcvtneps2bf16.
inline uint16_t bf16_of(float x) {
  uint32_t bits = bits_of(x);
  if ((bits & 0x7f800000u) == 0) return static_cast<uint16_t>((bits >> 16) & 0x8000u);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float float_of_bf16(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

// IEEE half to float, exact; half denormals keep their value (they are normal as floats).
inline float float_of_f16(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  uint32_t exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
  if (exponent == 0x1fu) return float_of(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return float_of(sign | bits_of(magnitude));
}

// Float to IEEE half, round to nearest even; the bits of vcvtps2ph.
inline uint16_t f16_of(float x) {
  uint32_t bits = bits_of(x);
  uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u)
    return static_cast<uint16_t>(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past 65504
  if (bits >= 0x38800000u) {                                             // a normal half
    uint32_t rounded = bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u);
    return static_cast<uint16_t>(sign | (rounded >> 13));
  }
  if (bits < 0x33000000u) return static_cast<uint16_t>(sign);  // below half of 2^-24
  uint32_t mantissa = (bits & 0x7fffffu) | 0x800000u;
  uint32_t shift = 126u - (bits >> 23);  // 14..24: units of 2^-24
  uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1u);
  uint32_t half = 1u << (shift - 1u);
  if (rest > half || (rest == half && (kept & 1u))) ++kept;
  return static_cast<uint16_t>(sign | kept);
}

}  // namespace ns

// Each of these defines the same types and functions; simd_portable.h is the one to read.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace ns {

// What an instruction set does not change follows from the operations above.

inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1); }

inline F32 operator-(F32 x) { return float_from_bits(bits(x) ^ splat_i32(INT32_MIN)); }
inline F32 abs(F32 x) { return float_from_bits(bits(x) & splat_i32(INT32_MAX)); }

}  // namespace ns
