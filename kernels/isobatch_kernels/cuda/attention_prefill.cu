// Attention of many tokens of one sequence: a warp takes 8 consecutive tokens of one head and goes through the chunks in
// ascending order; eight warps of a block are neighbours, so they read the same keys and values at about the same time.
// Further blocks merge the chunks of single tokens (attention.cu), so that one launch writes all rows.
// @use common

// @kernel attention_prefill
// @constants HEADS KV_HEADS D
// begins, counts (parts): first token and number of tokens (0..64) of each part; tokens (m): rows with partials; others as
// attention_chunks. context (T, heads, D). Blocks (heads, parts + m) of 256.
X1_KERNEL __launch_bounds__(256) attention_prefill(const float* queries, const int* begins, const int* counts, const int* rows,
                                                   const int* positions, const int* tables, const fp16* keys,
                                                   const fp16* values, const float* partials, const int* tokens,
                                                   float* context, int parts, int width, int chunks, int w) {
  constexpr int kEach = (D + 31) / 32;
  X1_DYNAMIC_SHARED;
  x1_let_next_begin();
  x1_after_previous();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.x, kv_head = head / (HEADS / KV_HEADS);
  if (blockIdx.y >= parts) {
    const int item = blockIdx.y - parts, row = tokens[item], d = threadIdx.x;
    if (d >= D) return;
    const float* part = partials + ((size_t)item * HEADS + head) * chunks * (D + 2);
    const int position = positions[row], first = (w > 0 ? max(position + 1 - w, 0) : 0) / kChunk, end = position / kChunk + 1;
    float m = part[first * (D + 2)], l = part[first * (D + 2) + 1], o = part[first * (D + 2) + 2 + d];
    for (int chunk = first + 1; chunk < end; chunk++) {
      const float* next = part + chunk * (D + 2);
      const float top = fmaxf(m, next[0]);
      const float fa = x1_exp(x1_add(m, -top)), fc = x1_exp(x1_add(next[0], -top));
      o = x1_flush(x1_fma(o, fa, x1_mul(next[2 + d], fc)), kOutputFloor);
      l = x1_fma(l, fa, x1_mul(next[1], fc));
      m = top;
    }
    context[((size_t)row * HEADS + head) * D + d] = x1_mul(o, x1_recip(l));
    return;
  }
  float* query = reinterpret_cast<float*>(shared) + warp * 8 * (D + kChunk);  // [8][D]
  float* weights = query + 8 * D;                                             // [256][8]
  // The last parts of a sequence see the most keys, so they come first.
  const int of_all = parts - 1 - blockIdx.y, count = min(counts[of_all] - warp * 8, 8), token = begins[of_all] + warp * 8;
  if (count <= 0) return;
  const int low = positions[token], high = low + count - 1;
  const int* table = tables + (size_t)rows[token] * width;
  for (int i = lane; i < 8 * D; i += 32) {
    query[i] = queries[((size_t)(token + min(i / D, count - 1)) * HEADS + head) * D + i % D];
  }
  __syncwarp();
  float m[8], l[8], o[8][kEach];
  bool any[8];
#pragma unroll
  for (int r = 0; r < 8; r++) any[r] = false;
  const int first_of_all = w > 0 ? max(low + 1 - w, 0) : 0;
  for (int chunk = first_of_all / kChunk; chunk <= high / kChunk; chunk++) {
    const int start = chunk * kChunk;
    float s[8][8];  // [token][key lane + 32*i]
#pragma unroll
    for (int i = 0; i < 8; i += 2) {  // two keys under one load of the queries
      const int j0 = min(start + lane + 32 * i, high), j1 = min(j0 + 32, high);
      const fp16* key0 = keys + ((size_t)table[j0 / kSlots] * KV_HEADS + kv_head) * kSlots * D + j0 % kSlots * 8;
      const fp16* key1 = keys + ((size_t)table[j1 / kSlots] * KV_HEADS + kv_head) * kSlots * D + j1 % kSlots * 8;
#pragma unroll
      for (int r = 0; r < 8; r++) s[r][i] = s[r][i + 1] = 0.0f;
      if (start + 32 * i > high) continue;
      // The next part of the keys is on its way while one is multiplied.
      uint4 next0 = *reinterpret_cast<const uint4*>(key0), next1 = *reinterpret_cast<const uint4*>(key1);
#pragma unroll 2
      for (int d = 0; d < D; d += 8) {
        const uint4 raw0 = next0, raw1 = next1;
        if (d + 8 < D) {
          next0 = *reinterpret_cast<const uint4*>(key0 + (d + 8) * kSlots);
          next1 = *reinterpret_cast<const uint4*>(key1 + (d + 8) * kSlots);
        }
        const fp16 *k0 = reinterpret_cast<const fp16*>(&raw0), *k1 = reinterpret_cast<const fp16*>(&raw1);
#pragma unroll
        for (int part = 0; part < 8; part += 4) {
          float v0[4], v1[4];
#pragma unroll
          for (int e = 0; e < 4; e++) {
            v0[e] = x1_half_float(k0[part + e]);
            v1[e] = x1_half_float(k1[part + e]);
          }
#pragma unroll
          for (int r = 0; r < 8; r++) {
            const float4 a = *reinterpret_cast<const float4*>(query + r * D + d + part);
            float c0 = x1_fma(a.x, v0[0], s[r][i]), c1 = x1_fma(a.x, v1[0], s[r][i + 1]);
            c0 = x1_fma(a.y, v0[1], c0);
            c1 = x1_fma(a.y, v1[1], c1);
            c0 = x1_fma(a.z, v0[2], c0);
            c1 = x1_fma(a.z, v1[2], c1);
            s[r][i] = x1_fma(a.w, v0[3], c0);
            s[r][i + 1] = x1_fma(a.w, v1[3], c1);
          }
        }
      }
    }
    float chunk_m[8], chunk_l[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const int position = low + r, first = w > 0 ? position + 1 - w : 0;
      float top = kMinusInfinity;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int j = start + lane + 32 * i;
        if (j < first || j > position) s[r][i] = kMinusInfinity;
        top = fmaxf(top, s[r][i]);
      }
      chunk_m[r] = x1_warp_max(top);
#pragma unroll
      for (int i = 0; i < 8; i++) s[r][i] = s[r][i] == kMinusInfinity ? 0.0f : x1_exp(x1_add(s[r][i], -chunk_m[r]));
      chunk_l[r] = __shfl_sync(kAllLanes, x1_tree256(s[r]), 0);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float4* at = reinterpret_cast<float4*>(weights + (lane + 32 * i) * 8);
      at[0] = make_float4(s[0][i], s[1][i], s[2][i], s[3][i]);
      at[1] = make_float4(s[4][i], s[5][i], s[6][i], s[7][i]);
    }
    __syncwarp();
    float part[8][kEach];
#pragma unroll
    for (int r = 0; r < 8; r++) {
#pragma unroll
      for (int e = 0; e < kEach; e++) part[r][e] = 0.0f;
    }
    const int to = min(start + kChunk, high + 1);
    const fp16* value = nullptr;
    auto add = [&](int j) {
      float v[kEach];
      if (D == 128) {
        const uint2 raw = *reinterpret_cast<const uint2*>(value);
        const fp16* h = reinterpret_cast<const fp16*>(&raw);
#pragma unroll
        for (int e = 0; e < kEach; e++) v[e] = x1_half_float(h[e]);
      } else {
#pragma unroll
        for (int e = 0; e < kEach; e++) v[e] = lane * kEach + e < D ? x1_half_float(value[e]) : 0.0f;
      }
      const float4 a = *reinterpret_cast<const float4*>(weights + (j - start) * 8);
      const float4 b = *reinterpret_cast<const float4*>(weights + (j - start) * 8 + 4);
      const float p[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int r = 0; r < 8; r++) {
#pragma unroll
        for (int e = 0; e < kEach; e++) part[r][e] = x1_fma(p[r], v[e], part[r][e]);
      }
      value += D;
    };
    // One cache block after the other, nearly always a whole one.
    for (int j = max(start, first_of_all); j < to;) {
      const int stop = min(to, (j / kSlots + 1) * kSlots);
      value = values + (((size_t)table[j / kSlots] * KV_HEADS + kv_head) * kSlots + j % kSlots) * D + lane * kEach;
      if (stop - j == kSlots) {
#pragma unroll
        for (int k = 0; k < kSlots; k++) add(j + k);
        j = stop;
      }
#pragma unroll 1
      for (; j < stop; j++) add(j);
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
      if (chunk_m[r] == kMinusInfinity) continue;
      const bool merge = any[r];
      const float top = merge ? fmaxf(m[r], chunk_m[r]) : chunk_m[r];
      const float fa = merge ? x1_exp(x1_add(m[r], -top)) : 0.0f, fc = x1_exp(x1_add(chunk_m[r], -top));
#pragma unroll
      for (int e = 0; e < kEach; e++) {
        const float c = x1_flush(part[r][e], kOutputFloor);
        o[r][e] = merge ? x1_flush(x1_fma(o[r][e], fa, x1_mul(c, fc)), kOutputFloor) : c;
      }
      l[r] = merge ? x1_fma(l[r], fa, x1_mul(chunk_l[r], fc)) : chunk_l[r];
      m[r] = top;
      any[r] = true;
    }
  }
#pragma unroll
  for (int r = 0; r < 8; r++) {
    if (r >= count) continue;
    const float scale = x1_recip(l[r]);
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int d = lane * kEach + e;
      if (d < D) context[((size_t)(token + r) * HEADS + head) * D + d] = x1_mul(o[r][e], scale);
    }
  }
}
