// Sixteen rows of sixteen 32-bit values, turned into sixteen columns. Bits move, nothing is computed.
#pragma once

#include <cstdint>

#include "simd.h"

namespace ns {

#if defined(__AVX512F__)
// Pairs of 32-bit values, then of 64 bits, then the four quarters of each register, twice.
inline void transpose(F32 (&rows)[kLanes]) {
  __m512d pairs[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i].v, rows[i + 1].v));
    pairs[i + 1] = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i].v, rows[i + 1].v));
  }
  __m512 fours[kLanes];  // fours[4 g + c]: column 4 q + c of rows 4 g .. 4 g + 3 in quarter q
  for (int g = 0; g < kLanes; g += 4)
    for (int half = 0; half < 2; ++half) {
      const __m512d first = pairs[g + half], second = pairs[g + 2 + half];
      fours[g + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(first, second));
      fours[g + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(first, second));
    }
  for (int c = 0; c < 4; ++c) {
    const __m512 even_01 = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0x88);
    const __m512 odd_01 = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0xdd);
    const __m512 even_23 = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0x88);
    const __m512 odd_23 = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0xdd);
    rows[c].v = _mm512_shuffle_f32x4(even_01, even_23, 0x88);
    rows[4 + c].v = _mm512_shuffle_f32x4(odd_01, odd_23, 0x88);
    rows[8 + c].v = _mm512_shuffle_f32x4(even_01, even_23, 0xdd);
    rows[12 + c].v = _mm512_shuffle_f32x4(odd_01, odd_23, 0xdd);
  }
}
#else
inline void transpose(F32 (&rows)[kLanes]) {
  float values[kLanes][kLanes], turned[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) store(values[i], rows[i]);
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) turned[j][i] = values[i][j];
  for (int i = 0; i < kLanes; ++i) rows[i] = load(turned[i]);
}
#endif

}  // namespace ns
