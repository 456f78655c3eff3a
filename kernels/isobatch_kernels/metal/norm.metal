// RMS norm (numerics.md section 4), then quantised or not. One threadgroup of 256 threads a row, a thread for each chain
// of sum256. `rows` names the rows of x to take: the wanted positions, or all.
// @use common quantize

// Reciprocal root mean square of the row; c is room for 256 chains.
METAL_FUNC float inverse_rms(const device float* x, int K, float inverse_width, float epsilon, uint thread_index, uint lane,
                             threadgroup float* c) {
  float chain = 0.0f;
  for (int k = int(thread_index); k < K; k += 256) {
    float v = flush_below(x[k], kInputFloorBits);
    chain = fma(v, v, chain);
  }
  c[thread_index] = chain;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return x1_rsqrt(fma(sum256_tree(c, lane), inverse_width, epsilon));
}

// @kernel norm_quantize
// @inputs x weight rows sizes constants
// @outputs q d s
// sizes: K, NB. constants: fl(1/K), epsilon. Grid (256, M, 1).
{
  threadgroup float chains[256];
  const int K = sizes[0], NB = sizes[1];
  const size_t row = threadgroup_position_in_grid.y;
  const uint lane = thread_index_in_simdgroup;
  const device float* in = x + size_t(rows[row]) * K;
  const float r = inverse_rms(in, K, constants[0], constants[1], thread_index_in_threadgroup, lane, chains);
  for (int block = int(simdgroup_index_in_threadgroup); block < NB; block += 8) {
    float v[A / 32];
    for (int i = 0; i < A / 32; i++) {
      int k = block * A + i * 32 + int(lane);
      v[i] = k < K ? (flush_below(in[k], kInputFloorBits) * r) * weight[k] : 0.0f;
    }
    const size_t at = row * NB + block;
    quantize_block<A, SB>(v, lane, q + at * A, d + at, s + at * (A / SB));
  }
}

// @kernel norm
// @inputs x weight rows sizes constants
// @outputs y
// As norm_quantize, for dense consumers.
{
  threadgroup float chains[256];
  const int K = sizes[0];
  const size_t row = threadgroup_position_in_grid.y;
  const device float* in = x + size_t(rows[row]) * K;
  const float r = inverse_rms(in, K, constants[0], constants[1], thread_index_in_threadgroup, thread_index_in_simdgroup, chains);
  for (int k = int(thread_index_in_threadgroup); k < K; k += 256) {
    y[row * K + k] = (flush_below(in[k], kInputFloorBits) * r) * weight[k];
  }
}

// @kernel find_non_finite
// @inputs x sizes
// @outputs flags
// flags (M): 1 where the row holds a NaN, an infinity or a magnitude of 2^96 or more. sizes: K. Grid (32, M, 1).
{
  const int K = sizes[0];
  const size_t row = threadgroup_position_in_grid.y;
  uint largest = 0;
  for (int k = int(thread_index_in_simdgroup); k < K; k += 32) largest = max(largest, magnitude_bits(x[row * K + k]));
  largest = simd_max(largest);
  if (thread_index_in_simdgroup == 0) flags[row] = largest >= kNonFiniteBits ? 1u : 0u;
}
