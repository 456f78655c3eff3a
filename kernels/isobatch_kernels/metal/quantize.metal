// Activations as 12-bit integers in blocks (numerics.md section 2), alone or after the RMS norm or SwiGLU.
//
// Layout, row-major: q (M, NB*A) half integers, zero past K; d (M, NB) float; s (M, NB*A/SB) sums of SB elements as float.
// A: 32 or 64 elements a block. SB: 16 where a consumer has groups of 16, else A. One simdgroup makes one block.
// A block with a value that is not finite gets d = NaN, which every later op of the row hands on.
// @use common

template <int A, int SB>
METAL_FUNC void quantize_block(thread const float* x, uint lane, device half* q, device float* d, device float* s) {
  uint largest = 0;
  for (int i = 0; i < A / 32; i++) largest = max(largest, magnitude_bits(x[i]));
  largest = simd_max(largest);
  bool zero = largest < kBlockFloorBits || largest >= kNonFiniteBits;
  float a = as_type<float>(zero ? 0x3f800000u : largest);
  float inverse = 2047.0f * x1_recip(a);
  int sum = 0;
  for (int i = 0; i < A / 32; i++) {
    float v = rint(x[i] * inverse);
    v = v < -2047.0f ? -2047.0f : v;
    v = v > 2047.0f ? 2047.0f : v;
    int n = zero ? 0 : int(v);
    q[i * 32 + int(lane)] = half(n);
    sum += n;
  }
  if (SB == 16) {
    for (ushort w = 8; w > 0; w /= 2) sum += simd_shuffle_xor(sum, w);
    if (lane % 16 == 0) s[lane / 16] = float(sum);
  } else {
    sum = simd_sum(sum);
    if (lane == 0) s[0] = float(sum);
  }
  if (lane == 0) d[0] = largest >= kNonFiniteBits ? not_a_number() : zero ? 0.0f : a * 4.88519785e-4f;
}

// @kernel quantize
// @inputs x sizes
// @outputs q d s
// sizes: K, NB. Grid (ceil(NB/8)*256, M, 1).
{
  const int K = sizes[0], NB = sizes[1];
  const int block = int(thread_position_in_grid.x / 32);
  const size_t row = threadgroup_position_in_grid.y;
  const uint lane = thread_index_in_simdgroup;
  if (block >= NB) return;
  float v[A / 32];
  for (int i = 0; i < A / 32; i++) {
    int k = block * A + i * 32 + int(lane);
    v[i] = k < K ? x[row * K + k] : 0.0f;
  }
  const size_t at = row * NB + block;
  quantize_block<A, SB>(v, lane, q + at * A, d + at, s + at * (A / SB));
}

// @kernel gate_quantize
// @inputs gate_up sizes
// @outputs q d s
// gate_up: (M, 2K). sizes: K, NB. Grid (ceil(NB/8)*256, M, 1).
{
  const int K = sizes[0], NB = sizes[1];
  const int block = int(thread_position_in_grid.x / 32);
  const size_t row = threadgroup_position_in_grid.y;
  const uint lane = thread_index_in_simdgroup;
  if (block >= NB) return;
  float v[A / 32];
  for (int i = 0; i < A / 32; i++) {
    int k = block * A + i * 32 + int(lane);
    v[i] = k < K ? x1_silu_mul(gate_up[row * 2 * K + k], gate_up[row * 2 * K + K + k]) : 0.0f;
  }
  const size_t at = row * NB + block;
  quantize_block<A, SB>(v, lane, q + at * A, d + at, s + at * (A / SB));
}

// @kernel gate
// @inputs gate_up sizes
// @outputs y
// For dense consumers. gate_up: (M, 2K). sizes: K. Grid (ceil(K/256)*256, M, 1).
{
  const int K = sizes[0];
  const int k = int(thread_position_in_grid.x);
  const size_t row = threadgroup_position_in_grid.y;
  if (k < K) y[row * K + k] = x1_silu_mul(gate_up[row * 2 * K + k], gate_up[row * 2 * K + K + k]);
}
