// Preparing rows for 16-bit matrices (numerics.md section 3).
#include "half.h"
#include "linear.h"

namespace isobatch {

bool prepare_dense_row(const float* x, int K, bool bfloat, float* scaled, float* power) {
  uint32_t largest = 0;
  for (int k = 0; k < K; k++) largest = magnitude_bits(x[k]) > largest ? magnitude_bits(x[k]) : largest;
  *power = 1.0f;
  if (largest >= kNonFiniteBits || largest < kDenseRowFloorBits) {
    std::memset(scaled, 0, (size_t)K * sizeof(float));
    return largest < kNonFiniteBits;
  }
  const uint32_t exponent = largest >> 23;  // biased; the magnitude is a normal number
  const float down = bits_float((254 - exponent) << 23);
  *power = bits_float(exponent << 23);
  for (int k = 0; k < K; k++) {
    const float v = x[k] * down;
    scaled[k] = flush_below(bfloat ? round_to_bfloat(v) : round_to_half(v), kDenseFloor);
  }
  return true;
}

}  // namespace isobatch
