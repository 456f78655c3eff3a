// Float linear layers with AVX2, FMA and F16C; absent where the file is compiled without them.
#include "linear_float.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ISOBATCH_UNIT avx2
#include "simd_avx2.h"

namespace isobatch::avx2 {
namespace {

constexpr int kRows = 6, kVectors = 2;
using Codes = __m256i;

inline Codes load_codes(const uint8_t* at) { return _mm256_loadu_si256((const __m256i*)at); }
inline Vf bits_at(Codes codes, int shift, int mask) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(codes, shift), _mm256_set1_epi32(mask)));
}
inline Vf nibble(Codes codes, int i) { return bits_at(codes, 8 * (i % 4) + (i < 4 ? 0 : 4), 15); }
inline Vf byte_value(Codes codes, int i) { return bits_at(codes, 8 * i, 255); }
inline Vf load_bfloat(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}

}  // namespace
}  // namespace isobatch::avx2

#include "linear_float_impl.h"

namespace isobatch {
const FloatLinearOps* avx2_float_ops() {
  static constexpr FloatLinearOps table = avx2::float_ops_table();
  return &table;
}
}  // namespace isobatch
#else
namespace isobatch {
const FloatLinearOps* avx2_float_ops() { return nullptr; }
}  // namespace isobatch
#endif
