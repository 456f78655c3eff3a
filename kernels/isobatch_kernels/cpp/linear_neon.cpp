// Linear layers with NEON alone, for processors without its dot products: 16-bit weights times 16-bit activations.
#include "linear.h"

#if defined(__aarch64__)
#include "linear_neon_impl.h"

namespace isobatch {
namespace {

template <WeightCode C, int B>
struct SubBlock {
  static constexpr int kQuads = 1;
  int16x8_t w[4][B / 8];  // by output: 8 inputs a register

  ALWAYS_INLINE void decode(const uint8_t* quants) {
    for (int i = 0; i < B / 8; i++) {
      int8x16_t first, second;
      decode8<C>(quants, i, first, second);
      const int32x4_t a = vreinterpretq_s32_s8(first), b = vreinterpretq_s32_s8(second);
      const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(a, b)), high = vreinterpretq_s8_s32(vzip2q_s32(a, b));
      w[0][i] = vmovl_s8(vget_low_s8(low));
      w[1][i] = vmovl_high_s8(low);
      w[2][i] = vmovl_s8(vget_low_s8(high));
      w[3][i] = vmovl_high_s8(high);
    }
  }

  ALWAYS_INLINE void dot(const uint8_t* block, int, int part, int32x4_t (&sums)[kQuads]) const {
    const int16_t* q = reinterpret_cast<const int16_t*>(block) + part * B;
    int32x4_t sum[4];
    for (int32x4_t& s : sum) s = vdupq_n_s32(0);
    for (int i = 0; i < B / 8; i++) {
      const int16x8_t a = vld1q_s16(q + 8 * i);
      for (int n = 0; n < 4; n++) {
        sum[n] = vmlal_s16(sum[n], vget_low_s16(w[n][i]), vget_low_s16(a));
        sum[n] = vmlal_high_s16(sum[n], w[n][i], a);
      }
    }
    sums[0] = vpaddq_s32(vpaddq_s32(sum[0], sum[1]), vpaddq_s32(sum[2], sum[3]));
  }
};

}  // namespace

const LinearOps* neon_linear_ops() {
  static const LinearOps ops{"neon", ActFormat::kInt16, ActFormat::kInt16, quantized<SubBlock>, quantized<SubBlock>, dense_tiles};
  return &ops;
}

}  // namespace isobatch
#else
namespace isobatch {
const LinearOps* neon_linear_ops() { return nullptr; }
}  // namespace isobatch
#endif
