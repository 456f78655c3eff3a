// Scalar building blocks of numeric class X1 (docs/numerics.md). Everything here is `static inline` on purpose: files are
// compiled for different instruction sets, and a shared inline symbol could be taken from the wrong one.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace isobatch {

constexpr int kActivationMax = 2047;              // 12-bit block integers
constexpr int kShortActivationMax = 127;          // 8-bit ones, a numeric class of their own
constexpr uint32_t kBlockFloorBits = 0x2B800000u;     // 2^-40
constexpr uint32_t kNonFiniteBits = 0x6F800000u;      // 2^96
constexpr float kScaleFloor = 0x1p-24f;
constexpr float kInputFloor = 0x1p-60f;           // inputs of the norm and of SwiGLU, values of logit edits
constexpr float kRopeInputFloor = 0x1p-40f;
constexpr float kRopeTableFloor = 0x1p-24f;
constexpr float kQueryFloor = 0x1p-64f;
constexpr float kOutputFloor = 0x1p-40f;
constexpr float kDenseFloor = 0x1p-40f;
constexpr uint32_t kDenseRowFloorBits = 0x30800000u;  // 2^-30
constexpr float kExpCut = -40.0f;
constexpr int kSlices = 8;                        // slices of a linear layer's K
constexpr int kAttentionChunk = 256;              // absolute positions
constexpr int kStatisticsChunk = 1024;            // ids

constexpr uint32_t kRecipSeed = 0x7EF311C7u;
constexpr uint32_t kRsqrtSeed = 0x5F3759DFu;
constexpr float kLog2e = 0x1.715476p+0f;
constexpr float kLn2High = 0x1.63p-1f;
constexpr float kLn2Low = -0x1.bd0106p-13f;       // ln 2 = kLn2High + kLn2Low
constexpr float kExpCoefficients[8] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};

static inline uint32_t float_bits(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
static inline float bits_float(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }
static inline uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }
static inline float flush_below(float x, float floor) { return std::fabs(x) < floor ? 0.0f : x; }
// fl(1/limit) for the two limits of block integers.
static inline float inverse_limit(int limit) { return limit == kShortActivationMax ? 1.0f / 127.0f : 1.0f / 2047.0f; }

static inline float x1_recip(float a) {
  float y = bits_float(kRecipSeed - float_bits(a));
  for (int i = 0; i < 3; i++) { float e = std::fma(-a, y, 1.0f); y = std::fma(y, e, y); }
  return y;
}
static inline float x1_rsqrt(float a) {
  float h = 0.5f * a, y = bits_float(kRsqrtSeed - (float_bits(a) >> 1));
  for (int i = 0; i < 3; i++) { float t = h * y; float e = std::fma(-t, y, 0.5f); y = std::fma(y, e, y); }
  return y;
}
static inline float x1_exp(float x) {
  if (!(x >= kExpCut)) return 0.0f;               // also NaN: the row is non-finite anyway
  float n = std::rint(x * kLog2e);
  float r = std::fma(n, -kLn2High, x);
  r = std::fma(n, -kLn2Low, r);
  float p = kExpCoefficients[0];
  for (int i = 1; i < 8; i++) p = std::fma(p, r, kExpCoefficients[i]);
  return bits_float(float_bits(p) + ((uint32_t)(int32_t)n << 23));
}
static inline float x1_silu_mul(float g, float u) {
  g = flush_below(g, kInputFloor);
  u = flush_below(u, kInputFloor);
  float z = -g;
  z = z < -100.0f ? -100.0f : z;
  z = z > 60.0f ? 60.0f : z;
  return (g * x1_recip(1.0f + x1_exp(z))) * u;
}

// Slice boundaries of a linear layer: slice i covers [slice_begin(i, n), slice_begin(i + 1, n)).
static inline int slice_begin(int i, int n) { return (int)((int64_t)i * n / kSlices); }

}  // namespace isobatch
