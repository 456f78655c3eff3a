// Rotary embedding of queries and keys, and the write to the cache (numerics.md sections 1 and 4).
// Cache: fp16 (layers, 2, blocks, block size): of each layer, keys [block][kv head][D/8][16 positions][8], then values
// [block][kv head][16 positions][D]. A layer's number comes as the shape of `layer`, which has one element more.
// @use common

// @kernel rope_write_kv
// @inputs qkv table positions blocks cache layer scale flags op
// @outputs queries
// qkv (T, heads + 2*kv heads, D); table (positions, rotary/2, 2): cos, sin; blocks (T): the cache block of each token's
// position; queries (T, heads, D), roped and scaled; the cache is written in place. Template: HEADS, KV_HEADS, D,
// INTERLEAVED. Blocks (ceil((heads + 2*kv heads)*D/256), T) of 256.
{
  constexpr int kAll = HEADS + 2 * KV_HEADS;
  const int row = blockIdx.y, position = positions[row], half = table_shape[1], rotary = 2 * half, slot = position % kSlots;
  const float* from = qkv + (size_t)row * kAll * D;
  const float* angles = table + (size_t)position * rotary;
  const size_t pool = (size_t)cache_shape[2] * KV_HEADS * kSlots * D;
  __half* key_cache = const_cast<__half*>(reinterpret_cast<const __half*>(cache)) + 2 * (layer_shape[0] - 1) * pool +
                      (size_t)blocks[row] * KV_HEADS * kSlots * D;
  __half* value_cache = key_cache + pool;
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= kAll * D) return;
  const int head = i / D, d = i % D;
  float v = from[i];
  if (x1_magnitude(v) >= kNonFiniteBits) x1_record(flags, row, op_shape[0]);
  if (head >= HEADS + KV_HEADS) {
    value_cache[((head - HEADS - KV_HEADS) * kSlots + slot) * D + d] = x1_to_half(v);
    return;
  }
  if (d < rotary) {
    const bool second = INTERLEAVED ? d & 1 : d >= half;
    const int pair = INTERLEAVED ? d / 2 : d % half;
    const int partner = INTERLEAVED ? d ^ 1 : second ? d - half : d + half;
    const float own = x1_flush(v, kRopeInputFloor), other = x1_flush(from[head * D + partner], kRopeInputFloor);
    const float c = angles[2 * pair], s = angles[2 * pair + 1];
    v = second ? x1_fma(other, s, x1_mul(own, c)) : x1_fma(own, c, -x1_mul(other, s));
  }
  if (head < HEADS) {
    queries[(size_t)row * HEADS * D + i] = x1_flush(x1_mul(v, scale[0]), kQueryFloor);
  } else {
    key_cache[((head - HEADS) * (D / 8) + d / 8) * kSlots * 8 + slot * 8 + d % 8] = x1_to_half(v);
  }
}

// @kernel zero_blocks
// @inputs cache blocks
// @outputs done
// Clears blocks in every layer, in place. Blocks (number of blocks, 2 * layers) of 256.
{
  const size_t size = cache_shape[3];
  uint32_t* at = reinterpret_cast<uint32_t*>(const_cast<__half*>(reinterpret_cast<const __half*>(cache)) +
                                             ((size_t)blockIdx.y * cache_shape[2] + blocks[blockIdx.x]) * size);
  for (int i = threadIdx.x; i < size / 2; i += 256) at[i] = 0u;
  if (threadIdx.x == 0 && blockIdx.y == 0) done[blockIdx.x] = 1;
}

// @kernel write_block
// @inputs cache bits block
// @outputs done
// Puts a block's contents, as halves (2 * layers, size) in the cache's own order, in every layer, in place.
// Blocks (1, 2 * layers) of 256.
{
  const size_t size = cache_shape[3];
  uint32_t* at = reinterpret_cast<uint32_t*>(const_cast<__half*>(reinterpret_cast<const __half*>(cache)) +
                                             ((size_t)blockIdx.y * cache_shape[2] + block[0]) * size);
  const uint32_t* from = reinterpret_cast<const uint32_t*>(bits) + blockIdx.y * (size / 2);
  for (int i = threadIdx.x; i < size / 2; i += 256) at[i] = from[i];
  if (threadIdx.x == 0 && blockIdx.y == 0) done[0] = 1;
}
