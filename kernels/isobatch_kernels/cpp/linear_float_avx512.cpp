// Float linear layers with AVX-512; absent where the file is compiled without it.
#include "linear_float.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ISOBATCH_UNIT avx512
#include "simd_avx512.h"

namespace isobatch::avx512 {
namespace {

constexpr int kRows = 12, kVectors = 2;
using Codes = __m512i;

inline Codes load_codes(const uint8_t* at) { return _mm512_loadu_si512(at); }
// The permutation looks at the low four bits of a lane alone: a table of the floats 0 to 15 needs no mask.
inline Vf nibble(Codes codes, int i) {
  const Vf table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, (unsigned)(8 * (i % 4) + (i < 4 ? 0 : 4))), table);
}
inline Vf byte_value(Codes codes, int i) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(codes, (unsigned)(8 * i)), _mm512_set1_epi32(255)));
}
inline Vf load_bfloat(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

}  // namespace
}  // namespace isobatch::avx512

#include "linear_float_impl.h"

namespace isobatch {
const FloatLinearOps* avx512_float_ops() {
  static constexpr FloatLinearOps table = avx512::float_ops_table();
  return &table;
}
}  // namespace isobatch
#else
namespace isobatch {
const FloatLinearOps* avx512_float_ops() { return nullptr; }
}  // namespace isobatch
#endif
