// 16-bit floating-point formats in portable code; everything static (see contract.h).
#pragma once
#include "contract.h"

namespace isobatch {

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return bits_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = (float)mantissa * 0x1p-24f;  // a subnormal half is a normal float
  return sign ? -magnitude : magnitude;
}
static inline float bfloat_to_float(uint16_t h) { return bits_float((uint32_t)h << 16); }

// Round to nearest even for values whose magnitude is in the normal range of the type or rounds to zero below it.
static inline float round_to_half(float x) {
  const float magnitude = std::fabs(x);
  if (magnitude < 0x1p-14f) {  // multiples of 2^-24
    const float shifted = magnitude + 0.5f;  // ulp of [0.5, 1) is 2^-24
    return std::copysign(shifted - 0.5f, x);
  }
  const uint32_t bits = float_bits(x);
  return bits_float((bits + 0xfffu + ((bits >> 13) & 1)) & ~0x1fffu);
}
static inline float round_to_bfloat(float x) {
  const uint32_t bits = float_bits(x);
  return bits_float((bits + 0x7fffu + ((bits >> 16) & 1)) & ~0xffffu);
}

}  // namespace isobatch
