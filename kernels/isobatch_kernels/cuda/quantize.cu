// Activations to 12-bit integers in blocks of A (numerics.md section 2). A warp makes a block.
// q (M, K) holds the integers as fp16, those with k % 4 >= 2 as q/16 (weights.cu says why); ds (K/A, padded rows, 2) holds
// d and s; where half blocks have sums, ds_half (K/16, padded rows, 2) repeats d for each.
// @use common

template <int A, bool HALVES>
struct BlockWriter {
  static constexpr int kEach = A / 32;  // elements of a lane
  fp16* q;
  float* ds;
  float* ds_half;
  int padded;

  // x: the lane's elements (consecutive), those past n absent. False where the block is non-finite.
  __device__ __forceinline__ bool write(const float (&x)[kEach], int lane, int n, int row, int block, int K) const {
    unsigned top = 0;
#pragma unroll
    for (int e = 0; e < kEach; e++) top = max(top, lane * kEach + e < n ? x1_magnitude(x[e]) : 0u);
    const unsigned a = __reduce_max_sync(kAllLanes, top);
    const bool zero = a >= kNonFiniteBits || a < kBlockFloorBits;
    const float largest = __uint_as_float(a), inverse = x1_mul(2047.0f, x1_recip(largest));
    int sum = 0;
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int k = lane * kEach + e;
      float v = zero || k >= n ? 0.0f : rintf(x1_mul(x[e], inverse));
      v = v < -2047.0f ? -2047.0f : v > 2047.0f ? 2047.0f : v;
      sum += (int)v;
      if (k < n) q[(size_t)row * K + block * A + k] = x1_nearest_half(k % 4 >= 2 ? x1_mul(v, 0.0625f) : v);
    }
    const float d = zero ? 0.0f : x1_mul(largest, 1.0f / 2047.0f);
    const int low = __reduce_add_sync(kAllLanes, lane < 16 ? sum : 0), high = __reduce_add_sync(kAllLanes, lane < 16 ? 0 : sum);
    if (lane == 0) {
      reinterpret_cast<float2*>(ds)[(size_t)block * padded + row] = make_float2(d, (float)(low + high));
      if (HALVES) {
        float2* halves = reinterpret_cast<float2*>(ds_half) + (size_t)block * 2 * padded + row;
        halves[0] = make_float2(d, (float)low);
        if (n > 16) halves[padded] = make_float2(d, (float)high);
      }
    }
    return a < kNonFiniteBits;
  }
};

// @kernel quantize
// @constants A HALVES
// x (M, K). Blocks (ceil(K/A/8), M) of 256.
X1_KERNEL __launch_bounds__(256) quantize(const float* x, fp16* q, float* ds, float* ds_half, unsigned* flags, int M, int K,
                                          int op) {
  const int lane = threadIdx.x & 31, row = blockIdx.y, block = blockIdx.x * 8 + (threadIdx.x >> 5);
  x1_let_next_begin();
  x1_after_previous();
  if (block * A >= K) return;
  const BlockWriter<A, HALVES> writer{q, ds, ds_half, (M + 7) / 8 * 8};
  float v[A / 32];
#pragma unroll
  for (int e = 0; e < A / 32; e++) {
    const int k = block * A + lane * (A / 32) + e;
    v[e] = k < K ? x[(size_t)row * K + k] : 0.0f;
  }
  const bool finite = writer.write(v, lane, K - block * A, row, block, K);
  if (!finite && lane == 0) x1_record(flags, row, op);
}

// @kernel gate_quantize
// @constants A HALVES
// As quantize, of silu(gate) * up; x (M, 2, K) holds gate, then up.
X1_KERNEL __launch_bounds__(256) gate_quantize(const float* x, fp16* q, float* ds, float* ds_half, unsigned* flags, int M,
                                               int K, int op) {
  const int lane = threadIdx.x & 31, row = blockIdx.y, block = blockIdx.x * 8 + (threadIdx.x >> 5);
  x1_let_next_begin();
  x1_after_previous();
  if (block * A >= K) return;
  const BlockWriter<A, HALVES> writer{q, ds, ds_half, (M + 7) / 8 * 8};
  const float *gate = x + (size_t)row * 2 * K, *up = gate + K;
  float v[A / 32];
#pragma unroll
  for (int e = 0; e < A / 32; e++) {
    const int k = block * A + lane * (A / 32) + e;
    v[e] = k < K ? x1_silu_mul(gate[k], up[k]) : 0.0f;
  }
  const bool finite = writer.write(v, lane, K - block * A, row, block, K);
  if (!finite && lane == 0) x1_record(flags, row, op);
}

// @kernel gate
// silu(gate) * up as fp32 rows y (M, K). Blocks (ceil(K/256), M) of 256.
X1_KERNEL __launch_bounds__(256) gate(const float* x, float* y, int K) {
  const int k = blockIdx.x * 256 + threadIdx.x;
  const size_t row = blockIdx.y;
  x1_let_next_begin();
  x1_after_previous();
  if (k < K) y[row * K + k] = x1_silu_mul(x[row * 2 * K + k], x[row * 2 * K + K + k]);
}
