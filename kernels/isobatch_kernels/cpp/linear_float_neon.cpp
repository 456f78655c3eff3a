// Float linear layers with NEON of aarch64; absent elsewhere.
#include "linear_float.h"

#if defined(__aarch64__)
#define ISOBATCH_UNIT neon
#include "simd_neon.h"

namespace isobatch::neon {
namespace {

constexpr int kRows = 6, kVectors = 4;
using Codes = uint32x4_t;

inline Codes load_codes(const uint8_t* at) { return vreinterpretq_u32_u8(vld1q_u8(at)); }
inline Vf bits_at(Codes codes, int shift, uint32_t mask) {
  return vcvtq_f32_u32(vandq_u32(vshlq_u32(codes, vdupq_n_s32(-shift)), vdupq_n_u32(mask)));
}
inline Vf nibble(Codes codes, int i) { return bits_at(codes, 8 * (i % 4) + (i < 4 ? 0 : 4), 15); }
inline Vf byte_value(Codes codes, int i) { return bits_at(codes, 8 * i, 255); }
inline Vf load_bfloat(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }

}  // namespace
}  // namespace isobatch::neon

#include "linear_float_impl.h"

namespace isobatch {
const FloatLinearOps* neon_float_ops() {
  static constexpr FloatLinearOps table = neon::float_ops_table();
  return &table;
}
}  // namespace isobatch
#else
namespace isobatch {
const FloatLinearOps* neon_float_ops() { return nullptr; }
}  // namespace isobatch
#endif
