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
constexpr int32_t kSumBlock = 256;    // weights whose sum is kept, to find a draw's place quickly
constexpr double kExpError = 1e-14;   // relative: more than exp here and exp elsewhere can differ by

// Vectors whose exponentials are computed side by side. One alone is a chain of twenty operations,
// each of which waits for the one before: with eight, sum_exp takes half the time on AVX2.
constexpr int32_t kTogether = 8;

typedef double Doubles __attribute__((vector_size(8 * kWide)));
typedef int64_t Longs __attribute__((vector_size(8 * kWide)));
// As they lie in memory, anywhere. (Of a memcpy g++ 12 makes two halves.)
typedef double LooseDoubles __attribute__((vector_size(8 * kWide), aligned(8), may_alias));
typedef float LooseFloats __attribute__((vector_size(4 * kWide), aligned(4), may_alias));

// The largest relative difference of two sums of the same n weights, each with its own exp and its
// own order: n roundings of at most 2^-53 for each of the two, doubled to be sure.
constexpr double sum_error(int32_t n) { return 4 * (n + 64.0) * 0x1p-53; }

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

// weights[i] = exp((values[i] - peak) / temperature), and sums of each kSumBlock of them; their
// total. `weights` has room for kWide more.
template <class Value>
double weigh(const Value* values, int32_t n, Value peak, double temperature, double* weights,
             double* block_sums) {
  const Doubles top = every(peak), divisor = every(temperature);
  double total = 0;
  for (int32_t first = 0; first < n; first += kSumBlock) {
    const int32_t end = std::min(n, first + kSumBlock);
    Doubles sum = every(0);
    for (int32_t i = first; i < end; i += kWide) {
      Doubles x = end - i >= kWide ? load_wide(values + i) : load_some(values + i, end - i);
      x -= top;
      if (temperature != 1) x /= divisor;
      Doubles weight[1] = {x};
      exp_wide(weight);
      store_wide(weights + i, weight[0]);
      sum += weight[0];
    }
    total += *block_sums++ = sum_lanes(sum);
  }
  return total;
}

struct Kept {
  double total;
  bool is_sure;  // no weight was too close to `least_weight` to tell
};

// Weights that are less than `least_weight`, or whose value is less than `least`, become 0; the sums
// of each kSumBlock of the others. A weight of 1 is exact, others are so nearly. `weights` has room
// for kWide more.
template <class Value>
Kept keep_only(const Value* values, double* weights, int32_t n, Value least, double least_weight,
               double* block_sums) {
  const double unsure = least_weight * kExpError;
  Kept kept{0, true};
  Longs is_unsure = {};
  for (int32_t first = 0; first < n; first += kSumBlock) {
    const int32_t end = std::min(n, first + kSumBlock);
    Doubles sum = every(0);
    for (int32_t i = first; i < end; i += kWide) {
      const Doubles value =
          end - i >= kWide ? load_wide(values + i) : load_some(values + i, end - i);
      const Doubles weight = load_wide(weights + i), gap = weight - every(least_weight);
      is_unsure |= (gap < every(unsure)) & (gap > every(-unsure)) & (weight != every(1.0));
      const Longs keep = (value >= every(least)) & (gap >= every(0));
      const Doubles left = keep ? weight : every(0);
      std::memcpy(weights + i, &left, sizeof left);
      sum += left;
    }
    kept.total += *block_sums++ = sum_lanes(sum);
  }
  for (int32_t lane = 0; lane < kWide; ++lane) kept.is_sure &= is_unsure[lane] == 0;
  return kept;
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

struct Peak {
  int32_t id;   // the lowest of those with the largest value; -1 if there are no ids
  float value;  // -infinity if there are no ids
  bool has_nan;
};

// An integer that orders as the float does, NaN aside; -0 and 0 are one.
inline int32_t order_of(float x) {
  const uint32_t bits = bits_of(x + 0.0f);
  return int32_t(bits ^ ((0u - (bits >> 31)) >> 1));
}

inline Peak find_peak(const float* logits, int32_t begin, int32_t end) {
  constexpr int32_t block = 512;
  int32_t best = std::numeric_limits<int32_t>::min(), best_first = -1;
  uint32_t largest_magnitude = 0;
  for (int32_t first = begin; first < end; first += block) {
    const int32_t stop = std::min(end, first + block);
    int32_t here = std::numeric_limits<int32_t>::min();
    for (int32_t i = first; i < stop; ++i) {
      here = std::max(here, order_of(logits[i]));
      largest_magnitude = std::max(largest_magnitude, bits_of(logits[i]) & 0x7fffffffu);
    }
    if (best_first < 0 || here > best) best = here, best_first = first;
  }
  if (best_first < 0) return {-1, -kInfinity, false};
  int32_t id = best_first;
  while (order_of(logits[id]) != best) ++id;
  return {id, logits[id], largest_magnitude > 0x7f800000u};
}

// The largest of n finite or -infinite values, and the lowest place that has it; n > 0.
inline int32_t find_best(const double* values, int32_t n) {
  Doubles top = every(-kInfinity);
  int32_t i = 0;
  for (; i + kWide <= n; i += kWide) top = max_wide(top, load_wide(values + i));
  if (i < n) top = max_wide(top, load_some(values + i, n - i));
  double best = top[0];
  for (int32_t lane = 1; lane < kWide; ++lane) best = std::max(best, top[lane]);
  return int32_t(std::find(values, values + n, best) - values);
}

// The places whose value is at least `least`, ascending; how many. `out` has room for 16 more.
template <class Value>
inline int32_t copy_places(const Value* values, int32_t n, Value least, int32_t* out) {
  int32_t count = 0, i = 0;
#if defined(__AVX512F__) && defined(__AVX512VL__)
  if constexpr (sizeof(Value) == 4) {
    __m512i places = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + 16 <= n; i += 16) {
      const __mmask16 keep = _mm512_cmp_ps_mask(
          _mm512_loadu_ps(reinterpret_cast<const float*>(values + i)),
          _mm512_set1_ps(float(least)), _CMP_GE_OQ);
      _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi32(keep, places));
      count += __builtin_popcount(keep);
      places = _mm512_add_epi32(places, _mm512_set1_epi32(16));
    }
  } else {
    __m256i places = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + 8 <= n; i += 8) {
      const __mmask8 keep = _mm512_cmp_pd_mask(
          _mm512_loadu_pd(reinterpret_cast<const double*>(values + i)),
          _mm512_set1_pd(double(least)), _CMP_GE_OQ);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + count),
                          _mm256_maskz_compress_epi32(keep, places));
      count += __builtin_popcount(keep);
      places = _mm256_add_epi32(places, _mm256_set1_epi32(8));
    }
  }
#endif
  for (; i < n; ++i) {
    out[count] = i;
    count += values[i] >= least;
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

// Pairs whose weight is at least `least`, from all n; how many.
template <class Value>
inline int32_t copy_heavy(const Value* values, const double* weights, int32_t n, double least,
                          double* v, double* w) {
  int32_t count = 0, i = 0;
  for (; i + kWide <= n; i += kWide) {
    const Doubles weight = load_wide(weights + i);
    count += put_kept(load_wide(values + i), weight, weight >= every(least), v + count, w + count);
  }
  for (; i < n; ++i) {
    if (weights[i] < least) continue;
    v[count] = values[i];
    w[count++] = weights[i];
  }
  return count;
}

// Pairs whose value is in [low, high), from all n; how many. What the higher ones weigh: `above`.
template <class Value>
inline int32_t copy_between(const Value* values, const double* weights, int32_t n, double low,
                            double high, double* v, double* w, double* above) {
  Doubles sum = every(0);
  int32_t count = 0, i = 0;
  for (; i + kWide <= n; i += kWide) {
    const Doubles value = load_wide(values + i), weight = load_wide(weights + i);
    const Longs is_above = value >= every(high);
    sum += is_above ? weight : every(0);
    const Longs keep = (value >= every(low)) & ~is_above;
    count += put_kept(value, weight, keep, v + count, w + count);
  }
  *above = sum_lanes(sum);
  for (; i < n; ++i) {
    if (values[i] >= high) *above += weights[i];
    if (values[i] < low || values[i] >= high) continue;
    v[count] = values[i];
    w[count++] = weights[i];
  }
  return count;
}

struct HeavySum {
  double weight;
  int32_t count;
};

// What the pairs with a value of at least `pivot` weigh together, and how many they are.
inline HeavySum sum_at_least(const double* v, const double* w, int32_t n, double pivot) {
  Doubles sum = every(0);
  Longs counts = {};
  int32_t i = 0;
  for (; i + kWide <= n; i += kWide) {
    const Longs is_upper = load_wide(v + i) >= every(pivot);
    sum += is_upper ? load_wide(w + i) : every(0);
    counts -= is_upper;
  }
  HeavySum upper{sum_lanes(sum), 0};
  for (int32_t lane = 0; lane < kWide; ++lane) upper.count += int32_t(counts[lane]);
  for (; i < n; ++i) {
    if (v[i] < pivot) continue;
    upper.weight += w[i];
    ++upper.count;
  }
  return upper;
}

// The pairs with a value of at least `pivot` (or, `upper` false, below it) to the front, in order.
inline int32_t keep_side(double* v, double* w, int32_t n, double pivot, bool upper) {
  int32_t count = 0, i = 0;
  const Longs flip = Longs{} - (upper ? 0 : 1);
  for (; i + kWide <= n; i += kWide) {
    const Doubles values = load_wide(v + i), weights = load_wide(w + i);
    const Longs keep = (values >= every(pivot)) ^ flip;
    count += put_kept(values, weights, keep, v + count, w + count);
  }
  for (; i < n; ++i) {
    const double value = v[i], weight = w[i];
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
