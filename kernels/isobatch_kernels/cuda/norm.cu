// RMS norm (numerics.md section 4), with or without the quantiser behind it. A block of 256 threads makes a row.
// @use quantize

// The factor r of a row; `chains` is shared memory.
__device__ __forceinline__ float norm_factor(const float* x, int K, const float* constants, float (&chains)[256]) {
  const int l = threadIdx.x;
  float c = 0.0f;
  for (int base = l; base < K; base += 16 * 256) {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = base + 256 * i < K ? x[base + 256 * i] : 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float flushed = x1_flush(v[i], kInputFloor);
      if (base + 256 * i < K) c = x1_fma(flushed, flushed, c);
    }
  }
  chains[l] = c;
  __syncthreads();
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = chains[(l & 31) + 32 * i];
  const float sum = __shfl_sync(kAllLanes, x1_tree256(v), 0);
  return x1_rsqrt(x1_fma(sum, constants[0], constants[1]));
}

// @kernel norm_quantize
// @inputs x weight constants rows flags op
// @outputs q ds ds_half
// x (T, K); rows (M): which rows of x; constants: fl(1/K), eps. Template: A, HALVES. Blocks (1, M) of 256.
{
  __shared__ float chains[256];
  const int M = rows_shape[0], K = x_shape[1], lane = threadIdx.x & 31, row = blockIdx.y;
  constexpr int kEach = A / 32, kAtOnce = 8;
  const float* from = x + (size_t)rows[row] * K;
  // What the second pass needs is on its way during the first.
  float values[kAtOnce][kEach], weights[kAtOnce][kEach];
  auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
#pragma unroll
      for (int e = 0; e < kEach; e++) {
        const int k = (base + 8 * i) * A + lane * kEach + e;
        values[i][e] = k < K ? from[k] : 0.0f;
        weights[i][e] = k < K ? weight[k] : 0.0f;
      }
    }
  };
  load(threadIdx.x >> 5);
  const float r = norm_factor(from, K, constants, chains);
  const BlockWriter<A, HALVES> writer{reinterpret_cast<__half*>(q), ds, ds_half, (M + 7) / 8 * 8};
  bool finite = true;
  const int blocks = (K + A - 1) / A;
  for (int base = threadIdx.x >> 5; base < blocks; base += 8 * kAtOnce) {
    if (base >= 8) load(base);
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int block = base + 8 * i;
      if (block >= blocks) break;
      float v[kEach];
#pragma unroll
      for (int e = 0; e < kEach; e++) v[e] = x1_mul(x1_mul(x1_flush(values[i][e], kInputFloor), r), weights[i][e]);
      finite &= writer.write(v, lane, K - block * A, row, block, K);
    }
  }
  if (!finite && lane == 0) x1_record(flags, rows[row], op_shape[0]);
}

// @kernel norm
// @inputs x weight constants rows
// @outputs y
// The norm alone, as fp32 rows. Blocks (1, M) of 256.
{
  __shared__ float chains[256];
  const int K = x_shape[1];
  const size_t row = blockIdx.y;
  const float* from = x + (size_t)rows[row] * K;
  const float r = norm_factor(from, K, constants, chains);
  for (int k = threadIdx.x; k < K; k += 256) y[row * K + k] = x1_mul(x1_mul(x1_flush(from[k], kInputFloor), r), weight[k]);
}
