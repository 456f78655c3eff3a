// Building blocks of numeric class X1 (docs/numerics.md), for all kernels.
// Every rounding is written out: the compiler may contract plain a*b+c, but never these intrinsics.
// @use device

constexpr unsigned kBlockFloorBits = 0x2B800000u;     // 2^-40
constexpr unsigned kNonFiniteBits = 0x6F800000u;      // 2^96
constexpr unsigned kDenseRowFloorBits = 0x30800000u;  // 2^-30
constexpr float kInputFloor = 0x1p-60f;
constexpr float kRopeInputFloor = 0x1p-40f;
constexpr float kQueryFloor = 0x1p-64f;
constexpr float kOutputFloor = 0x1p-40f;
constexpr float kDenseFloor = 0x1p-40f;
constexpr int kSlices = 8;
constexpr int kChunk = 256;             // positions of an attention chunk
constexpr int kStatisticsChunk = 1024;  // ids
constexpr int kSlots = 16;              // positions of a cache block
constexpr unsigned kAllLanes = 0xffffffffu;
#define kMinusInfinity __uint_as_float(0xff800000u)

__device__ __forceinline__ float x1_mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float x1_add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float x1_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ unsigned x1_magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ float x1_flush(float x, float floor) { return fabsf(x) < floor ? 0.0f : x; }

__device__ __forceinline__ float x1_recip(float a) {
  float y = __uint_as_float(0x7EF311C7u - __float_as_uint(a));
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const float e = x1_fma(-a, y, 1.0f);
    y = x1_fma(y, e, y);
  }
  return y;
}
__device__ __forceinline__ float x1_rsqrt(float a) {
  const float h = x1_mul(0.5f, a);
  float y = __uint_as_float(0x5F3759DFu - (__float_as_uint(a) >> 1));
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const float t = x1_mul(h, y);
    const float e = x1_fma(-t, y, 0.5f);
    y = x1_fma(y, e, y);
  }
  return y;
}
__device__ __forceinline__ float x1_exp(float x) {
  if (!(x >= -40.0f)) return 0.0f;
  const float n = rintf(x1_mul(x, 0x1.715476p+0f));
  float r = x1_fma(n, -0x1.63p-1f, x);
  r = x1_fma(n, 0x1.bd0106p-13f, r);
  float p = 1.0f / 5040;
  p = x1_fma(p, r, 1.0f / 720);
  p = x1_fma(p, r, 1.0f / 120);
  p = x1_fma(p, r, 1.0f / 24);
  p = x1_fma(p, r, 1.0f / 6);
  p = x1_fma(p, r, 0.5f);
  p = x1_fma(p, r, 1.0f);
  p = x1_fma(p, r, 1.0f);
  return __uint_as_float(__float_as_uint(p) + ((unsigned)(int)n << 23));
}
__device__ __forceinline__ float x1_silu_mul(float g, float u) {
  g = x1_flush(g, kInputFloor);
  u = x1_flush(u, kInputFloor);
  float z = -g;
  z = z < -100.0f ? -100.0f : z;
  z = z > 60.0f ? 60.0f : z;
  return x1_mul(x1_mul(g, x1_recip(x1_add(1.0f, x1_exp(z)))), u);
}

// Nearest fp16, saturated; NaN becomes a finite value, so that a cache never holds one.
__device__ __forceinline__ fp16 x1_to_half(float x) {
  if (x > 65504.0f) x = 65504.0f;
  if (!(x >= -65504.0f)) x = x < 0.0f ? -65504.0f : 65504.0f;
  return x1_nearest_half(x);
}
__device__ __forceinline__ float2 x1_half_floats(unsigned two) {
  return make_float2(x1_half_float((fp16)(two & 0xffffu)), x1_half_float((fp16)(two >> 16)));
}
__device__ __forceinline__ float x1_bfloat_float(bf16 b) { return __uint_as_float((unsigned)b << 16); }

// The part of sum256's tree inside a warp: lane i holds chain i.
__device__ __forceinline__ float x1_tree32(float c) {
#pragma unroll
  for (int w = 16; w >= 1; w /= 2) c = x1_add(c, __shfl_down_sync(kAllLanes, c, w));
  return c;  // right in lane 0
}
// sum256 by one warp: v[k] of lane i is chain i + 32*k.
__device__ __forceinline__ float x1_tree256(const float (&v)[8]) {
  const float a = x1_add(v[0], v[4]), b = x1_add(v[1], v[5]), c = x1_add(v[2], v[6]), d = x1_add(v[3], v[7]);
  return x1_tree32(x1_add(x1_add(a, c), x1_add(b, d)));
}

__device__ __forceinline__ float x1_warp_max(float v) {
#pragma unroll
  for (int w = 16; w >= 1; w /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, w));
  return v;
}

// Marks a token row as non-finite: the smallest 1 + op index stays. Flags start at 0xffffffff.
__device__ __forceinline__ void x1_record(unsigned* flags, int row, int op) { atomicMin(flags + row, 1u + (unsigned)op); }

__device__ __forceinline__ int x1_slice_begin(int i, int n) { return (int)((unsigned)i * (unsigned)n / kSlices); }
