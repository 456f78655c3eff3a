// RMS norm (numerics.md section 4), with or without the quantiser behind it. A block makes a row, its first 256 threads the
// chains of squares.
// @use quantize

// The factor r of a row, for all threads of the block, which are 256 or more; `chains` is shared memory.
__device__ __forceinline__ float norm_factor(const float* x, int K, float inverse, float epsilon,
                                             float (&chains)[256]) {
  const int l = threadIdx.x;
  float c = 0.0f;
  for (int base = l; base < K && l < 256; base += 16 * 256) {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = base + 256 * i < K ? x[base + 256 * i] : 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float flushed = x1_flush(v[i], kInputFloor);
      if (base + 256 * i < K) c = x1_fma(flushed, flushed, c);
    }
  }
  if (l < 256) chains[l] = c;
  __syncthreads();
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = chains[(l & 31) + 32 * i];
  const float sum = __shfl_sync(kAllLanes, x1_tree256(v), 0);
  return x1_rsqrt(x1_fma(sum, inverse, epsilon));
}

// @kernel norm_quantize
// @constants A HALVES WARPS
// x (T, K); rows (M): which rows of x, null for 0, 1, 2, ..; inverse: fl(1/K). Blocks (1, M) of 32*WARPS: the more warps, the
// sooner a row is made, and the fewer rows at a time.
X1_KERNEL __launch_bounds__(32 * WARPS) norm_quantize(const float* x, const float* weight, const int* rows, fp16* q, float* ds,
                                               float* ds_half, unsigned* flags, int M, int K, float inverse, float epsilon,
                                               int op) {
  __shared__ float chains[256];
  const int lane = threadIdx.x & 31, row = blockIdx.y;
  constexpr int kEach = A / 32, kAtOnce = 64 / WARPS;
  // What the second pass needs is on its way during the first, and the weights before the previous launch ends.
  float values[kAtOnce][kEach], weights[kAtOnce][kEach];
  auto load = [&](const float* from, int base, float(&to)[kAtOnce][kEach]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
#pragma unroll
      for (int e = 0; e < kEach; e++) {
        const int k = (base + WARPS * i) * A + lane * kEach + e;
        to[i][e] = k < K ? from[k] : 0.0f;
      }
    }
  };
  load(weight, threadIdx.x >> 5, weights);
  x1_let_next_begin();
  x1_after_previous();
  const int token = rows ? rows[row] : row;
  const float* from = x + (size_t)token * K;
  load(from, threadIdx.x >> 5, values);
  const float r = norm_factor(from, K, inverse, epsilon, chains);
  const BlockWriter<A, HALVES> writer{q, ds, ds_half, (M + 7) / 8 * 8};
  bool finite = true;
  const int blocks = (K + A - 1) / A;
  for (int base = threadIdx.x >> 5; base < blocks; base += WARPS * kAtOnce) {
    if (base >= WARPS) {
      load(weight, base, weights);
      load(from, base, values);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int block = base + WARPS * i;
      if (block >= blocks) break;
      float v[kEach];
#pragma unroll
      for (int e = 0; e < kEach; e++) v[e] = x1_mul(x1_mul(x1_flush(values[i][e], kInputFloor), r), weights[i][e]);
      finite &= writer.write(v, lane, K - block * A, row, block, K);
    }
  }
  if (!finite && lane == 0) x1_record(flags, token, op);
}

// @kernel norm_rows
// The norm alone, as fp32 rows y (M, K). Blocks (1, M) of 256.
X1_KERNEL __launch_bounds__(256) norm_rows(const float* x, const float* weight, const int* rows, float* y, int K, float inverse,
                                           float epsilon) {
  __shared__ float chains[256];
  x1_let_next_begin();
  x1_after_previous();
  const size_t row = blockIdx.y;
  const float* from = x + (size_t)(rows ? rows[row] : row) * K;
  const float r = norm_factor(from, K, inverse, epsilon, chains);
  for (int k = threadIdx.x; k < K; k += 256) y[row * K + k] = x1_mul(x1_mul(x1_flush(from[k], kInputFloor), r), weight[k]);
}
