// Portable vectors of four lanes in plain C++. This is the list of everything a vector header must offer; the other
// headers give the same functions for one instruction set. Included only through row_ops_unit.h, which names ISOBATCH_UNIT.
//
// Comparisons with NaN are false. `min` and `max` return the second argument when one is NaN.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include "contract.h"

namespace isobatch::ISOBATCH_UNIT {
namespace {

constexpr int W = 4;
struct Vf { float v[W]; };
struct Vi { int32_t v[W]; };

// How many key blocks share a pass of attention scores, and how many vectors of head dimensions a pass of attention
// outputs, by the number of query heads: what fits the registers.
constexpr int kScoreBlocks[5] = {0, 1, 1, 1, 1};
constexpr int kOutputVectors[5] = {0, 2, 2, 2, 2};

#define ISOBATCH_LANES(expression) Vf r; for (int i = 0; i < W; i++) r.v[i] = (expression); return r
#define ISOBATCH_LANES_I(expression) Vi r; for (int i = 0; i < W; i++) r.v[i] = (expression); return r

// Memory. The _n forms touch n elements only (0..W); missing lanes are +0 or `fill`.
inline Vf load(const float* p) { ISOBATCH_LANES(p[i]); }
inline Vf load_n(const float* p, int n) { ISOBATCH_LANES(i < n ? p[i] : 0.0f); }
inline Vf load_n(const float* p, int n, Vf fill) { ISOBATCH_LANES(i < n ? p[i] : fill.v[i]); }
inline void store(float* p, Vf a) { for (int i = 0; i < W; i++) p[i] = a.v[i]; }
inline void store_n(float* p, Vf a, int n) { for (int i = 0; i < n; i++) p[i] = a.v[i]; }
inline void prefetch(const void*) {}

// Arithmetic, one rounding each.
inline Vf set(float x) { ISOBATCH_LANES(x); }
inline Vf zero() { return set(0.0f); }
inline Vf add(Vf a, Vf b) { ISOBATCH_LANES(a.v[i] + b.v[i]); }
inline Vf sub(Vf a, Vf b) { ISOBATCH_LANES(a.v[i] - b.v[i]); }
inline Vf mul(Vf a, Vf b) { ISOBATCH_LANES(a.v[i] * b.v[i]); }
inline Vf fma(Vf a, Vf b, Vf c) { ISOBATCH_LANES(std::fma(a.v[i], b.v[i], c.v[i])); }
inline Vf fnma(Vf a, Vf b, Vf c) { ISOBATCH_LANES(std::fma(-a.v[i], b.v[i], c.v[i])); }  // c - a*b
inline Vf fms(Vf a, Vf b, Vf c) { ISOBATCH_LANES(std::fma(a.v[i], b.v[i], -c.v[i])); }   // a*b - c
inline Vf min(Vf a, Vf b) { ISOBATCH_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline Vf max(Vf a, Vf b) { ISOBATCH_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Vf round(Vf a) { ISOBATCH_LANES(std::rint(a.v[i])); }
inline Vf negate(Vf a) { ISOBATCH_LANES(-a.v[i]); }
inline Vf zero_below(Vf a, Vf floor) { ISOBATCH_LANES(std::fabs(a.v[i]) < floor.v[i] ? 0.0f : a.v[i]); }
inline Vf where_ge(Vf x, Vf limit, Vf a) { ISOBATCH_LANES(x.v[i] >= limit.v[i] ? a.v[i] : 0.0f); }
inline uint32_t mask_gt(Vf a, Vf b) { uint32_t m = 0; for (int i = 0; i < W; i++) m |= (uint32_t)(a.v[i] > b.v[i]) << i; return m; }
inline uint32_t mask_ge(Vf a, Vf b) { uint32_t m = 0; for (int i = 0; i < W; i++) m |= (uint32_t)(a.v[i] >= b.v[i]) << i; return m; }

// Bits.
inline Vi to_int(Vf a) {  // nearest; out of range gives INT32_MIN
  ISOBATCH_LANES_I(std::fabs(a.v[i]) < 0x1p31f ? (int32_t)std::rint(a.v[i]) : INT32_MIN);
}
inline Vf add_exponent(Vf p, Vf n) { Vi k = to_int(n); ISOBATCH_LANES(bits_float(float_bits(p.v[i]) + ((uint32_t)k.v[i] << 23))); }
inline Vf recip_seed(Vf a) { ISOBATCH_LANES(bits_float(kRecipSeed - float_bits(a.v[i]))); }
inline Vi magnitude(Vf a) { ISOBATCH_LANES_I((int32_t)magnitude_bits(a.v[i])); }
inline Vi zero_i() { ISOBATCH_LANES_I(0); }
inline Vi add(Vi a, Vi b) { ISOBATCH_LANES_I(a.v[i] + b.v[i]); }
inline Vi max(Vi a, Vi b) { ISOBATCH_LANES_I(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Vi clamp(Vi a, int32_t low, int32_t high) { ISOBATCH_LANES_I(a.v[i] < low ? low : a.v[i] > high ? high : a.v[i]); }

// Across lanes. sum_lanes adds halves: lane l and lane l + w for w = W/2, .., 1.
inline float sum_lanes(Vf a) {
  for (int w = W / 2; w > 0; w /= 2) for (int i = 0; i < w; i++) a.v[i] = a.v[i] + a.v[i + w];
  return a.v[0];
}
inline float max_lanes(Vf a) { float m = a.v[0]; for (int i = 1; i < W; i++) m = a.v[i] > m ? a.v[i] : m; return m; }
inline int32_t sum_lanes(Vi a) { int32_t s = 0; for (int i = 0; i < W; i++) s += a.v[i]; return s; }
inline int32_t max_lanes(Vi a) { int32_t m = a.v[0]; for (int i = 1; i < W; i++) m = a.v[i] > m ? a.v[i] : m; return m; }
// (a, b) as 2W consecutive elements: those at even and at odd places, and back.
inline void split_pairs(Vf a, Vf b, Vf& even, Vf& odd) {
  for (int i = 0; i < W / 2; i++) {
    even.v[i] = a.v[2 * i]; even.v[i + W / 2] = b.v[2 * i];
    odd.v[i] = a.v[2 * i + 1]; odd.v[i + W / 2] = b.v[2 * i + 1];
  }
}
inline void join_pairs(Vf even, Vf odd, Vf& a, Vf& b) {
  for (int i = 0; i < W / 2; i++) {
    a.v[2 * i] = even.v[i]; a.v[2 * i + 1] = odd.v[i];
    b.v[2 * i] = even.v[i + W / 2]; b.v[2 * i + 1] = odd.v[i + W / 2];
  }
}

// fp16, by integer operations: independent of how the machine treats subnormal numbers.
inline float f16_value(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return bits_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x400u) return bits_float(sign | ((rest << 13) + (112u << 23)));
  float x = (float)(int32_t)rest * 0x1p-24f;
  return bits_float(sign | float_bits(x));
}
inline uint16_t f16_bits(float x) {  // nearest, ties to even; |x| is at most 65504
  uint32_t sign = float_bits(x) >> 16 & 0x8000u, a = magnitude_bits(x);
  if (a >= 0x38800000u) return (uint16_t)(sign | ((a - (112u << 23) + 0xfffu + (a >> 13 & 1u)) >> 13));
  return (uint16_t)(sign | (uint32_t)(int32_t)std::rint(bits_float(a) * 0x1p24f));
}
inline Vf load_f16(const uint16_t* p) { ISOBATCH_LANES(f16_value(p[i])); }
inline Vf load_f16_n(const uint16_t* p, int n) { ISOBATCH_LANES(i < n ? f16_value(p[i]) : 0.0f); }
inline void store_f16(uint16_t* p, Vf a) { for (int i = 0; i < W; i++) p[i] = f16_bits(a.v[i]); }

// Narrow stores of block integers, W of them from element k of a block (formats of views.h).
inline void store_int16(uint8_t* block, int k, Vi a) {
  // One store of all four: from four stores of one, GCC 12 for aarch64 makes wrong sums of the same integers at -O3.
  int16_t q[W];
  for (int i = 0; i < W; i++) q[i] = (int16_t)a.v[i];
  std::memcpy(block + 2 * k, q, sizeof q);
}
inline void store_int16_shuffled(uint8_t* block, int k, Vi a) {
  for (int i = 0; i < W; i++) {
    int e = k + i, at = (e & ~7) + ((e & 1) << 2) + ((e & 7) >> 1);
    int16_t q = (int16_t)a.v[i];
    std::memcpy(block + 2 * at, &q, 2);
  }
}
inline void store_halves(uint8_t* block, int k, int block_elements, Vi a) {
  for (int i = 0; i < W; i++) {
    block[k + i] = (uint8_t)(int8_t)(a.v[i] >> 4);
    block[block_elements + k + i] = (uint8_t)(a.v[i] & 15);
  }
}
inline void store_bytes(uint8_t* block, int k, Vi a) {
  for (int i = 0; i < W; i++) block[k + i] = (uint8_t)(int8_t)a.v[i];
}

#undef ISOBATCH_LANES
#undef ISOBATCH_LANES_I

}  // namespace
}  // namespace isobatch::ISOBATCH_UNIT
