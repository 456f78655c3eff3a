// Attention over the paged cache in chunks of 256 absolute positions (numerics.md section 4).
//
// A threadgroup of 256 threads works on R query rows that share one key/value head: some tokens of one sequence times some
// heads. Thread j owns key j of the chunk while scores are made, then thread t owns dimension t % D of the output. The
// decode form gives every chunk its own threadgroup and merges in a second kernel; the prefill form walks the chunks and
// merges as it goes. Both call the same functions in the same order, so their bits are equal.
//
// Pool of one layer: rows of VEC halves. A block holds, for each key/value head, keys (D/VEC, block_size, VEC), so that
// neighbouring keys are neighbouring loads, and after all heads' keys, values (block_size, D).
// @use common

struct AttentionSizes {
  int heads, kv_heads, dim, block_size, max_blocks, window, head_tile, max_chunks;
};
METAL_FUNC AttentionSizes attention_sizes(const device int* sizes) {
  AttentionSizes z;
  z.heads = sizes[0];
  z.kv_heads = sizes[1];
  z.dim = sizes[2];
  z.block_size = sizes[3];
  z.max_blocks = sizes[4];
  z.window = sizes[5];
  z.head_tile = sizes[6];
  z.max_chunks = sizes[7];
  return z;
}

// The query rows of a threadgroup: tokens first_token.., heads first_head.., row r = token * heads + head.
struct QueryTile {
  int first_token, tokens, first_head, heads, kv_head;
  METAL_FUNC int count() const thread { return tokens * heads; }
  METAL_FUNC int token(int r) const thread { return first_token + r / heads; }
  METAL_FUNC int head(int r) const thread { return first_head + r % heads; }
};
METAL_FUNC QueryTile query_tile(const device int* tiles, uint tile, uint head_tile, AttentionSizes z) {
  const int group = z.heads / z.kv_heads, per_group = (group + z.head_tile - 1) / z.head_tile;
  QueryTile q;
  q.first_token = tiles[3 * tile];
  q.tokens = tiles[3 * tile + 1];
  q.kv_head = int(head_tile) / per_group;
  const int inside = int(head_tile) % per_group * z.head_tile;
  q.first_head = q.kv_head * group + inside;
  q.heads = min(z.head_tile, group - inside);
  return q;
}
METAL_FUNC int first_visible(int position, int window) { return window > 0 ? max(0, position + 1 - window) : 0; }

// VEC neighbouring halves as floats, by one load where they fill 16 bytes.
template <int VEC>
METAL_FUNC void load_vector(const device half* from, thread float* to) {
  if (VEC == 8) {
    const uint4 v = *reinterpret_cast<const device uint4*>(from);
    UNROLL for (int i = 0; i < 4; i++) {
      const half2 h = as_type<half2>(v[i]);
      to[2 * i] = float(h.x);
      to[2 * i + 1] = float(h.y);
    }
  } else {
    UNROLL for (int i = 0; i < VEC; i++) to[i] = float(from[i]);
  }
}

// Largest score over the keys of the chunk, weights and their sum, for R rows. p (R, 256) gets the weights, +0 for hidden
// keys; top and sums (R) the maxima and sums. scratch (8, R).
template <int R, int VEC, int DIM, int BLOCK>
METAL_FUNC void weigh_chunk(const device half* pool, const device int* blocks, const device int* positions, QueryTile tile,
                            AttentionSizes z, int chunk, uint t, uint lane, uint sg, const threadgroup float4* queries,
                            threadgroup float* p, threadgroup float* scratch, threadgroup float* top, threadgroup float* sums) {
  const int position = chunk * kChunk + int(t);
  const int lowest = first_visible(positions[tile.first_token], z.window), last = positions[tile.token(tile.count() - 1)];
  float score[R];
  UNROLL for (int r = 0; r < R; r++) score[r] = 0.0f;
  if (position >= lowest && position <= last) {
    const int block = blocks[position / BLOCK], slot = position % BLOCK;
    constexpr int VECTORS = DIM / VEC;
    const device half* key = pool + ((size_t(block) * 2 * z.kv_heads + tile.kv_head) * VECTORS * BLOCK + slot) * VEC;
    const threadgroup float* query = reinterpret_cast<const threadgroup float*>(queries);
    for (int i = 0; i < VECTORS; i++) {
      float k[VEC];
      load_vector<VEC>(key + i * BLOCK * VEC, k);
      UNROLL for (int r = 0; r < R; r++) {
        if (VEC % 4 == 0) {
          UNROLL for (int part = 0; part < VEC / 4; part++) {
            const float4 q = queries[(r * DIM + i * VEC) / 4 + part];
            UNROLL for (int e = 0; e < 4; e++) score[r] = fma(q[e], k[4 * part + e], score[r]);
          }
        } else {
          UNROLL for (int e = 0; e < VEC; e++) score[r] = fma(query[r * DIM + i * VEC + e], k[e], score[r]);
        }
      }
    }
  }
  bool visible[R];
  UNROLL for (int r = 0; r < R; r++) {
    const int at = positions[tile.token(min(r, tile.count() - 1))];
    visible[r] = r < tile.count() && position <= at && position >= first_visible(at, z.window);
    const float largest = simd_max(visible[r] ? score[r] : -MAXFLOAT);
    if (lane == 0) scratch[sg * R + r] = largest;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int r = 0; r < R; r++) {
    float m = scratch[r];
    for (int i = 1; i < 8; i++) m = scratch[i * R + r] > m ? scratch[i * R + r] : m;
    p[r * kChunk + int(t)] = visible[r] ? x1_exp(score[r] - m) : 0.0f;
    if (t == 0) top[r] = m;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = int(sg); r < R; r += 8) {
    const float sum = sum256_tree(p + r * kChunk, lane);
    if (lane == 0) sums[r] = sum;
  }
}

// The thread's outputs of the chunk: dimension t % D of rows t / D, t / D + 256 / D, ... Blocks that all of its rows see
// whole take four weights a load and no comparison.
template <int R, int DIM, int OWN, int BLOCK>
METAL_FUNC void mix_chunk(const device half* pool, const device int* blocks, const device int* positions, QueryTile tile,
                          AttentionSizes z, int chunk, uint t, const threadgroup float4* weights, thread float* o) {
  const threadgroup float* p = reinterpret_cast<const threadgroup float*>(weights);
  const int d = int(t) % DIM, first = int(t) / DIM, step = 256 / DIM;
  int low[OWN], high[OWN], from = kChunk, to = 0;
  UNROLL for (int i = 0; i < OWN; i++) {
    const int r = first + i * step;
    const int at = positions[tile.token(min(r, tile.count() - 1))] - chunk * kChunk;
    low[i] = max(0, first_visible(at + chunk * kChunk, z.window) - chunk * kChunk);
    high[i] = first < step && r < tile.count() ? min(at + 1, kChunk) : 0;
    if (low[i] < high[i]) {
      from = min(from, low[i]);
      to = max(to, high[i]);
    }
    o[i] = 0.0f;
  }
  for (int j0 = from / BLOCK * BLOCK; j0 < to; j0 += BLOCK) {
    const size_t block = blocks[(chunk * kChunk + j0) / BLOCK];
    const device half* v = pool + ((block * 2 + 1) * z.kv_heads + tile.kv_head) * BLOCK * DIM + d;
    bool whole = BLOCK % 4 == 0;
    UNROLL for (int i = 0; i < OWN; i++) {
      whole = whole && (low[i] >= high[i] || (low[i] <= j0 && high[i] >= j0 + BLOCK));
    }
    if (whole) {
      UNROLL for (int s = 0; s < BLOCK; s += 4) {
        float4 w[OWN];
        // Rows of nobody read the last row's weights, and what they add up is not written.
        UNROLL for (int i = 0; i < OWN; i++) w[i] = weights[(min(first + i * step, R - 1) * kChunk + j0 + s) / 4];
        UNROLL for (int e = 0; e < 4; e++) {
          const float value = float(v[(s + e) * DIM]);
          UNROLL for (int i = 0; i < OWN; i++) o[i] = fma(w[i][e], value, o[i]);
        }
      }
    } else {
      for (int j = max(from, j0); j < min(to, j0 + BLOCK); j++) {
        const float value = float(v[(j - j0) * DIM]);
        UNROLL for (int i = 0; i < OWN; i++) {
          if (j >= low[i] && j < high[i]) o[i] = fma(p[(first + i * step) * kChunk + j], value, o[i]);
        }
      }
    }
  }
  UNROLL for (int i = 0; i < OWN; i++) o[i] = flush_below(o[i], kFloor40Bits);
}

METAL_FUNC void merge(thread float& o, thread float& m, thread float& l, float chunk_o, float chunk_m, float chunk_l) {
  const float top = m > chunk_m ? m : chunk_m;
  const float fa = x1_exp(m - top), fc = x1_exp(chunk_m - top);
  o = flush_below(fma(o, fa, chunk_o * fc), kFloor40Bits);
  l = fma(l, fa, chunk_l * fc);
  m = top;
}

METAL_FUNC void load_queries(const device float* queries, QueryTile tile, AttentionSizes z, int rows, uint t,
                             threadgroup float* out) {
  for (int i = int(t); i < rows * z.dim; i += 256) {
    const int r = min(i / z.dim, tile.count() - 1);
    out[i] = queries[(size_t(tile.token(r)) * z.heads + tile.head(r)) * z.dim + i % z.dim];
  }
}

// @kernel attention_prefill
// @inputs queries pool tables positions tiles sizes
// @outputs out
// tiles: first token, tokens, row of tables. Template: R, VEC, DIM, BLOCK, OWN = ceil(R / (256/DIM)). Grid (256, tiles, head tiles).
{
  threadgroup float4 queries4[(R * DIM + 3) / 4];  // float4: read 16 bytes at a time
  threadgroup float4 weights4[R * 64];
  threadgroup float scratch[8 * R];
  threadgroup float tops[R];
  threadgroup float sums[R];
  const AttentionSizes z = attention_sizes(sizes);
  const uint t = thread_index_in_threadgroup, lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
  const QueryTile tile = query_tile(tiles, threadgroup_position_in_grid.y, threadgroup_position_in_grid.z, z);
  const device int* blocks = tables + size_t(tiles[3 * threadgroup_position_in_grid.y + 2]) * z.max_blocks;
  threadgroup float* p = reinterpret_cast<threadgroup float*>(weights4);
  load_queries(queries, tile, z, R, t, reinterpret_cast<threadgroup float*>(queries4));
  const int d = int(t) % DIM, first = int(t) / DIM, step = 256 / DIM;
  float o[OWN], m[OWN], l[OWN];
  UNROLL for (int i = 0; i < OWN; i++) o[i] = m[i] = l[i] = 0.0f;
  const int begin = first_visible(positions[tile.first_token], z.window) / kChunk;
  const int end = positions[tile.token(tile.count() - 1)] / kChunk;
  for (int chunk = begin; chunk <= end; chunk++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    weigh_chunk<R, VEC, DIM, BLOCK>(pool, blocks, positions, tile, z, chunk, t, lane, sg, queries4, p, scratch, tops, sums);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float part[OWN];
    mix_chunk<R, DIM, OWN, BLOCK>(pool, blocks, positions, tile, z, chunk, t, weights4, part);
    UNROLL for (int i = 0; i < OWN; i++) {
      const int r = first + i * step;
      if (first >= step || r >= tile.count()) continue;
      const int at = positions[tile.token(r)];
      const int first_chunk = first_visible(at, z.window) / kChunk;
      if (chunk < first_chunk || chunk > at / kChunk) continue;
      if (chunk == first_chunk) {
        o[i] = part[i];
        m[i] = tops[r];
        l[i] = sums[r];
      } else {
        merge(o[i], m[i], l[i], part[i], tops[r], sums[r]);
      }
    }
  }
  UNROLL for (int i = 0; i < OWN; i++) {
    const int r = first + i * step;
    if (first < step && r < tile.count()) out[(size_t(tile.token(r)) * z.heads + tile.head(r)) * DIM + d] = o[i] * x1_recip(l[i]);
  }
}

// @kernel attention_decode
// @inputs queries pool tables positions tiles sizes
// @outputs partials
// One chunk a threadgroup. partials (T*H, max_chunks, 2 + D): largest score, sum, output; those of chunks that a token does
// not see stay unwritten. Grid (256, tiles * max_chunks, head tiles).
{
  threadgroup float4 queries4[(R * DIM + 3) / 4];  // float4: read 16 bytes at a time
  threadgroup float4 weights4[R * 64];
  threadgroup float scratch[8 * R];
  threadgroup float tops[R];
  threadgroup float sums[R];
  const AttentionSizes z = attention_sizes(sizes);
  const uint t = thread_index_in_threadgroup, lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
  const uint which = threadgroup_position_in_grid.y / uint(z.max_chunks);
  const int chunk = int(threadgroup_position_in_grid.y % uint(z.max_chunks));
  const QueryTile tile = query_tile(tiles, which, threadgroup_position_in_grid.z, z);
  const device int* blocks = tables + size_t(tiles[3 * which + 2]) * z.max_blocks;
  const int begin = first_visible(positions[tile.first_token], z.window) / kChunk;
  if (chunk < begin || chunk > positions[tile.token(tile.count() - 1)] / kChunk) return;
  threadgroup float* p = reinterpret_cast<threadgroup float*>(weights4);
  load_queries(queries, tile, z, R, t, reinterpret_cast<threadgroup float*>(queries4));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  weigh_chunk<R, VEC, DIM, BLOCK>(pool, blocks, positions, tile, z, chunk, t, lane, sg, queries4, p, scratch, tops, sums);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float part[OWN];
  mix_chunk<R, DIM, OWN, BLOCK>(pool, blocks, positions, tile, z, chunk, t, weights4, part);
  const int d = int(t) % DIM, first = int(t) / DIM, step = 256 / DIM;
  UNROLL for (int i = 0; i < OWN; i++) {
    const int r = first + i * step;
    if (first >= step || r >= tile.count()) continue;
    const size_t row = size_t(tile.token(r)) * z.heads + tile.head(r);
    device float* to = partials + (row * z.max_chunks + chunk) * (DIM + 2);
    to[2 + d] = part[i];
    if (d == 0) {
      to[0] = tops[r];
      to[1] = sums[r];
    }
  }
}

// @kernel attention_merge
// @inputs partials positions sizes
// @outputs out
// Ascending chunks of one token and head. Grid (ceil(D/32)*32, H, T).
{
  const AttentionSizes z = attention_sizes(sizes);
  const int d = int(thread_position_in_grid.x), at = positions[threadgroup_position_in_grid.z];
  const size_t row = size_t(threadgroup_position_in_grid.z) * z.heads + threadgroup_position_in_grid.y;
  if (d >= z.dim) return;
  const int begin = first_visible(at, z.window) / kChunk;
  const device float* part = partials + (row * z.max_chunks + begin) * (z.dim + 2);
  float m = part[0], l = part[1], o = part[2 + d];
  for (int chunk = begin + 1; chunk <= at / kChunk; chunk++) {
    part += z.dim + 2;
    merge(o, m, l, part[2 + d], part[0], part[1]);
  }
  out[row * z.dim + d] = o * x1_recip(l);
}
