// RMS norm (numerics.md section 4), with or without the quantiser behind it. A block of 256 threads makes a row.
// @use quantize

// The factor r of a row; `chains` is shared memory.
__device__ __forceinline__ float norm_factor(const float* x, int K, const float* constants, float (&chains)[256]) {
  const int l = threadIdx.x;
  float c = 0.0f;
#pragma unroll 4
  for (int k = l; k < K; k += 256) {
    const float v = x1_flush(x[k], kInputFloor);
    c = x1_fma(v, v, c);
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
  const float* from = x + (size_t)rows[row] * K;
  const float r = norm_factor(from, K, constants, chains);
  const BlockWriter<A, HALVES> writer{reinterpret_cast<__half*>(q), ds, ds_half, (M + 7) / 8 * 8};
  bool finite = true;
  for (int block = threadIdx.x >> 5; block * A < K; block += 8) {
    float v[A / 32];
#pragma unroll
    for (int e = 0; e < A / 32; e++) {
      const int k = block * A + lane * (A / 32) + e;
      v[e] = k < K ? x1_mul(x1_mul(x1_flush(from[k], kInputFloor), r), weight[k]) : 0.0f;
    }
    finite &= writer.write(v, lane, K - block * A, row, block, K);
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
