// Vectors of eight lanes in AVX2, FMA and F16C. simd_scalar.h says what each function means.
#pragma once
#include <immintrin.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include "contract.h"

namespace isobatch::ISOBATCH_UNIT {
namespace {

constexpr int W = 8;
using Vf = __m256;
using Vi = __m256i;

constexpr int kScoreBlocks[5] = {0, 4, 2, 2, 1};
constexpr int kOutputVectors[5] = {0, 8, 4, 4, 2};

alignas(32) constexpr int32_t kLaneMasks[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
inline __m256i first_lanes(int n) { return _mm256_loadu_si256((const __m256i*)(kLaneMasks + W - n)); }

inline Vf load(const float* p) { return _mm256_loadu_ps(p); }
inline Vf load_n(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline Vf load_n(const float* p, int n, Vf fill) {
  const __m256i mask = first_lanes(n);
  return _mm256_blendv_ps(fill, _mm256_maskload_ps(p, mask), _mm256_castsi256_ps(mask));
}
inline void store(float* p, Vf a) { _mm256_storeu_ps(p, a); }
inline void store_n(float* p, Vf a, int n) { _mm256_maskstore_ps(p, first_lanes(n), a); }
inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

inline Vf set(float x) { return _mm256_set1_ps(x); }
inline Vf zero() { return _mm256_setzero_ps(); }
inline Vf add(Vf a, Vf b) { return _mm256_add_ps(a, b); }
inline Vf sub(Vf a, Vf b) { return _mm256_sub_ps(a, b); }
inline Vf mul(Vf a, Vf b) { return _mm256_mul_ps(a, b); }
inline Vf fma(Vf a, Vf b, Vf c) { return _mm256_fmadd_ps(a, b, c); }
inline Vf fnma(Vf a, Vf b, Vf c) { return _mm256_fnmadd_ps(a, b, c); }
inline Vf fms(Vf a, Vf b, Vf c) { return _mm256_fmsub_ps(a, b, c); }
inline Vf min(Vf a, Vf b) { return _mm256_min_ps(a, b); }
inline Vf max(Vf a, Vf b) { return _mm256_max_ps(a, b); }
inline Vf round(Vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vf negate(Vf a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
inline Vf zero_below(Vf a, Vf floor) {
  const Vf size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
  return _mm256_andnot_ps(_mm256_cmp_ps(size, floor, _CMP_LT_OQ), a);
}
inline Vf where_ge(Vf x, Vf limit, Vf a) { return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_GE_OQ), a); }
inline uint32_t mask_gt(Vf a, Vf b) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline uint32_t mask_ge(Vf a, Vf b) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }

inline Vi to_int(Vf a) { return _mm256_cvtps_epi32(a); }
inline Vf add_exponent(Vf p, Vf n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(to_int(n), 23)));
}
inline Vf recip_seed(Vf a) {
  return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32((int)kRecipSeed), _mm256_castps_si256(a)));
}
inline Vi magnitude(Vf a) { return _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffffff)); }
inline Vi zero_i() { return _mm256_setzero_si256(); }
inline Vi add(Vi a, Vi b) { return _mm256_add_epi32(a, b); }
inline Vi max(Vi a, Vi b) { return _mm256_max_epi32(a, b); }
inline Vi clamp(Vi a, int32_t low, int32_t high) {
  return _mm256_min_epi32(_mm256_max_epi32(a, _mm256_set1_epi32(low)), _mm256_set1_epi32(high));
}

inline float sum_lanes(Vf a) {
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
inline float max_lanes(Vf a) {
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
inline int32_t sum_lanes(Vi a) {
  __m128i c = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  c = _mm_add_epi32(c, _mm_unpackhi_epi64(c, c));
  return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 1)));
}
inline int32_t max_lanes(Vi a) {
  __m128i c = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  c = _mm_max_epi32(c, _mm_unpackhi_epi64(c, c));
  return _mm_cvtsi128_si32(_mm_max_epi32(c, _mm_shuffle_epi32(c, 1)));
}

inline Vf in_order(__m256 a) {  // 64-bit quarters 0,2,1,3: undoes what two-operand shuffles do to 128-bit lanes
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(a), 0xd8));
}
inline void split_pairs(Vf a, Vf b, Vf& even, Vf& odd) {
  even = in_order(_mm256_shuffle_ps(a, b, 0x88));
  odd = in_order(_mm256_shuffle_ps(a, b, 0xdd));
}
inline void join_pairs(Vf even, Vf odd, Vf& a, Vf& b) {
  const Vf low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  a = _mm256_permute2f128_ps(low, high, 0x20);
  b = _mm256_permute2f128_ps(low, high, 0x31);
}

inline Vf load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Vf load_f16_n(const uint16_t* p, int n) {
  uint16_t lanes[W] = {};
  std::memcpy(lanes, p, (size_t)n * sizeof(uint16_t));
  return load_f16(lanes);
}
inline void store_f16(uint16_t* p, Vf a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline __m128i pack_int16(Vi a) { return _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)); }
inline void store_int16(uint8_t* block, int k, Vi a) { _mm_storeu_si128((__m128i*)(block + 2 * k), pack_int16(a)); }
inline void store_int16_shuffled(uint8_t* block, int k, Vi a) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  _mm_storeu_si128((__m128i*)(block + 2 * k), _mm_shuffle_epi8(pack_int16(a), order));
}
inline void store_halves(uint8_t* block, int k, int block_elements, Vi a) {
  const __m128i q = pack_int16(a), high = _mm_srai_epi16(q, 4), low = _mm_and_si128(q, _mm_set1_epi16(15));
  _mm_storel_epi64((__m128i*)(block + k), _mm_packs_epi16(high, high));
  _mm_storel_epi64((__m128i*)(block + block_elements + k), _mm_packs_epi16(low, low));
}
inline void store_bytes(uint8_t* block, int k, Vi a) {
  const __m128i q = pack_int16(a);
  _mm_storel_epi64((__m128i*)(block + k), _mm_packs_epi16(q, q));
}

}  // namespace
}  // namespace isobatch::ISOBATCH_UNIT
