// exp, and the activations of the GPT-2 family, on sixteen lanes.
//
// Own polynomials with explicit fused multiply-adds in place of the C library's functions, whose
// last bit differs between machines. Coefficients are minimax fits of the functions named, if not said
// otherwise.
#pragma once

#include "ns.h"
#include "simd.h"

namespace ns {

// 2^(i / 16), rounded.
alignas(64) inline constexpr float kSixteenthPowers[kLanes] = {
    0x1p0f, 0x1.0b5586p0f, 0x1.172b84p0f, 0x1.2387a6p0f,
    0x1.306fep0f, 0x1.3dea64p0f, 0x1.4bfdaep0f, 0x1.5ab07ep0f,
    0x1.6a09e6p0f, 0x1.7a1148p0f, 0x1.8ace54p0f, 0x1.9c4918p0f,
    0x1.ae89fap0f, 0x1.c199bep0f, 0x1.d5818ep0f, 0x1.ea4afap0f};

// e^x within 2 units in the last place: 2^(n / 16) e^r with |r| <= ln(2) / 32, where three terms of the
// series for e^r - 1 are enough. Below -87.33 it is 0 (the result would be a denormal), from 88.37 on it
// stays what it is there; NaN stays NaN.
inline F32 exp(F32 x) {
  const F32 lowest = splat(-87.33654f), highest = splat(88.3762f);
  F32 y = min(highest, max(lowest, x));  // in this order NaN comes through
  I32 n = to_int(y * splat(23.0831207f));           // 16 / ln 2
  F32 whole = to_float(n);
  F32 r = fma(whole, splat(-0x1.62e4p-5f), y);      // ln(2) / 16 in two parts: what the first leaves
  r = fma(whole, splat(-0x1.7f7d1cp-24f), r);       // is exact
  F32 p = fma(fma(r, splat(0x1.555556p-3f), splat(0.5f)), r * r, r);
  F32 power = lookup(kSixteenthPowers, n);          // of n modulo 16; its exponent takes the rest
  F32 scaled = float_from_bits(bits(fma(power, p, power)) + shift_left<19>(n & splat_i32(~15)));
  return select(less(x, lowest), zero(), scaled);
}

inline F32 times_sigmoid(F32 x, F32 z) {  // x / (1 + e^-z)
  return x / (splat(1.0f) + exp(-z));
}

// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), Hendrycks and Gimpel, arXiv:1606.08415. Since
// (1 + tanh u) / 2 is the sigmoid of 2u, one exponential is enough, and small results keep their
// relative accuracy.
inline F32 gelu_tanh(F32 x) {
  F32 inner = fma(x * x, splat(0.044715f), splat(1.0f)) * x;
  return times_sigmoid(x, inner * splat(1.5957691216f));
}

// x/2 (1 + erf(x / sqrt 2)), as x/2 erfc(-x / sqrt 2). For z >= 0, erfc(z) is e^(-z^2) times a
// polynomial in 1 / (1 + z/2), fitted for z <= 4: beyond, both are below 2e-8.
inline F32 gelu_erf(F32 x) {
  F32 z = x * splat(0.70710678f);
  F32 magnitude = abs(z);
  F32 t = splat(1.0f) / fma(min(magnitude, splat(4.0f)), splat(0.5f), splat(1.0f));
  F32 u = t - splat(0.66666667f);
  F32 p = splat(-0.049725547432899475f);
  p = fma(p, u, splat(0.07297956943511963f));
  p = fma(p, u, splat(0.07122977077960968f));
  p = fma(p, u, splat(-0.20909379422664642f));
  p = fma(p, u, splat(-0.12966321408748627f));
  p = fma(p, u, splat(0.6077524423599243f));
  p = fma(p, u, splat(1.2818412780761719f));
  p = fma(p, u, splat(1.2294540405273438f));
  p = fma(p, u, splat(0.42758357524871826f));
  F32 tail = p * exp(-(z * z));  // erfc(|z|)
  F32 both = select(less(z, zero()), tail, splat(2.0f) - tail);
  return x * splat(0.5f) * both;
}

inline F32 quick_gelu(F32 x) { return times_sigmoid(x, x * splat(1.702f)); }

inline F32 silu(F32 x) { return times_sigmoid(x, x); }

inline F32 relu(F32 x) { return max(zero(), x); }  // in this order NaN comes through

// An odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
inline F32 tanh(F32 x) {
  F32 square = x * x;
  F32 p = splat(-0.005717044696211815f);  // (tanh(x) / x - 1) / x^2
  p = fma(p, square, splat(0.020650586113333702f));
  p = fma(p, square, splat(-0.05374349653720856f));
  p = fma(p, square, splat(0.13331490755081177f));
  p = fma(p, square, splat(-0.3333328366279602f));
  F32 near = fma(p * square, x, x);
  F32 magnitude = abs(x);
  F32 far = splat(1.0f) - splat(2.0f) / (exp(magnitude + magnitude) + splat(1.0f));
  far = select(less(x, zero()), -far, far);
  return select(less(magnitude, splat(0.625f)), near, far);
}

// Calls `use` with the activation as a function of F32, so that a loop is compiled for each.
template <class Use>
inline void with_activation(int32_t activation, Use&& use) {
  switch (activation) {
    case NS_GELU_TANH: return use([](F32 x) { return gelu_tanh(x); });
    case NS_GELU_ERF: return use([](F32 x) { return gelu_erf(x); });
    case NS_QUICK_GELU: return use([](F32 x) { return quick_gelu(x); });
    case NS_RELU: return use([](F32 x) { return relu(x); });
    case NS_SILU: return use([](F32 x) { return silu(x); });
    default: return use([](F32 x) { return tanh(x); });
  }
}

}  // namespace ns
