// Attention over the paged cache (numerics.md section 4; rope.cu has the cache's layout).
// @use quantize


// @kernel attention_chunks
// @inputs queries tokens rows positions tables cache layer window
// @outputs partials
// One chunk of 256 positions for the query heads of one key/value head of one token: m, l and o of each head.
// queries (T, heads, D); tokens (n): which rows of queries; rows (T): row of tables; tables (S, blocks); window has 1 + w
// elements (w = 0: all keys); partials (n, heads, chunks, D + 2). Template: HEADS, KV_HEADS, D. Blocks (chunks, kv heads, n)
// of 512: two threads for a key, which share the heads; then a thread for two dimensions of some heads.
{
  constexpr int kGroup = HEADS / KV_HEADS, kShare = (kGroup + 1) / 2;
  constexpr int kPairs = D / 2, kTeams = 512 / kPairs > kGroup ? kGroup : 512 / kPairs, kEach = (kGroup + kTeams - 1) / kTeams;
  extern __shared__ uint4 shared[];  // values of the chunk, fp16 [256][D]
  __shared__ __align__(16) float query[kGroup][D];
  __shared__ __align__(16) float weights[kGroup][kChunk];
  __shared__ float maxima[kGroup][8];
  __half* kept = reinterpret_cast<__half*>(shared);
  const int chunk = blockIdx.x, kv_head = blockIdx.y, item = blockIdx.z, token = tokens[item];
  const int position = positions[token], start = chunk * kChunk, w = window_shape[0] - 1;
  const int first = max(start, w > 0 ? position + 1 - w : 0), last = min(position + 1, start + kChunk);
  if (first >= last) return;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int* table = tables + (size_t)rows[token] * tables_shape[1];
  const size_t pool = (size_t)cache_shape[2] * KV_HEADS * kSlots * D;
  const __half *keys = reinterpret_cast<const __half*>(cache) + 2 * (layer_shape[0] - 1) * pool, *values = keys + pool;
  const int low = first - first % kSlots;  // whole blocks from here on
  for (int i = tid; i < (last - low) * (D / 8); i += 512) {
    const int j = low + i / (D / 8), part = i % (D / 8);
    const __half* from = values + (((size_t)table[j / kSlots] * KV_HEADS + kv_head) * kSlots + j % kSlots) * D + part * 8;
    x1_copy16(kept + (j - start) * D + part * 8, from);
  }
  x1_commit();
  for (int i = tid; i < kGroup * D; i += 512) {
    query[i / D][i % D] = queries[((size_t)token * HEADS + kv_head * kGroup) * D + i];
  }
  __syncthreads();

  const int slot = tid & 255, j = start + slot, head0 = tid >> 8 ? kShare : 0;
  const bool visible = j >= first && j < last;
  float score[kShare];
#pragma unroll
  for (int h = 0; h < kShare; h++) score[h] = 0.0f;
  if (visible) {
    const __half* key = keys + ((size_t)table[j / kSlots] * KV_HEADS + kv_head) * kSlots * D + j % kSlots * 8;
    for (int begin = 0; begin < D; begin += 64) {
      uint4 raw[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (begin + 8 * i < D) raw[i] = *reinterpret_cast<const uint4*>(key + (begin + 8 * i) * kSlots);
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (begin + 8 * i >= D) break;
        const __half* k = reinterpret_cast<const __half*>(&raw[i]);
#pragma unroll
        for (int h = 0; h < kShare; h++) {
          const float* of = query[min(head0 + h, kGroup - 1)] + begin + 8 * i;
          const float4 a = *reinterpret_cast<const float4*>(of), b = *reinterpret_cast<const float4*>(of + 4);
          float c = score[h];
          c = x1_fma(a.x, __half2float(k[0]), c);
          c = x1_fma(a.y, __half2float(k[1]), c);
          c = x1_fma(a.z, __half2float(k[2]), c);
          c = x1_fma(a.w, __half2float(k[3]), c);
          c = x1_fma(b.x, __half2float(k[4]), c);
          c = x1_fma(b.y, __half2float(k[5]), c);
          c = x1_fma(b.z, __half2float(k[6]), c);
          score[h] = x1_fma(b.w, __half2float(k[7]), c);
        }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kShare; h++) {
    const float top = x1_warp_max(visible ? score[h] : -INFINITY);
    if (lane == 0 && head0 + h < kGroup) maxima[head0 + h][warp & 7] = top;
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < kShare; h++) {
    if (head0 + h >= kGroup) continue;
    float m = maxima[head0 + h][0];
#pragma unroll
    for (int i = 1; i < 8; i++) m = fmaxf(m, maxima[head0 + h][i]);
    weights[head0 + h][slot] = visible ? x1_exp(x1_add(score[h], -m)) : 0.0f;
  }
  x1_wait<0>();
  __syncthreads();

  const size_t stride = (size_t)gridDim.x * (D + 2);
  float* out = partials + (((size_t)item * HEADS + kv_head * kGroup) * gridDim.x + chunk) * (D + 2);
  const int pair = tid % kPairs, team = tid / kPairs;
  if (team < kTeams) {
    float o[kEach][2];
#pragma unroll
    for (int e = 0; e < kEach; e++) o[e][0] = o[e][1] = 0.0f;
    const __half2* value = reinterpret_cast<const __half2*>(kept) + pair;
    int i = first - start;
    const int stop = last - start;
    auto add = [&](float2 v, const float (&p)[kEach]) {
#pragma unroll
      for (int e = 0; e < kEach; e++) {
        o[e][0] = x1_fma(p[e], v.x, o[e][0]);
        o[e][1] = x1_fma(p[e], v.y, o[e][1]);
      }
    };
    auto one = [&](int at) {
      float p[kEach];
#pragma unroll
      for (int e = 0; e < kEach; e++) p[e] = weights[min(team + e * kTeams, kGroup - 1)][at];
      add(__half22float2(value[at * kPairs]), p);
    };
    for (; i < stop && i % 4 != 0; i++) one(i);
#pragma unroll 2
    for (; i + 4 <= stop; i += 4) {
      float4 p[kEach];
#pragma unroll
      for (int e = 0; e < kEach; e++) p[e] = *reinterpret_cast<const float4*>(&weights[min(team + e * kTeams, kGroup - 1)][i]);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float some[kEach];
#pragma unroll
        for (int e = 0; e < kEach; e++) some[e] = k == 0 ? p[e].x : k == 1 ? p[e].y : k == 2 ? p[e].z : p[e].w;
        add(__half22float2(value[(i + k) * kPairs]), some);
      }
    }
    for (; i < stop; i++) one(i);
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int h = team + e * kTeams;
      if (h >= kGroup) continue;
      out[h * stride + 2 + 2 * pair] = x1_flush(o[e][0], kOutputFloor);
      out[h * stride + 3 + 2 * pair] = x1_flush(o[e][1], kOutputFloor);
    }
  }
  for (int h = 15 - warp; h < kGroup; h += 16) {  // the last warps have the least to do
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
