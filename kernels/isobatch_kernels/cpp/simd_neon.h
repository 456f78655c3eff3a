// Vectors of four lanes in NEON of aarch64. simd_scalar.h says what each function means.
#pragma once
#include <arm_neon.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include "contract.h"

namespace isobatch::ISOBATCH_UNIT {
namespace {

constexpr int W = 4;
using Vf = float32x4_t;
using Vi = int32x4_t;

constexpr int kScoreBlocks[5] = {0, 4, 2, 1, 1};
constexpr int kOutputVectors[5] = {0, 8, 8, 4, 4};

inline Vf load(const float* p) { return vld1q_f32(p); }
inline Vf load_n(const float* p, int n, Vf fill) {
  if (n >= W) return load(p);
  float lanes[W];
  vst1q_f32(lanes, fill);
  for (int i = 0; i < n; i++) lanes[i] = p[i];
  return vld1q_f32(lanes);
}
inline Vf load_n(const float* p, int n) { return load_n(p, n, vdupq_n_f32(0.0f)); }
inline void store(float* p, Vf a) { vst1q_f32(p, a); }
inline void store_n(float* p, Vf a, int n) {
  if (n >= W) return store(p, a);
  float lanes[W];
  vst1q_f32(lanes, a);
  for (int i = 0; i < n; i++) p[i] = lanes[i];
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }

inline Vf set(float x) { return vdupq_n_f32(x); }
inline Vf zero() { return vdupq_n_f32(0.0f); }
inline Vf add(Vf a, Vf b) { return vaddq_f32(a, b); }
inline Vf sub(Vf a, Vf b) { return vsubq_f32(a, b); }
inline Vf mul(Vf a, Vf b) { return vmulq_f32(a, b); }
inline Vf fma(Vf a, Vf b, Vf c) { return vfmaq_f32(c, a, b); }
inline Vf fnma(Vf a, Vf b, Vf c) { return vfmsq_f32(c, a, b); }
inline Vf fms(Vf a, Vf b, Vf c) { return vfmaq_f32(vnegq_f32(c), a, b); }
// By comparison: the instructions for minimum and maximum treat NaN otherwise.
inline Vf min(Vf a, Vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Vf max(Vf a, Vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Vf round(Vf a) { return vrndnq_f32(a); }
inline Vf negate(Vf a) { return vnegq_f32(a); }
inline Vf keep(uint32x4_t mask, Vf a) { return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(a))); }
inline Vf zero_below(Vf a, Vf floor) { return keep(vmvnq_u32(vcaltq_f32(a, floor)), a); }
inline Vf where_ge(Vf x, Vf limit, Vf a) { return keep(vcgeq_f32(x, limit), a); }
inline uint32_t mask_bits(uint32x4_t mask) {
  constexpr uint32_t kBits[W] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(mask, vld1q_u32(kBits)));
}
inline uint32_t mask_gt(Vf a, Vf b) { return mask_bits(vcgtq_f32(a, b)); }
inline uint32_t mask_ge(Vf a, Vf b) { return mask_bits(vcgeq_f32(a, b)); }

inline Vi to_int(Vf a) { return vcvtnq_s32_f32(a); }
inline Vf add_exponent(Vf p, Vf n) {
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(to_int(n), 23)));
}
inline Vf recip_seed(Vf a) { return vreinterpretq_f32_u32(vsubq_u32(vdupq_n_u32(kRecipSeed), vreinterpretq_u32_f32(a))); }
inline Vi magnitude(Vf a) { return vandq_s32(vreinterpretq_s32_f32(a), vdupq_n_s32(0x7fffffff)); }
inline Vi zero_i() { return vdupq_n_s32(0); }
inline Vi add(Vi a, Vi b) { return vaddq_s32(a, b); }
inline Vi max(Vi a, Vi b) { return vmaxq_s32(a, b); }
inline Vi clamp(Vi a, int32_t low, int32_t high) { return vminq_s32(vmaxq_s32(a, vdupq_n_s32(low)), vdupq_n_s32(high)); }

inline float sum_lanes(Vf a) { return vpadds_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a))); }
inline float max_lanes(Vf a) { return vmaxnmvq_f32(a); }
inline int32_t sum_lanes(Vi a) { return vaddvq_s32(a); }
inline int32_t max_lanes(Vi a) { return vmaxvq_s32(a); }

inline void split_pairs(Vf a, Vf b, Vf& even, Vf& odd) {
  even = vuzp1q_f32(a, b);
  odd = vuzp2q_f32(a, b);
}
inline void join_pairs(Vf even, Vf odd, Vf& a, Vf& b) {
  a = vzip1q_f32(even, odd);
  b = vzip2q_f32(even, odd);
}

// The bits that flush subnormal numbers do not reach conversions to and from fp16.
inline Vf load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline Vf load_f16_n(const uint16_t* p, int n) {
  uint16_t lanes[W] = {};
  for (int i = 0; i < n; i++) lanes[i] = p[i];
  return load_f16(lanes);
}
inline void store_f16(uint16_t* p, Vf a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }

inline void store_int16(uint8_t* block, int k, Vi a) { vst1_s16(reinterpret_cast<int16_t*>(block) + k, vmovn_s32(a)); }
inline void store_int16_shuffled(uint8_t* block, int k, Vi a) {
  const int16x4_t q = vmovn_s32(a);
  const int32x2_t even = vreinterpret_s32_s16(vuzp1_s16(q, q)), odd = vreinterpret_s32_s16(vuzp2_s16(q, q));
  int32_t* at = reinterpret_cast<int32_t*>(block + 2 * (k & ~7) + (k & 4));
  vst1_lane_s32(at, even, 0);
  vst1_lane_s32(at + 2, odd, 0);
}
inline void store_4_bytes(uint8_t* p, int16x4_t q) {
  vst1_lane_s32(reinterpret_cast<int32_t*>(p), vreinterpret_s32_s8(vmovn_s16(vcombine_s16(q, q))), 0);
}
inline void store_halves(uint8_t* block, int k, int block_elements, Vi a) {
  const int16x4_t q = vmovn_s32(a);
  store_4_bytes(block + k, vshr_n_s16(q, 4));
  store_4_bytes(block + block_elements + k, vand_s16(q, vdup_n_s16(15)));
}
inline void store_bytes(uint8_t* block, int k, Vi a) { store_4_bytes(block + k, vmovn_s32(a)); }

}  // namespace
}  // namespace isobatch::ISOBATCH_UNIT
