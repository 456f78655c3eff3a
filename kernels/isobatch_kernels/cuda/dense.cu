// Dense 16-bit weights (numerics.md section 3): rows scaled by a power of two and rounded to the weight's type, chains of
// fma in ascending order, eight slices.
// @use weights

// @kernel prepare_dense
// @constants BFLOAT
// x (M, K); scaled (M, K) fp32; powers (M). Blocks (M) of 256.
X1_KERNEL __launch_bounds__(256) prepare_dense(const float* x, float* scaled, float* powers, unsigned* flags, int K, int op) {
  __shared__ unsigned top_of[8];
  x1_let_next_begin();
  x1_after_previous();
  const int row = blockIdx.x;
  const float* from = x + (size_t)row * K;
  unsigned top = 0;
  for (int k = threadIdx.x; k < K; k += 256) top = max(top, x1_magnitude(from[k]));
  top = __reduce_max_sync(kAllLanes, top);
  if ((threadIdx.x & 31) == 0) top_of[threadIdx.x >> 5] = top;
  __syncthreads();
  unsigned a = top_of[0];
  for (int i = 1; i < 8; i++) a = max(a, top_of[i]);
  const bool live = a >= kDenseRowFloorBits && a < kNonFiniteBits;
  const int exponent = (int)(a >> 23) - 127;
  const float down = live ? __uint_as_float((unsigned)(127 - exponent) << 23) : 0.0f;
  for (int k = threadIdx.x; k < K; k += 256) {
    float v = 0.0f;
    if (live) {
      v = x1_mul(from[k], down);
      if (BFLOAT) {
        const unsigned bits = __float_as_uint(v);
        v = __uint_as_float((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
      } else {
        v = x1_half_float(x1_to_half(v));
      }
    }
    scaled[(size_t)row * K + k] = x1_flush(v, kDenseFloor);
  }
  if (threadIdx.x != 0) return;
  powers[row] = live ? __uint_as_float((unsigned)(exponent + 127) << 23) : 1.0f;
  if (a >= kNonFiniteBits) x1_record(flags, row, op);
}

// @kernel dense
// @constants BFLOAT LOGIT
// w (tiles, K, 32): 32 outputs side by side, zero past N; bias (N) and residual (M, stride) null where absent; y (M, stride).
// A warp is a slice, a lane an output; four rows at a time. Blocks (tiles, ceil(M/4)) of 256.
X1_KERNEL __launch_bounds__(256) dense(const fp16* w, const float* scaled, const float* powers, const float* bias,
                                       const float* residual, float* y, int M, int K, int N, int stride) {
  __shared__ float sums[kSlices][4][32];
  x1_let_next_begin();
  x1_after_previous();
  const int m0 = blockIdx.y * 4;
  const int slice = threadIdx.x >> 5, lane = threadIdx.x & 31, rows = min(4, M - m0);
  const int begin = x1_slice_begin(slice, K), end = x1_slice_begin(slice + 1, K);
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
  for (int k = begin; k < end; k++) {
    const float v = x1_flush(BFLOAT ? x1_bfloat_float(w[((size_t)blockIdx.x * K + k) * 32 + lane])
                                      : x1_half_float(w[((size_t)blockIdx.x * K + k) * 32 + lane]),
                               kDenseFloor);
#pragma unroll
    for (int r = 0; r < 4; r++) acc[r] = x1_fma(scaled[(size_t)(m0 + min(r, rows - 1)) * K + k], v, acc[r]);
  }
#pragma unroll
  for (int r = 0; r < 4; r++) sums[slice][r][lane] = acc[r];
  __syncthreads();
  const int r = threadIdx.x >> 5, n = blockIdx.x * 32 + lane;
  if (r >= rows || n >= N) return;
  float total = 0.0f;
  bool first = true;
  for (int i = 0; i < kSlices; i++) {
    if (x1_slice_begin(i, K) == x1_slice_begin(i + 1, K)) continue;
    total = first ? sums[i][r][lane] : x1_add(total, sums[i][r][lane]);
    first = false;
  }
  total = x1_mul(total, powers[m0 + r]);
  const size_t at = (size_t)(m0 + r) * stride + n;
  y[at] = finish_output(total, bias ? bias + n : nullptr, residual ? residual + at : nullptr, LOGIT);
}
