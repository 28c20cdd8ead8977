// The loops under the sampler: as many doubles at a time as a register holds, by the compiler's
// own vectors; what compilers do not find (fused multiply-add, compressing) is spelled out. Sums here
// go in an order of their own: the sampler knows how far they can be from the definition's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // everything below is inlined, so no call passes a vector
#endif

namespace ns {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
#if defined(__AVX512F__)
constexpr int32_t kWide = 8;  // doubles of one vector
#elif defined(__AVX2__)
constexpr int32_t kWide = 4;
#else
constexpr int32_t kWide = 2;
#endif
constexpr int32_t kSumLanes = 8;      // of sums whose bits are the same on every instruction set
constexpr int32_t kBlock = 256;       // values of which the largest and what they weigh are kept
constexpr double kExpError = 1e-11;   // relative: more than a weight's here and elsewhere differ by

// Vectors whose exponentials are computed side by side. One alone is a chain of twenty operations,
// each of which waits for the one before: with eight, sum_exp takes half the time on AVX2.
constexpr int32_t kTogether = 8;

typedef double Doubles __attribute__((vector_size(8 * kWide)));
typedef int64_t Longs __attribute__((vector_size(8 * kWide)));
// As they lie in memory, anywhere. (Of a memcpy g++ 12 makes two halves.)
typedef double LooseDoubles __attribute__((vector_size(8 * kWide), aligned(8), may_alias));
typedef float LooseFloats __attribute__((vector_size(4 * kWide), aligned(4), may_alias));

// The largest relative difference of two sums of the same n weights, each with its own exp and its
// own order: what weights differ by, and n roundings of at most 2^-53 for each of the two; doubled,
// as what is compared with a sum is a share of another.
constexpr double sum_error(int32_t n) { return 2 * kExpError + 4 * n * 0x1p-53; }

// While it lives, this thread computes with denormals: the definition counts the smallest weights.
class KeepDenormals {
 public:
#if defined(__SSE2__)
  KeepDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  KeepDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~(uint64_t{1} << 24)));
  }
  ~KeepDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#else
  KeepDenormals() {}
  ~KeepDenormals() {}
#endif
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;
};

inline Doubles every(double x) { return x + Doubles{}; }

inline Doubles load_wide(const double* p) { return *reinterpret_cast<const LooseDoubles*>(p); }

inline Doubles load_wide(const float* p) {
#if defined(__AVX512F__)
  return Doubles(_mm512_cvtps_pd(_mm256_loadu_ps(p)));
#elif defined(__AVX2__)
  return Doubles(_mm256_cvtps_pd(_mm_loadu_ps(p)));  // g++ 12 does this by way of the stack
#else
  return __builtin_convertvector(*reinterpret_cast<const LooseFloats*>(p), Doubles);
#endif
}

inline void store_wide(double* p, Doubles x) { *reinterpret_cast<LooseDoubles*>(p) = x; }

inline void widen(const float* from, int32_t n, double* to) {
  int32_t i = 0;
  for (; i + kWide <= n; i += kWide) store_wide(to + i, load_wide(from + i));
  for (; i < n; ++i) to[i] = from[i];
}

// The first n lanes, the others -infinity: their weight is 0.
template <class Value>
inline Doubles load_some(const Value* p, int32_t n) {
  Doubles x = every(-kInfinity);
  for (int32_t i = 0; i < n; ++i) x[i] = p[i];
  return x;
}

inline double sum_lanes(Doubles x) {
  double sum = x[0];
  for (int32_t lane = 1; lane < kWide; ++lane) sum += x[lane];
  return sum;
}

inline Doubles fma_wide(Doubles a, Doubles b, Doubles c) {
#if defined(__AVX512F__)
  return Doubles(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
#elif defined(__AVX2__) && defined(__FMA__)
  return Doubles(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c)));
#else
  for (int32_t i = 0; i < kWide; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#endif
}

inline Doubles max_wide(Doubles a, Doubles b) {
#if defined(__AVX512F__)
  return Doubles(_mm512_max_pd(__m512d(a), __m512d(b)));
#elif defined(__AVX2__)
  return Doubles(_mm256_max_pd(__m256d(a), __m256d(b)));
#else
  return a < b ? b : a;
#endif
}

// a * b + c, rounded once only where that is as fast: for what may differ in its last bits.
inline Doubles mul_add(Doubles a, Doubles b, Doubles c) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
  return fma_wide(a, b, c);
#else
  return a * b + c;
#endif
}

constexpr double kRoundToInteger = 0x1.8p52;  // a sum with it has the integer in its low bits

// x * 2^k for an x near 1, where k is in the low bits of `shifted`, and the product no denormal.
inline Doubles times_power(Doubles x, Doubles shifted) {
  Longs bits, exponent;
  std::memcpy(&bits, &x, sizeof bits);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 52;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// exp(x) for x <= 0, within a few units in the last place; exactly 1 at 0, 1e-304 where it is less.
// x = k ln 2 + r with |r| <= ln 2 / 2, and exp(r) = 1 + r q(r), where q interpolates at Chebyshev's
// ten points. The same bits on every instruction set.
template <int32_t N>
inline void exp_wide(Doubles (&x)[N]) {
  constexpr double highest = 0x1.2891a8c1d838dp-22;
  constexpr double others[] = {0x1.72e14a22d5652p-19, 0x1.a019b8ef67c6cp-16, 0x1.a019949078924p-13,
                               0x1.6c16c17893833p-10, 0x1.11111123cd74bp-7,  0x1.5555555553d4fp-5,
                               0x1.5555555550d3ep-3,  0x1.0000000000001p-1,  0x1.0000000000006p0,
                               1.0};
  Doubles shifted[N], p[N];
  for (int32_t j = 0; j < N; ++j) {
    x[j] = max_wide(x[j], every(-700.0));
    shifted[j] = fma_wide(x[j], every(0x1.71547652b82fep0), every(kRoundToInteger));
    const Doubles k = shifted[j] - every(kRoundToInteger);
    x[j] = fma_wide(k, every(-0x1.62e42fefa39efp-1), x[j]);
    x[j] = fma_wide(k, every(-0x1.abc9e3b39803fp-56), x[j]);
    p[j] = every(highest);
  }
#pragma GCC unroll 10
  for (const double coefficient : others)
    for (int32_t j = 0; j < N; ++j) p[j] = fma_wide(p[j], x[j], every(coefficient));
  for (int32_t j = 0; j < N; ++j) x[j] = times_power(p[j], shifted[j]);
}

// The sum of exp(logits[i] - peak), in kSumLanes lanes that are then added in order: the same bits
// on every instruction set.
inline double sum_exp(const float* logits, int32_t n, float peak) {
  constexpr int32_t num_vectors = kSumLanes / kWide;
  static_assert(kTogether % num_vectors == 0, "a lane of a sum is always the same lane's");
  const Doubles top = every(peak);
  Doubles sums[num_vectors] = {};
  int32_t i = 0;
  for (; i + kTogether * kWide <= n; i += kTogether * kWide) {
    Doubles x[kTogether];
    for (int32_t j = 0; j < kTogether; ++j) x[j] = load_wide(logits + i + j * kWide) - top;
    exp_wide(x);
    for (int32_t j = 0; j < kTogether; ++j) sums[j % num_vectors] += x[j];
  }
  for (int32_t j = 0; i < n; ++j, i += kWide) {
    Doubles x[1] = {load_some(logits + i, std::min(kWide, n - i)) - top};
    exp_wide(x);
    sums[j % num_vectors] += x[0];
  }
  double total = 0;
  for (const Doubles& sum : sums)
    for (int32_t lane = 0; lane < kWide; ++lane) total += sum[lane];
  return total;
}

// 2^x for x <= 0, within 3e-12 of it; exactly 1 at 0, 1e-301 where it is less. Weights need no
// more, and it has five fused multiply-adds fewer than exp_wide.
// 2^x = 2^k (1 + r q(r)) with |r| <= 1/2, where q interpolates at Chebyshev's eight points.
template <int32_t N>
inline void power_of_two(Doubles (&x)[N]) {
  constexpr double highest = 0x1.63b2d7971923fp-20;
  constexpr double others[] = {0x1.00c0e4e15189cp-16, 0x1.4308c7183d6a2p-13, 0x1.5d877598350dep-10,
                               0x1.3b2ab70ad2565p-7,  0x1.c6b08da70cce3p-5,  0x1.ebfbdff82a734p-3,
                               0x1.62e42fef9cc69p-1,  1.0};
  Doubles shifted[N], p[N];
  for (int32_t j = 0; j < N; ++j) {
    x[j] = max_wide(x[j], every(-1000.0));
    shifted[j] = x[j] + every(kRoundToInteger);
    x[j] -= shifted[j] - every(kRoundToInteger);
    p[j] = every(highest);
  }
#pragma GCC unroll 8
  for (const double coefficient : others)
    for (int32_t j = 0; j < N; ++j) p[j] = mul_add(p[j], x[j], every(coefficient));
  for (int32_t j = 0; j < N; ++j) x[j] = times_power(p[j], shifted[j]);
}

// What makes a weight of a value: 2^((value - peak) * factor) = exp((value - peak) / temperature).
struct Scale {
  double peak, factor;
};

// Weights of a block of at most kBlock values; their sum. `weights` has room for kBlock.
template <class Value>
double weigh_block(const Value* values, int32_t n, const Scale& scale, double* weights) {
  if (n < kBlock) {
    Value padded[kBlock];
    std::fill(std::copy_n(values, n, padded), padded + kBlock, Value(-kInfinity));
    return weigh_block(padded, kBlock, scale, weights);
  }
  const Doubles peak = every(scale.peak), factor = every(scale.factor);
  Doubles sum[2] = {};
  for (int32_t i = 0; i < kBlock; i += kTogether * kWide) {
    Doubles x[kTogether];
    for (int32_t j = 0; j < kTogether; ++j)
      x[j] = (load_wide(values + i + j * kWide) - peak) * factor;
    power_of_two(x);
#pragma GCC unroll 8
    for (int32_t j = 0; j < kTogether; ++j) {
      store_wide(weights + i + j * kWide, x[j]);
      sum[j % 2] += x[j];
    }
  }
  return sum_lanes(sum[0] + sum[1]);
}

// What those of n values that are not below `limit` weigh together. In four sums side by side, as
// each addition waits for the one before.
template <class Value>
inline double weight_from(const Value* values, const double* weights, int32_t n, double limit) {
  Doubles sums[4] = {};
  int32_t i = 0;
  const auto add = [&](Doubles& sum, int32_t first) {
    const Longs counts = load_wide(values + first) >= every(limit);
    sum += counts ? load_wide(weights + first) : every(0);
  };
  for (; i + 4 * kWide <= n; i += 4 * kWide)
    for (int32_t j = 0; j < 4; ++j) add(sums[j], i + j * kWide);
  for (; i + kWide <= n; i += kWide) add(sums[0], i);
  double total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; ++i) total += values[i] >= limit ? weights[i] : 0;
  return total;
}

constexpr int32_t num_blocks(int32_t n) { return (n + kBlock - 1) / kBlock; }

struct Peak {
  int32_t id;   // the lowest of those with the largest value
  float value;
  bool has_nan;
};

// An integer that orders as the float does, NaN aside; -0 and 0 are one.
inline int32_t order_of(float x) {
  const uint32_t bits = bits_of(x + 0.0f);
  return int32_t(bits ^ ((0u - (bits >> 31)) >> 1));
}

inline float float_of_order(int32_t order) {
  const uint32_t bits = uint32_t(order);
  return float_of(bits ^ ((0u - (bits >> 31)) >> 1));
}

// The largest of n > 0 values; that of each block to `maxima`.
inline Peak find_peak(const float* logits, int32_t n, float* maxima) {
  int32_t best = std::numeric_limits<int32_t>::min(), best_first = -1;
  uint32_t largest_magnitude = 0;
  for (int32_t first = 0; first < n; first += kBlock) {
    const int32_t end = std::min(n, first + kBlock);
    int32_t here = std::numeric_limits<int32_t>::min();
    for (int32_t i = first; i < end; ++i) {
      here = std::max(here, order_of(logits[i]));
      largest_magnitude = std::max(largest_magnitude, bits_of(logits[i]) & 0x7fffffffu);
    }
    *maxima++ = float_of_order(here);
    if (best_first < 0 || here > best) best = here, best_first = first;
  }
  int32_t id = best_first;
  while (order_of(logits[id]) != best) ++id;
  return {id, logits[id], largest_magnitude > 0x7f800000u};
}

inline double max_of(const double* values, int32_t n) {
  Doubles top[2] = {every(-kInfinity), every(-kInfinity)};
  int32_t i = 0;
  for (; i + 2 * kWide <= n; i += 2 * kWide)
    for (int32_t j = 0; j < 2; ++j) top[j] = max_wide(top[j], load_wide(values + i + j * kWide));
  for (; i < n; i += kWide)
    top[0] = max_wide(top[0], load_some(values + i, std::min(kWide, n - i)));
  const Doubles both = max_wide(top[0], top[1]);
  double best = both[0];
  for (int32_t lane = 1; lane < kWide; ++lane) best = std::max(best, both[lane]);
  return best;
}

// The lowest place of the largest of n values, by the largest of each block.
inline int32_t place_of_best(const double* values, int32_t n, const double* maxima) {
  const double* best = std::max_element(maxima, maxima + num_blocks(n));
  return int32_t(std::find(values + (best - maxima) * kBlock, values + n, *best) - values);
}

// The same of n > 0 finite or -infinite values; the largest of each block to `maxima`.
inline int32_t find_best(const double* values, int32_t n, double* maxima) {
  for (int32_t b = 0; b < num_blocks(n); ++b)
    maxima[b] = max_of(values + b * kBlock, std::min(kBlock, n - b * kBlock));
  return place_of_best(values, n, maxima);
}

// Values that are looked for: at least `low`, and below `high`.
template <class Value>
struct Range {
  Value low, high;

  bool has(Value value) const { return value >= low && value < high; }
  bool is_empty() const { return low >= high; }
};

template <class Value>
Value next_up(Value value) {
  return std::nextafter(value, std::numeric_limits<Value>::infinity());
}

// The least Value that is not below x.
template <class Value>
Value round_up(double x) {
  const Value rounded = Value(x);
  return rounded < x ? next_up(rounded) : rounded;
}

#if defined(__AVX2__)

// Which of eight values are in the range, as bits.
inline uint32_t bits_in(const float* values, const Range<float>& range) {
  const __m256 x = _mm256_loadu_ps(values);
  const __m256 reaches = _mm256_cmp_ps(x, _mm256_set1_ps(range.low), _CMP_GE_OQ);
  const __m256 below = _mm256_cmp_ps(x, _mm256_set1_ps(range.high), _CMP_LT_OQ);
  return uint32_t(_mm256_movemask_ps(_mm256_and_ps(reaches, below)));
}

inline uint32_t bits_in(const double* values, const Range<double>& range) {
  const auto four = [&](const double* p) {
    const __m256d x = _mm256_loadu_pd(p);
    const __m256d reaches = _mm256_cmp_pd(x, _mm256_set1_pd(range.low), _CMP_GE_OQ);
    const __m256d below = _mm256_cmp_pd(x, _mm256_set1_pd(range.high), _CMP_LT_OQ);
    return uint32_t(_mm256_movemask_pd(_mm256_and_pd(reaches, below)));
  };
  return four(values) | four(values + 4) << 4;
}

// For each mask of eight bits, the numbers of its bits: a byte each, the lowest first.
struct BitNumbers {
  uint64_t of_mask[256] = {};

  constexpr BitNumbers() {
    for (uint32_t mask = 0; mask < 256; ++mask)
      for (uint32_t bit = 8; bit-- > 0;)
        if (mask >> bit & 1) of_mask[mask] = of_mask[mask] << 8 | bit;
  }
};

// `first` plus the number of each bit of the mask, ascending; how many. Writes eight.
inline int32_t put_places(uint32_t mask, int32_t first, int32_t* out) {
  static constexpr BitNumbers numbers;
  const __m128i bytes = _mm_cvtsi64_si128(int64_t(numbers.of_mask[mask]));
  const __m256i places = _mm256_add_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(first));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), places);
  return __builtin_popcount(mask);
}
#endif

// The places whose value is in the range, ascending, counted from `first`; how many. `out` has room
// for 8 more.
template <class Value>
inline int32_t copy_places(const Value* values, int32_t n, const Range<Value>& range, int32_t first,
                           int32_t* out) {
  int32_t count = 0, i = 0;
#if defined(__AVX2__)
  for (; i + 8 <= n; i += 8)
    count += put_places(bits_in(values + i, range), first + i, out + count);
#endif
  for (; i < n; ++i) {
    out[count] = first + i;
    count += range.has(values[i]);
  }
  return count;
}

// Candidates are (value, weight) pairs in two arrays with room for kWide more. Those of the wide
// lanes that `keep` names, in order, to the front of the arrays; how many.
inline int32_t put_kept(Doubles values, Doubles weights, Longs keep, double* v, double* w) {
#if defined(__AVX512F__)
  const __mmask8 mask = _mm512_test_epi64_mask(__m512i(keep), __m512i(keep));
  _mm512_storeu_pd(v, _mm512_maskz_compress_pd(mask, __m512d(values)));
  _mm512_storeu_pd(w, _mm512_maskz_compress_pd(mask, __m512d(weights)));
  return __builtin_popcount(mask);
#elif defined(__AVX2__)
  // For each mask of four lanes, the halves of its lanes to move to the front.
  alignas(32) static constexpr int32_t kMoves[16][8] = {
      {0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 6, 7}, {2, 3, 0, 1, 4, 5, 6, 7},
      {0, 1, 2, 3, 4, 5, 6, 7}, {4, 5, 0, 1, 2, 3, 6, 7}, {0, 1, 4, 5, 2, 3, 6, 7},
      {2, 3, 4, 5, 0, 1, 6, 7}, {0, 1, 2, 3, 4, 5, 6, 7}, {6, 7, 0, 1, 2, 3, 4, 5},
      {0, 1, 6, 7, 2, 3, 4, 5}, {2, 3, 6, 7, 0, 1, 4, 5}, {0, 1, 2, 3, 6, 7, 4, 5},
      {4, 5, 6, 7, 0, 1, 2, 3}, {0, 1, 4, 5, 6, 7, 2, 3}, {2, 3, 4, 5, 6, 7, 0, 1},
      {0, 1, 2, 3, 4, 5, 6, 7}};
  const int32_t mask = _mm256_movemask_pd(__m256d(keep));
  const __m256i move = _mm256_load_si256(reinterpret_cast<const __m256i*>(kMoves[mask]));
  const auto put = [&](Doubles from, double* to) {
    const __m256 moved = _mm256_permutevar8x32_ps(__m256(from), move);
    _mm256_storeu_ps(reinterpret_cast<float*>(to), moved);
  };
  put(values, v);
  put(weights, w);
  return __builtin_popcount(uint32_t(mask));
#else
  int32_t count = 0;
  for (int32_t i = 0; i < kWide; ++i) {  // no branch: the next one that is kept overwrites
    v[count] = values[i];
    w[count] = weights[i];
    count += keep[i] != 0;
  }
  return count;
#endif
}

inline int32_t count_from(const double* values, int32_t n, double limit) {
  Longs counts = {};
  int32_t i = 0, count = 0;
  for (; i + kWide <= n; i += kWide) counts -= load_wide(values + i) >= every(limit);
  for (int32_t lane = 0; lane < kWide; ++lane) count += int32_t(counts[lane]);
  for (; i < n; ++i) count += values[i] >= limit;
  return count;
}

// To v and w, in order, the pairs with a value of at least `pivot` (or, `upper` false, below it);
// how many. They may stay in their arrays.
inline int32_t keep_side(const double* values, const double* weights, int32_t n, double pivot,
                         bool upper, double* v, double* w) {
  int32_t count = 0, i = 0;
  const Longs flip = Longs{} - (upper ? 0 : 1);
  for (; i + kWide <= n; i += kWide) {
    const Doubles value = load_wide(values + i), weight = load_wide(weights + i);
    const Longs keep = (value >= every(pivot)) ^ flip;
    count += put_kept(value, weight, keep, v + count, w + count);
  }
  for (; i < n; ++i) {
    const double value = values[i], weight = weights[i];
    v[count] = value;
    w[count] = weight;
    count += (value >= pivot) == upper;
  }
  return count;
}

// The median of a few of n values.
inline double middle_value(const double* values, int32_t n) {
  constexpr int32_t count = 15;
  double some[count];
  for (int32_t i = 0; i < count; ++i) some[i] = values[int64_t(i) * (n - 1) / (count - 1)];
  std::nth_element(some, some + count / 2, some + count);
  return some[count / 2];
}

}  // namespace ns

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
