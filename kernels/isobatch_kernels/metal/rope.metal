// Rotary embedding of queries and keys, and what goes into the cache (numerics.md sections 1 and 4).
// @use common

// Element e of a head after rotation. table_row: cos and sin of the position.
template <bool INTERLEAVED>
METAL_FUNC float rotated(const device float* head, int e, int rotary, const device float* table_row) {
  if (e >= rotary) return head[e];
  const int pair = INTERLEAVED ? e / 2 : e % (rotary / 2);
  const bool second = INTERLEAVED ? e % 2 == 1 : e >= rotary / 2;
  const float x0 = flush_below(head[INTERLEAVED ? 2 * pair : pair], kFloor40Bits);
  const float x1 = flush_below(head[INTERLEAVED ? 2 * pair + 1 : pair + rotary / 2], kFloor40Bits);
  const float c = table_row[2 * pair], s = table_row[2 * pair + 1];
  const float a = fma(x0, c, -(x1 * s));
  const float b = fma(x0, s, x1 * c);
  return second ? b : a;
}

// @kernel rope_write_kv
// @inputs qkv positions table sizes constants
// @outputs queries kv
// One threadgroup a token. queries (T, H*D): roped and scaled; NaN for a token with a value that is not finite.
// kv: keys (T, KV, D), then values (T, KV, D), fp16, to be scattered into the pool.
// sizes: H, KV, D, rotary dimensions, T. constants: the scale of queries. Grid (256, T, 1).
{
  threadgroup uint largest_of[8];
  const int H = sizes[0], KV = sizes[1], D = sizes[2], rotary = sizes[3], T = sizes[4];
  const float scale = constants[0];
  const size_t token = threadgroup_position_in_grid.y;
  const int t = int(thread_index_in_threadgroup), width = (H + 2 * KV) * D;
  const device float* row = qkv + token * width;
  const device float* table_row = table + size_t(positions[token]) * rotary;
  uint largest = 0;
  for (int i = t; i < width; i += 256) largest = max(largest, magnitude_bits(row[i]));
  largest = simd_max(largest);
  if (thread_index_in_simdgroup == 0) largest_of[simdgroup_index_in_threadgroup] = largest;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < 8; i++) largest = max(largest, largest_of[i]);
  const bool finite = largest < kNonFiniteBits;

  for (int i = t; i < H * D; i += 256) {
    const float v = rotated<INTERLEAVED>(row + i / D * D, i % D, rotary, table_row);
    queries[token * H * D + i] = finite ? flush_below(v * scale, kQueryFloorBits) : not_a_number();
  }
  for (int i = t; i < KV * D; i += 256) {
    const float k = rotated<INTERLEAVED>(row + (H + i / D) * D, i % D, rotary, table_row);
    kv[token * KV * D + i] = as_type<half>(to_half_bits(k));
    kv[(T + token) * KV * D + i] = as_type<half>(to_half_bits(row[(H + KV) * D + i]));
  }
}
