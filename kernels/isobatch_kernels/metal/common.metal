// Scalar building blocks of numeric class X1 (docs/numerics.md) for Metal. First line on purpose: Apple's compiler fuses
// a*b + c under every math mode unless told not to; where one rounding is meant, fma is written.
#pragma METAL fp contract(off)

// Before loops over arrays that have to live in registers.
#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr uint kBlockFloorBits = 0x2B800000u;     // 2^-40
constant constexpr uint kNonFiniteBits = 0x6F800000u;      // 2^96
constant constexpr uint kDenseRowFloorBits = 0x30800000u;  // 2^-30
constant constexpr uint kFloor40Bits = 0x2B800000u;        // 2^-40: rope inputs, attention outputs, dense values
constant constexpr uint kInputFloorBits = 0x21800000u;     // 2^-60: inputs of the norm and of SwiGLU, logit edits
constant constexpr uint kQueryFloorBits = 0x1F800000u;     // 2^-64
constant constexpr int kSlices = 8;
constant constexpr int kChunk = 256;
constant constexpr int kStatisticsChunk = 1024;

METAL_FUNC uint magnitude_bits(float x) { return as_type<uint>(x) & 0x7fffffffu; }
METAL_FUNC float flush_below(float x, uint floor_bits) { return magnitude_bits(x) < floor_bits ? 0.0f : x; }
METAL_FUNC float not_a_number() { return as_type<float>(0x7fc00000u); }

METAL_FUNC float x1_recip(float a) {
  float y = as_type<float>(0x7EF311C7u - as_type<uint>(a));
  for (int i = 0; i < 3; i++) {
    float e = fma(-a, y, 1.0f);
    y = fma(y, e, y);
  }
  return y;
}
METAL_FUNC float x1_rsqrt(float a) {
  float h = 0.5f * a;
  float y = as_type<float>(0x5F3759DFu - (as_type<uint>(a) >> 1));
  for (int i = 0; i < 3; i++) {
    float t = h * y;
    float e = fma(-t, y, 0.5f);
    y = fma(y, e, y);
  }
  return y;
}
METAL_FUNC float x1_exp(float x) {
  if (!(x >= -40.0f)) return 0.0f;
  float n = rint(x * 1.44269502f);
  float r = fma(n, -0.693359375f, x);
  r = fma(n, 2.12194442e-4f, r);
  float p = 1.98412701e-4f;
  p = fma(p, r, 1.38888892e-3f);
  p = fma(p, r, 8.33333377e-3f);
  p = fma(p, r, 4.16666679e-2f);
  p = fma(p, r, 1.66666672e-1f);
  p = fma(p, r, 0.5f);
  p = fma(p, r, 1.0f);
  p = fma(p, r, 1.0f);
  return as_type<float>(as_type<uint>(p) + (uint(int(n)) << 23));
}
METAL_FUNC float x1_silu_mul(float g, float u) {
  g = flush_below(g, kInputFloorBits);
  u = flush_below(u, kInputFloorBits);
  float z = -g;
  z = z < -100.0f ? -100.0f : z;
  z = z > 60.0f ? 60.0f : z;
  return (g * x1_recip(1.0f + x1_exp(z))) * u;
}

// Slice i of n sub-blocks is [slice_begin(i, n), slice_begin(i + 1, n)); with fewer than 8, some are empty.
METAL_FUNC int slice_begin(int i, int n) { return int(long(i) * long(n) / kSlices); }
METAL_FUNC int slice_of_first_block(int n) {
  int i = 0;
  while (slice_begin(i + 1, n) == 0) i++;
  return i;
}

// The tree of sum256 over 256 chains in threadgroup memory, by one simdgroup; every lane gets the sum. Lane l first folds
// eight chains as the steps of width 128, 64 and 32 would; then lanes exchange, and both partners add the same two values.
METAL_FUNC float sum256_tree(const threadgroup float* c, uint lane) {
  float v = ((c[lane] + c[lane + 128]) + (c[lane + 64] + c[lane + 192])) +
            ((c[lane + 32] + c[lane + 160]) + (c[lane + 96] + c[lane + 224]));
  for (ushort w = 16; w > 0; w /= 2) {
    float other = simd_shuffle_xor(v, w);
    v = v + other;
  }
  return v;
}

// fp16 bits: round to nearest even, saturated to +-65504. Integers only, so that no flush of subnormals can touch it.
METAL_FUNC ushort to_half_bits(float x) {
  uint u = as_type<uint>(x);
  uint sign = (u >> 16) & 0x8000u;
  uint m = u & 0x7fffffffu;
  if (m >= 0x477ff000u) return ushort(sign | 0x7bffu);
  if (m >= 0x38800000u) {
    uint shifted = m - 0x38000000u;
    return ushort(sign | ((shifted + 0xfffu + ((shifted >> 13) & 1u)) >> 13));
  }
  if (m < 0x33000000u) return ushort(sign);
  uint shift = 126u - (m >> 23);
  uint mantissa = (m & 0x7fffffu) | 0x800000u;
  uint kept = mantissa >> shift;
  uint rest = mantissa & ((1u << shift) - 1u);
  uint tie = 1u << (shift - 1u);
  return ushort(sign | (kept + (rest > tie || (rest == tie && (kept & 1u)) ? 1u : 0u)));
}
METAL_FUNC float bf16_to_float(ushort bits) { return as_type<float>(uint(bits) << 16); }

// Scales and biases of groups as stored: fp16, fp32, or bfloat16 bits in a ushort.
METAL_FUNC float widen(half x) { return float(x); }
METAL_FUNC float widen(float x) { return x; }
METAL_FUNC float widen(ushort x) { return bf16_to_float(x); }

// The end of a linear layer: y is the sum over slices, n the output, `at` its place in out and residual.
template <bool HAS_BIAS, bool HAS_RESIDUAL, bool IS_LOGIT>
METAL_FUNC float finish(float y, const device float* bias, const device float* residual, int n, size_t at) {
  if (HAS_BIAS) y = y + bias[n];
  if (HAS_RESIDUAL) y = y + residual[at];
  if (IS_LOGIT) y = y + 0.0f;
  return y;
}
