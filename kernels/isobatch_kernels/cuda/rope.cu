// Rotary embedding of queries and keys, and the write to the cache (numerics.md sections 1 and 4).
// Cache: fp16 (layers, 2, blocks, block size): of each layer, keys [block][kv head][D/8][16 positions][8], then values
// [block][kv head][16 positions][D].
// @use common

// @kernel rope_write_kv
// @constants HEADS KV_HEADS D INTERLEAVED
// qkv (T, heads + 2*kv heads, D); table (positions, half, 2): cos, sin; blocks (T): the cache block of each token's position;
// queries (T, heads, D), roped and scaled; keys, values: the layer's part of the cache. Blocks (ceil((heads + 2*kv
// heads)*D/256), T) of 256.
X1_KERNEL __launch_bounds__(256) rope_write_kv(const float* qkv, const float* table, const int* positions, const int* blocks,
                                               fp16* keys, fp16* values, float* queries, unsigned* flags, int half,
                                               float scale, int op) {
  constexpr int kAll = HEADS + 2 * KV_HEADS;
  x1_let_next_begin();
  x1_after_previous();
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= kAll * D) return;
  const int row = blockIdx.y, position = positions[row], rotary = 2 * half, slot = position % kSlots;
  const float* from = qkv + (size_t)row * kAll * D;
  const float* angles = table + (size_t)position * rotary;
  const size_t block = (size_t)blocks[row] * KV_HEADS * kSlots * D;
  const int head = i / D, d = i % D;
  float v = from[i];
  if (x1_magnitude(v) >= kNonFiniteBits) x1_record(flags, row, op);
  if (head >= HEADS + KV_HEADS) {
    values[block + ((head - HEADS - KV_HEADS) * kSlots + slot) * D + d] = x1_to_half(v);
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
    queries[(size_t)row * HEADS * D + i] = x1_flush(x1_mul(v, scale), kQueryFloor);
  } else {
    keys[block + ((head - HEADS) * (D / 8) + d / 8) * kSlots * 8 + slot * 8 + d % 8] = x1_to_half(v);
  }
}

// @kernel zero_blocks
// Clears blocks in every layer. pool: blocks of the cache; size: values of a block. Blocks (number of blocks, 2 * layers) of
// 256.
X1_KERNEL __launch_bounds__(256) zero_blocks(fp16* cache, const int* blocks, int pool, int size) {
  unsigned* at = reinterpret_cast<unsigned*>(cache + ((size_t)blockIdx.y * pool + blocks[blockIdx.x]) * size);
  for (int i = threadIdx.x; i < size / 2; i += 256) at[i] = 0u;
}

// @kernel move_block
// Takes a block's contents in every layer, (2 * layers, size) in the cache's own order, out of the cache or, where `back`, puts
// them back. Blocks (1, 2 * layers) of 256.
X1_KERNEL __launch_bounds__(256) move_block(fp16* cache, fp16* outside, int block, int pool, int size, int back) {
  unsigned* inside = reinterpret_cast<unsigned*>(cache + ((size_t)blockIdx.y * pool + block) * size);
  unsigned* other = reinterpret_cast<unsigned*>(outside) + (size_t)blockIdx.y * (size / 2);
  for (int i = threadIdx.x; i < size / 2; i += 256) (back ? inside : other)[i] = (back ? other : inside)[i];
}
