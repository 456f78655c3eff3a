// Linear layers of 16-bit matrices (numerics.md section 3): ordered fma chains. Correct first; speed second.
// @use common

// Rounded to the weight's type as numbers, without trust in conversions of tiny values.
METAL_FUNC float round_to_half(float x) {
  const ushort h = to_half_bits(x);
  const float m = float(int(h & 0x7fffu));
  if ((h & 0x7fffu) < 0x400u) return (h & 0x8000u) ? -(m * 5.9604644775390625e-8f) : m * 5.9604644775390625e-8f;
  return as_type<float>((uint(h & 0x8000u) << 16) | ((uint(h & 0x7fffu) << 13) + 0x38000000u));
}
METAL_FUNC float round_to_bfloat(float x) {
  const uint u = as_type<uint>(x);
  return as_type<float>((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}

// @kernel dense_prepare
// @inputs x sizes
// @outputs scaled powers
// Rows scaled by a power of two so that the largest magnitude is near 1, rounded to the weight's type. powers (M): the
// scale to undo, NaN for a row that is not finite. BFLOAT: the type. sizes: K. Grid (256, M, 1).
{
  threadgroup uint largest_of[8];
  const int K = sizes[0];
  const size_t row = threadgroup_position_in_grid.y;
  const uint t = thread_index_in_threadgroup;
  uint largest = 0;
  for (int k = int(t); k < K; k += 256) largest = max(largest, magnitude_bits(x[row * K + k]));
  largest = simd_max(largest);
  if (thread_index_in_simdgroup == 0) largest_of[simdgroup_index_in_threadgroup] = largest;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < 8; i++) largest = max(largest, largest_of[i]);
  const bool zero = largest < kDenseRowFloorBits || largest >= kNonFiniteBits;
  const uint exponent = zero ? 127u : largest >> 23;
  const float down = as_type<float>((254u - exponent) << 23);
  for (int k = int(t); k < K; k += 256) {
    const float v = flush_below(x[row * K + k] * down, kFloor40Bits);
    const float rounded = BFLOAT ? round_to_bfloat(v) : round_to_half(v);
    scaled[row * K + k] = zero ? 0.0f : flush_below(rounded, kFloor40Bits);
  }
  if (t == 0) powers[row] = largest >= kNonFiniteBits ? not_a_number() : as_type<float>(exponent << 23);
}

// @kernel dense
// @inputs values scaled powers bias residual sizes
// @outputs y
// values: (tiles, ceil(K/8), 32, 8) half or bfloat16 bits, zero past N and K. Eight simdgroups for the eight slices of K, a
// lane for each of 32 outputs, V rows. sizes: K, N, tiles, M. Grid (256, tiles, ceil(M/V)).
{
  threadgroup float parts[8 * V * 32];
  const int K = sizes[0], N = sizes[1], M = sizes[3], units = (K + 7) / 8;
  const int lane = int(thread_index_in_simdgroup), slice = int(simdgroup_index_in_threadgroup);
  const int tile = int(threadgroup_position_in_grid.y), row0 = int(threadgroup_position_in_grid.z) * V;
  float acc[V];
  for (int v = 0; v < V; v++) acc[v] = 0.0f;
  for (int k = slice_begin(slice, K); k < slice_begin(slice + 1, K); k++) {
    const float weight = flush_below(widen(values[((size_t(tile) * units + k / 8) * 32 + lane) * 8 + k % 8]), kFloor40Bits);
    for (int v = 0; v < V; v++) acc[v] = fma(scaled[size_t(min(row0 + v, M - 1)) * K + k], weight, acc[v]);
  }
  for (int v = 0; v < V; v++) parts[(slice * V + v) * 32 + lane] = acc[v];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int at = int(thread_index_in_threadgroup); at < V * 32; at += 256) {
    const int row = row0 + at / 32, n = tile * 32 + at % 32;
    if (row >= M || n >= N) continue;
    const int first = slice_of_first_block(K);
    float total = parts[first * V * 32 + at];
    for (int i = first + 1; i < 8; i++) {
      if (slice_begin(i, K) < slice_begin(i + 1, K)) total = total + parts[i * V * 32 + at];
    }
    const size_t to = size_t(row) * N + n;
    y[to] = finish<HAS_BIAS, HAS_RESIDUAL, IS_LOGIT>(total * powers[row], bias, residual, n, to);
  }
}
