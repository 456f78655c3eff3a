// Attention over the paged cache (numerics.md section 4; rope.cu has the cache's layout).
// @use quantize


// @kernel attention_chunks
// @inputs queries tokens rows positions tables cache layer window
// @outputs partials
// One chunk of 256 positions for the query heads of one key/value head of one token: m, l and o of each head.
// queries (T, heads, D); tokens (n): which rows of queries; rows (T): row of tables; tables (S, blocks); window has 1 + w
// elements (w = 0: all keys); partials (n, heads, chunks, D + 2). Template: HEADS, KV_HEADS, D. Blocks (chunks, kv heads, n).
{
  constexpr int kGroup = HEADS / KV_HEADS;
  constexpr int kPairs = D / 2, kTeams = 256 / kPairs > kGroup ? kGroup : 256 / kPairs, kEach = (kGroup + kTeams - 1) / kTeams;
  __shared__ __align__(16) float query[kGroup][D];
  __shared__ float weights[kGroup][kChunk];
  __shared__ float maxima[kGroup][8];
  const int chunk = blockIdx.x, kv_head = blockIdx.y, item = blockIdx.z, token = tokens[item];
  const int position = positions[token], start = chunk * kChunk, w = window_shape[0] - 1;
  const int first = max(start, w > 0 ? position + 1 - w : 0), last = min(position + 1, start + kChunk);
  if (first >= last) return;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int* table = tables + (size_t)rows[token] * tables_shape[1];
  const size_t pool = (size_t)cache_shape[2] * KV_HEADS * kSlots * D;
  const __half *keys = reinterpret_cast<const __half*>(cache) + 2 * (layer_shape[0] - 1) * pool, *values = keys + pool;
  for (int i = tid; i < kGroup * D; i += 256) {
    query[i / D][i % D] = queries[((size_t)token * HEADS + kv_head * kGroup) * D + i];
  }
  __syncthreads();

  const int j = start + tid;
  const bool visible = j >= first && j < last;
  float score[kGroup];
#pragma unroll
  for (int h = 0; h < kGroup; h++) score[h] = 0.0f;
  if (visible) {
    const __half* key = keys + ((size_t)table[j / kSlots] * KV_HEADS + kv_head) * kSlots * D + j % kSlots * 8;
#pragma unroll 4
    for (int d = 0; d < D; d += 8) {
      const uint4 raw = *reinterpret_cast<const uint4*>(key + d * kSlots);
      const __half* k = reinterpret_cast<const __half*>(&raw);
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const float v = __half2float(k[e]);
#pragma unroll
        for (int h = 0; h < kGroup; h++) score[h] = x1_fma(query[h][d + e], v, score[h]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kGroup; h++) {
    const float top = x1_warp_max(visible ? score[h] : -INFINITY);
    if (lane == 0) maxima[h][warp] = top;
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < kGroup; h++) {
    float m = maxima[h][0];
#pragma unroll
    for (int i = 1; i < 8; i++) m = fmaxf(m, maxima[h][i]);
    weights[h][tid] = visible ? x1_exp(x1_add(score[h], -m)) : 0.0f;
  }
  __syncthreads();

  const size_t stride = (size_t)gridDim.x * (D + 2);
  float* out = partials + (((size_t)item * HEADS + kv_head * kGroup) * gridDim.x + chunk) * (D + 2);
  for (int h = warp; h < kGroup; h += 8) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = weights[h][lane + 32 * i];
    const float l = x1_tree256(v);
    float m = maxima[h][0];
#pragma unroll
    for (int i = 1; i < 8; i++) m = fmaxf(m, maxima[h][i]);
    if (lane == 0) {
      out[h * stride] = m;
      out[h * stride + 1] = l;
    }
  }
  const int pair = tid % kPairs, team = tid / kPairs;
  if (team >= kTeams) return;
  float o[kEach][2];
#pragma unroll
  for (int e = 0; e < kEach; e++) o[e][0] = o[e][1] = 0.0f;
  for (int block = first / kSlots; block <= (last - 1) / kSlots; block++) {
    const __half2* value = reinterpret_cast<const __half2*>(
        values + ((size_t)table[block] * KV_HEADS + kv_head) * kSlots * D) + pair;
    const int offset = block * kSlots - start;
    if (block * kSlots >= first && (block + 1) * kSlots <= last) {
      __half2 raw[kSlots];
#pragma unroll
      for (int i = 0; i < kSlots; i++) raw[i] = value[i * kPairs];
#pragma unroll
      for (int i = 0; i < kSlots; i++) {
        const float2 v = __half22float2(raw[i]);
#pragma unroll
        for (int e = 0; e < kEach; e++) {
          const float p = weights[min(team + e * kTeams, kGroup - 1)][offset + i];
          o[e][0] = x1_fma(p, v.x, o[e][0]);
          o[e][1] = x1_fma(p, v.y, o[e][1]);
        }
      }
      continue;
    }
    for (int i = max(first - block * kSlots, 0); i < min(last - block * kSlots, kSlots); i++) {
      const float2 v = __half22float2(value[i * kPairs]);
#pragma unroll
      for (int e = 0; e < kEach; e++) {
        const float p = weights[min(team + e * kTeams, kGroup - 1)][offset + i];
        o[e][0] = x1_fma(p, v.x, o[e][0]);
        o[e][1] = x1_fma(p, v.y, o[e][1]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kEach; e++) {
    const int h = team + e * kTeams;
    if (h >= kGroup) continue;
    out[h * stride + 2 + 2 * pair] = x1_flush(o[e][0], kOutputFloor);
    out[h * stride + 3 + 2 * pair] = x1_flush(o[e][1], kOutputFloor);
  }
}

// @kernel attention_merge_quantize
// @inputs partials tokens positions window flags op
// @outputs q ds ds_half
// The merge of every token (tokens are 0..T-1) with the quantiser behind it: a warp makes a block of A elements of one head.
// Template: HEADS, D, A, HALVES. Blocks (ceil(HEADS*D/A/8), T) of 256.
{
  constexpr int kBlocks = HEADS * D / A, kEach = A / 32;
  const int row = blockIdx.y, lane = threadIdx.x & 31, block = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (block >= kBlocks) return;
  const int position = positions[row], w = window_shape[0] - 1, chunks = partials_shape[2];
  const int head = block * A / D, d = block * A % D + lane * kEach;
  const float* part = partials + ((size_t)row * HEADS + head) * chunks * (D + 2);
  const int begin = (w > 0 ? max(position + 1 - w, 0) : 0) / kChunk, end = position / kChunk + 1;
  float m = part[begin * (D + 2)], l = part[begin * (D + 2) + 1], o[kEach];
#pragma unroll
  for (int e = 0; e < kEach; e++) o[e] = part[begin * (D + 2) + 2 + d + e];
#pragma unroll 4
  for (int chunk = begin + 1; chunk < end; chunk++) {
    const float* next = part + chunk * (D + 2);
    const float top = fmaxf(m, next[0]);
    const float fa = x1_exp(x1_add(m, -top)), fc = x1_exp(x1_add(next[0], -top));
#pragma unroll
    for (int e = 0; e < kEach; e++) o[e] = x1_flush(x1_fma(o[e], fa, x1_mul(next[2 + d + e], fc)), kOutputFloor);
    l = x1_fma(l, fa, x1_mul(next[1], fc));
    m = top;
  }
  const float r = x1_recip(l);
#pragma unroll
  for (int e = 0; e < kEach; e++) o[e] = x1_mul(o[e], r);
  const BlockWriter<A, HALVES> writer{reinterpret_cast<__half*>(q), ds, ds_half, ((int)gridDim.y + 7) / 8 * 8};
  const bool finite = writer.write(o, lane, A, row, block, HEADS * D);
  if (!finite && lane == 0) x1_record(flags, row, op_shape[0]);
}
