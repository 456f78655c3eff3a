// Vectors of sixteen lanes in AVX-512 (F, BW, DQ, VL). simd_scalar.h says what each function means.
#pragma once
#include <immintrin.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include "contract.h"

namespace isobatch::ISOBATCH_UNIT {
namespace {

constexpr int W = 16;
using Vf = __m512;
using Vi = __m512i;

constexpr int kScoreBlocks[5] = {0, 8, 4, 4, 4};
constexpr int kOutputVectors[5] = {0, 8, 8, 4, 4};

inline __mmask16 first_lanes(int n) { return (__mmask16)((1u << n) - 1); }

inline Vf load(const float* p) { return _mm512_loadu_ps(p); }
inline Vf load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline Vf load_n(const float* p, int n, Vf fill) { return _mm512_mask_loadu_ps(fill, first_lanes(n), p); }
inline void store(float* p, Vf a) { _mm512_storeu_ps(p, a); }
inline void store_n(float* p, Vf a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

inline Vf set(float x) { return _mm512_set1_ps(x); }
inline Vf zero() { return _mm512_setzero_ps(); }
inline Vf add(Vf a, Vf b) { return _mm512_add_ps(a, b); }
inline Vf sub(Vf a, Vf b) { return _mm512_sub_ps(a, b); }
inline Vf mul(Vf a, Vf b) { return _mm512_mul_ps(a, b); }
inline Vf fma(Vf a, Vf b, Vf c) { return _mm512_fmadd_ps(a, b, c); }
inline Vf fnma(Vf a, Vf b, Vf c) { return _mm512_fnmadd_ps(a, b, c); }
inline Vf fms(Vf a, Vf b, Vf c) { return _mm512_fmsub_ps(a, b, c); }
inline Vf min(Vf a, Vf b) { return _mm512_min_ps(a, b); }
inline Vf max(Vf a, Vf b) { return _mm512_max_ps(a, b); }
inline Vf round(Vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vf negate(Vf a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
inline Vf zero_below(Vf a, Vf floor) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(a), floor, _CMP_NLT_UQ), a);
}
inline Vf where_ge(Vf x, Vf limit, Vf a) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ), a); }
inline uint32_t mask_gt(Vf a, Vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline uint32_t mask_ge(Vf a, Vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }

inline Vi to_int(Vf a) { return _mm512_cvtps_epi32(a); }
inline Vf add_exponent(Vf p, Vf n) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(to_int(n), 23)));
}
inline Vf recip_seed(Vf a) {
  return _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32((int)kRecipSeed), _mm512_castps_si512(a)));
}
inline Vi magnitude(Vf a) { return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)); }
inline Vi zero_i() { return _mm512_setzero_si512(); }
inline Vi add(Vi a, Vi b) { return _mm512_add_epi32(a, b); }
inline Vi max(Vi a, Vi b) { return _mm512_max_epi32(a, b); }
inline Vi clamp(Vi a, int32_t low, int32_t high) {
  return _mm512_min_epi32(_mm512_max_epi32(a, _mm512_set1_epi32(low)), _mm512_set1_epi32(high));
}

inline float sum_lanes(Vf a) {
  __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
inline float max_lanes(Vf a) { return _mm512_reduce_max_ps(a); }
inline int32_t sum_lanes(Vi a) { return _mm512_reduce_add_epi32(a); }
inline int32_t max_lanes(Vi a) { return _mm512_reduce_max_epi32(a); }

inline void split_pairs(Vf a, Vf b, Vf& even, Vf& odd) {
  const __m512i index = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even = _mm512_permutex2var_ps(a, index, b);
  odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(index, _mm512_set1_epi32(1)), b);
}
inline void join_pairs(Vf even, Vf odd, Vf& a, Vf& b) {
  const __m512i index = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  a = _mm512_permutex2var_ps(even, index, odd);
  b = _mm512_permutex2var_ps(even, _mm512_add_epi32(index, _mm512_set1_epi32(8)), odd);
}

inline Vf load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Vf load_f16_n(const uint16_t* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline void store_f16(uint16_t* p, Vf a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline void store_int16(uint8_t* block, int k, Vi a) {
  _mm256_storeu_si256((__m256i*)(block + 2 * k), _mm512_cvtepi32_epi16(a));
}
inline void store_int16_shuffled(uint8_t* block, int k, Vi a) {
  const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  store_int16(block, k, _mm512_permutexvar_epi32(order, a));
}
inline void store_halves(uint8_t* block, int k, int block_elements, Vi a) {
  _mm_storeu_si128((__m128i*)(block + k), _mm512_cvtepi32_epi8(_mm512_srai_epi32(a, 4)));
  _mm_storeu_si128((__m128i*)(block + block_elements + k), _mm512_cvtepi32_epi8(_mm512_and_si512(a, _mm512_set1_epi32(15))));
}
inline void store_bytes(uint8_t* block, int k, Vi a) { _mm_storeu_si128((__m128i*)(block + k), _mm512_cvtepi32_epi8(a)); }

}  // namespace
}  // namespace isobatch::ISOBATCH_UNIT
