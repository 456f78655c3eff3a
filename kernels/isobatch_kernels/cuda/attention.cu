// Attention over the paged cache (numerics.md section 4; rope.cu has the cache's layout).
// @use quantize

// @kernel attention_chunks
// @constants HEADS KV_HEADS D SHARE
// One chunk of 256 positions for SHARE query heads (at most those of a key/value head) of one token: m, l and o of each head.
// queries (T, heads, D); singles, positions, rows (n): which row of queries, its position, and its row of tables (S, width);
// keys, values: the layer's part of the cache; w: visible keys, 0 for all; partials (n, heads, chunks, D + 2). Blocks
// (chunks, kv heads * ceil(heads of one / SHARE), n) of 256: a thread for a key, then one for two dimensions of some heads.
X1_KERNEL __launch_bounds__(256, 2) attention_chunks(const float* queries, const int* singles, const int* positions,
                                                     const int* rows, const int* tables, const fp16* keys,
                                                     const fp16* values, float* partials, int width, int w) {
  constexpr int kGroup = HEADS / KV_HEADS, kParts = (kGroup + SHARE - 1) / SHARE;
  constexpr int kPairs = D / 2, kTeams = 256 / kPairs > SHARE ? SHARE : 256 / kPairs, kEach = (SHARE + kTeams - 1) / kTeams;
  constexpr int kPieces = D / 8, kAtOnce = kPieces < 16 ? kPieces : 16;  // of 16 bytes in a key
  X1_DYNAMIC_SHARED;  // values of the chunk, fp16 [256][D]
  __shared__ __align__(16) float query[SHARE][D];
  __shared__ __align__(16) float weights[SHARE][kChunk];
  __shared__ float maxima[SHARE][8];
  fp16* kept = reinterpret_cast<fp16*>(shared);
  x1_let_next_begin();
  x1_after_previous();
  const int chunk = blockIdx.x, kv_head = blockIdx.y / kParts, item = blockIdx.z, start = chunk * kChunk;
  const int token = singles[item], position = positions[item];
  const int first = max(start, w > 0 ? position + 1 - w : 0), last = min(position + 1, start + kChunk);
  if (first >= last) return;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int head0 = kv_head * kGroup + blockIdx.y % kParts * SHARE, heads = min(SHARE, (kv_head + 1) * kGroup - head0);
  const int low = first - first % kSlots;  // whole blocks from here on
  // Lane i of every warp has the i-th cache block of the chunk.
  const int* table = tables + (size_t)rows[item] * width + start / kSlots;
  const int own_block = lane < kSlots && start + lane * kSlots < last ? table[lane] : 0;

  const int j = start + tid;
  const bool visible = j >= first && j < last;
  const int block_of_key = __shfl_sync(kAllLanes, own_block, tid / kSlots);
  const fp16* key = keys + ((size_t)block_of_key * KV_HEADS + kv_head) * kSlots * D + j % kSlots * 8;
  uint4 raw[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; i++) {
    if (visible) raw[i] = *reinterpret_cast<const uint4*>(key + 8 * i * kSlots);
  }
  for (int base = 0; base < (last - low) * kPieces; base += 256) {
    const int i = base + tid, slot = low - start + i / kPieces, part = i % kPieces;
    const int block = __shfl_sync(kAllLanes, own_block, min(slot / kSlots, kSlots - 1));
    if (i >= (last - low) * kPieces) continue;
    x1_copy16(kept + slot * D + part * 8, values + (((size_t)block * KV_HEADS + kv_head) * kSlots + slot % kSlots) * D + part * 8);
  }
  x1_commit();
  for (int i = tid; i < heads * D; i += 256) query[i / D][i % D] = queries[((size_t)token * HEADS + head0) * D + i];
  __syncthreads();

  float score[SHARE];
#pragma unroll
  for (int h = 0; h < SHARE; h++) score[h] = 0.0f;
  if (visible) {
    for (int begin = 0; begin < kPieces; begin += kAtOnce) {
      if (begin > 0) {
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
          if (begin + i < kPieces) raw[i] = *reinterpret_cast<const uint4*>(key + 8 * (begin + i) * kSlots);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        if (begin + i >= kPieces) break;
        const float2 k01 = x1_half_floats(raw[i].x), k23 = x1_half_floats(raw[i].y);
        const float2 k45 = x1_half_floats(raw[i].z), k67 = x1_half_floats(raw[i].w);
#pragma unroll
        for (int h = 0; h < SHARE; h++) {
          const float* of = query[h] + 8 * (begin + i);
          const float4 a = *reinterpret_cast<const float4*>(of), b = *reinterpret_cast<const float4*>(of + 4);
          float c = score[h];
          c = x1_fma(a.x, k01.x, c);
          c = x1_fma(a.y, k01.y, c);
          c = x1_fma(a.z, k23.x, c);
          c = x1_fma(a.w, k23.y, c);
          c = x1_fma(b.x, k45.x, c);
          c = x1_fma(b.y, k45.y, c);
          c = x1_fma(b.z, k67.x, c);
          score[h] = x1_fma(b.w, k67.y, c);
        }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < SHARE; h++) {
    const float top = x1_warp_max(visible ? score[h] : kMinusInfinity);
    if (lane == 0) maxima[h][warp] = top;
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < SHARE; h++) {
    float m = maxima[h][0];
#pragma unroll
    for (int i = 1; i < 8; i++) m = fmaxf(m, maxima[h][i]);
    weights[h][tid] = visible ? x1_exp(x1_add(score[h], -m)) : 0.0f;
  }
  x1_wait<0>();
  __syncthreads();

  const size_t stride = (size_t)gridDim.x * (D + 2);
  float* out = partials + (((size_t)item * HEADS + head0) * gridDim.x + chunk) * (D + 2);
  const int pair = tid % kPairs, team = tid / kPairs;
  if (team < kTeams) {
    float o[kEach][2];
#pragma unroll
    for (int e = 0; e < kEach; e++) o[e][0] = o[e][1] = 0.0f;
    const unsigned* value = reinterpret_cast<const unsigned*>(kept) + pair;
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
      for (int e = 0; e < kEach; e++) p[e] = weights[min(team + e * kTeams, SHARE - 1)][at];
      add(x1_half_floats(value[at * kPairs]), p);
    };
    for (; i < stop && i % 4 != 0; i++) one(i);
#pragma unroll 4
    for (; i + 4 <= stop; i += 4) {
      float4 p[kEach];
#pragma unroll
      for (int e = 0; e < kEach; e++) p[e] = *reinterpret_cast<const float4*>(&weights[min(team + e * kTeams, SHARE - 1)][i]);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float some[kEach];
#pragma unroll
        for (int e = 0; e < kEach; e++) some[e] = k == 0 ? p[e].x : k == 1 ? p[e].y : k == 2 ? p[e].z : p[e].w;
        add(x1_half_floats(value[(i + k) * kPairs]), some);
      }
    }
    for (; i < stop; i++) one(i);
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int h = team + e * kTeams;
      if (h >= heads) continue;
      out[h * stride + 2 + 2 * pair] = x1_flush(o[e][0], kOutputFloor);
      out[h * stride + 3 + 2 * pair] = x1_flush(o[e][1], kOutputFloor);
    }
  }
  for (int h = 7 - warp; h < heads; h += 8) {  // the last warps have the least to do
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
// @constants HEADS D A HALVES
// The merge of every token (singles are 0..T-1) with the quantiser behind it: a warp makes a block of A elements of one head.
// The running maximum is the maximum so far, whatever the order, so 32 chunks have their factors computed at once.
// Blocks (ceil(HEADS*D/A/8), T) of 256.
X1_KERNEL __launch_bounds__(256) attention_merge_quantize(const float* partials, const int* positions, fp16* q, float* ds,
                                                          float* ds_half, unsigned* flags, int chunks, int w, int op) {
  constexpr int kBlocks = HEADS * D / A, kEach = A / 32;
  const int row = blockIdx.y, lane = threadIdx.x & 31, block = blockIdx.x * 8 + (threadIdx.x >> 5);
  x1_let_next_begin();
  x1_after_previous();
  if (block >= kBlocks) return;
  const int position = positions[row];
  const int head = block * A / D, d = block * A % D + lane * kEach;
  const float* part = partials + ((size_t)row * HEADS + head) * chunks * (D + 2);
  const int begin = (w > 0 ? max(position + 1 - w, 0) : 0) / kChunk, end = position / kChunk + 1;
  float before = kMinusInfinity, l = 0.0f, o[kEach];  // before: the maximum of the chunks so far
#pragma unroll
  for (int e = 0; e < kEach; e++) o[e] = 0.0f;
  for (int base = begin; base < end; base += 32) {
    const int count = min(32, end - base);
    const float* own = part + (size_t)(base + min(lane, count - 1)) * (D + 2);
    const float m = own[0], l_own = own[1];
    float top = m;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const float other = __shfl_sync(kAllLanes, top, max(lane - by, 0));
      top = fmaxf(top, other);
    }
    top = fmaxf(top, before);
    float last = __shfl_sync(kAllLanes, top, max(lane - 1, 0));
    if (lane == 0) last = before;
    const float fa = x1_exp(x1_add(last, -top)), fc = x1_exp(x1_add(m, -top));
#pragma unroll 8
    for (int i = 0; i < count; i++) {
      const float* next = part + (size_t)(base + i) * (D + 2);
      const float a = __shfl_sync(kAllLanes, fa, i), c = __shfl_sync(kAllLanes, fc, i), l_next = __shfl_sync(kAllLanes, l_own, i);
      if (base + i == begin) {
        l = l_next;
#pragma unroll
        for (int e = 0; e < kEach; e++) o[e] = next[2 + d + e];
        continue;
      }
#pragma unroll
      for (int e = 0; e < kEach; e++) o[e] = x1_flush(x1_fma(o[e], a, x1_mul(next[2 + d + e], c)), kOutputFloor);
      l = x1_fma(l, a, x1_mul(l_next, c));
    }
    before = __shfl_sync(kAllLanes, top, count - 1);
  }
  const float r = x1_recip(l);
#pragma unroll
  for (int e = 0; e < kEach; e++) o[e] = x1_mul(o[e], r);
  const BlockWriter<A, HALVES> writer{q, ds, ds_half, ((int)gridDim.y + 7) / 8 * 8};
  const bool finite = writer.write(o, lane, A, row, block, HEADS * D);
  if (!finite && lane == 0) x1_record(flags, row, op);
}
