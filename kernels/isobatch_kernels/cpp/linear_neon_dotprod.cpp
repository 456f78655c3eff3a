// Linear layers with NEON's dot products of signed bytes; activations come as the two halves q = 16*hi + lo.
#include "linear.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "linear_neon_impl.h"

namespace isobatch {
namespace {

template <WeightCode C, int B>
struct SubBlock {
  static constexpr int kQuads = 64 / B;  // sixteen registers of weights
  int8x16_t w[kQuads][B / 4];            // 4 outputs of 4 inputs

  ALWAYS_INLINE void decode(const uint8_t* quants) {
    for (int i = 0; i < kQuads; i++) {
      for (int k = 0; k < B / 8; k++) decode8<C>(quants + 16 * i, k, w[i][2 * k], w[i][2 * k + 1]);
    }
  }

  ALWAYS_INLINE void dot(const uint8_t* block, int A, int part, int32x4_t (&sums)[kQuads]) const {
    const int8_t *hi = reinterpret_cast<const int8_t*>(block) + part * B, *lo = hi + A;
    int32x4_t high[kQuads], low[kQuads];
    for (int i = 0; i < kQuads; i++) high[i] = low[i] = vdupq_n_s32(0);
    for (int k = 0; k < B / 16; k++) {
      const int8x16_t h = vld1q_s8(hi + 16 * k), l = vld1q_s8(lo + 16 * k);
      for (int i = 0; i < kQuads; i++) {
        const int8x16_t* inputs = w[i] + 4 * k;
        high[i] = vdotq_laneq_s32(high[i], inputs[0], h, 0);
        low[i] = vdotq_laneq_s32(low[i], inputs[0], l, 0);
        high[i] = vdotq_laneq_s32(high[i], inputs[1], h, 1);
        low[i] = vdotq_laneq_s32(low[i], inputs[1], l, 1);
        high[i] = vdotq_laneq_s32(high[i], inputs[2], h, 2);
        low[i] = vdotq_laneq_s32(low[i], inputs[2], l, 2);
        high[i] = vdotq_laneq_s32(high[i], inputs[3], h, 3);
        low[i] = vdotq_laneq_s32(low[i], inputs[3], l, 3);
      }
    }
    for (int i = 0; i < kQuads; i++) sums[i] = vaddq_s32(vshlq_n_s32(high[i], 4), low[i]);
  }
};

}  // namespace

const LinearOps* neon_dotprod_linear_ops() {
  static const LinearOps ops{"neon-dotprod", ActFormat::kHalves, ActFormat::kHalves, quantized<SubBlock>, quantized<SubBlock>, dense_tiles};
  return &ops;
}

}  // namespace isobatch
#else
namespace isobatch {
const LinearOps* neon_dotprod_linear_ops() { return nullptr; }
}  // namespace isobatch
#endif
