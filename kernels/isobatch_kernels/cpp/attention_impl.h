// Attention of one token over the paged cache (docs/numerics.md section 4). Included only through row_ops_unit.h.
//
// Keys are transposed inside a block, so 16 neighbouring keys are one vector and the chain of a score ascends over the
// head dimension. Values are not, so neighbouring dimensions are one vector and the chain of an output ascends over keys.
// Up to kHeadTile query heads share every load of a key or value.
#pragma once

namespace isobatch::ISOBATCH_UNIT {
namespace {

constexpr int kHeadTile = 4;
constexpr int kSlots = kCacheBlock;
constexpr int kVectorsPerBlock = kSlots / W;

// Visible positions [first, last) of one chunk, and the blocks that hold them.
struct ChunkRange {
  int start, first, last;  // start: the chunk's position 0
  int first_block() const { return first / kSlots; }
  int end_block() const { return (last + kSlots - 1) / kSlots; }
  bool empty() const { return first >= last; }
};

ChunkRange chunk_range(const AttentionArgs& args, int chunk) {
  int start = chunk * kAttentionChunk, end = start + kAttentionChunk;
  int first = args.first_visible > start ? args.first_visible : start;
  int last = args.position + 1 < end ? args.position + 1 : end;
  return {start, first, last};
}

struct HeadCache {  // one key/value head of the paged cache as one sequence sees it
  const uint16_t *keys, *values;
  size_t block_stride;
  const int32_t* table;
  int head_dim;
  const uint16_t* key_block(int block) const { return keys + (size_t)table[block] * block_stride; }
  const uint16_t* value_block(int block) const { return values + (size_t)table[block] * block_stride; }
};

HeadCache head_cache(const AttentionArgs& args, const KvView& kv) {
  size_t offset = (size_t)args.kv_head * kv.head_stride();
  return {kv.keys + offset, kv.values + offset, kv.block_stride(), args.block_table, kv.head_dim};
}

// Scores of BLOCKS blocks for HEADS heads; scores of a head are kAttentionChunk apart. On the way it fetches the values of
// these blocks and the keys of the blocks after them, up to `end`: a long context streams from memory. With `ahead` (not 0) these
// are there already, and it fetches the blocks of the next chunk, up to block `ahead`.
template <int HEADS, int BLOCKS>
inline void score_blocks(const HeadCache& cache, int block, int end, int ahead, const float* q, int q_stride, float* scores) {
  constexpr int V = BLOCKS * kVectorsPerBlock;
  const uint16_t *keys[BLOCKS], *values[BLOCKS], *later[BLOCKS];
  for (int b = 0; b < BLOCKS; b++) {
    keys[b] = cache.key_block(block + b);
    const int next = block + b + kAttentionChunk / kSlots;
    values[b] = cache.value_block(!ahead ? block + b : next < ahead ? next : ahead - 1);
    later[b] = cache.key_block(ahead ? (next < ahead ? next : ahead - 1) : block + BLOCKS + b < end ? block + BLOCKS + b : end - 1);
  }
  Vf sums[HEADS][V];
  for (int h = 0; h < HEADS; h++)
    for (int v = 0; v < V; v++) sums[h][v] = zero();
  for (int d = 0; d < cache.head_dim; d++) {
    if (d % 2 == 0) {  // a cache line holds two dimensions of a block
      for (int b = 0; b < BLOCKS; b++) {
        prefetch(later[b] + d * kSlots);
        prefetch(values[b] + d * kSlots);
      }
    }
    for (int v = 0; v < V; v++) {
      Vf k = load_f16(keys[v / kVectorsPerBlock] + d * kSlots + v % kVectorsPerBlock * W);
      for (int h = 0; h < HEADS; h++) sums[h][v] = fma(set(q[h * q_stride + d]), k, sums[h][v]);
    }
  }
  for (int h = 0; h < HEADS; h++)
    for (int v = 0; v < V; v++) store(scores + h * kAttentionChunk + v * W, sums[h][v]);
}

template <int HEADS>
void score_chunk(const HeadCache& cache, const ChunkRange& range, int ahead, const float* q, int q_stride, float* scores) {
  constexpr int BLOCKS = kScoreBlocks[HEADS];
  const int base = range.start / kSlots, end = range.end_block();
  int block = range.first_block();
  for (; block + BLOCKS <= end; block += BLOCKS)
    score_blocks<HEADS, BLOCKS>(cache, block, end, ahead, q, q_stride, scores + (block - base) * kSlots);
  for (; block < end; block++) score_blocks<HEADS, 1>(cache, block, end, ahead, q, q_stride, scores + (block - base) * kSlots);
}

// Turns one head's scores (kAttentionChunk floats) into weights in place; hidden and missing keys get +0.
inline void chunk_weights(const ChunkRange& range, float* scores, float& m, float& l) {
  const int begin = range.first_block() * kSlots - range.start, end = range.end_block() * kSlots - range.start;
  for (int j = begin; j < range.first - range.start; j++) scores[j] = -INFINITY;
  for (int j = range.last - range.start; j < end; j++) scores[j] = -INFINITY;
  Vf top = load(scores + begin);
  for (int j = begin + W; j < end; j += W) top = max(top, load(scores + j));
  m = max_lanes(top);
  const Vf shift = set(m);
  for (int j = 0; j < begin; j += W) store(scores + j, zero());
  for (int j = begin; j < end; j += W) store(scores + j, vector_exp(sub(load(scores + j), shift)));
  for (int j = end; j < kAttentionChunk; j += W) store(scores + j, zero());
  Vf chains[256 / W];
  for (int i = 0; i < 256 / W; i++) chains[i] = load(scores + i * W);
  l = sum_chains(chains);
}

// Outputs of VECTORS vectors of dimensions from d, for HEADS heads whose partials are `stride` floats apart.
// n: dimensions wanted, less than W only where VECTORS is 1 and the head ends inside the vector.
template <int HEADS, int VECTORS, bool WHOLE>
inline void output_dimensions(const HeadCache& cache, const ChunkRange& range, const float* weights, int d, int n,
                              float* out, size_t stride) {
  Vf sums[HEADS][VECTORS];
  for (int h = 0; h < HEADS; h++)
    for (int v = 0; v < VECTORS; v++) sums[h][v] = zero();
  for (int block = range.first_block(); block < range.end_block(); block++) {
    const int at = block * kSlots;
    const int begin = range.first > at ? range.first - at : 0;
    const int end = range.last < at + kSlots ? range.last - at : kSlots;
    const uint16_t* values = cache.value_block(block) + d;
    const float* w = weights + (at - range.start);
    for (int slot = begin; slot < end; slot++) {
      const uint16_t* row = values + slot * cache.head_dim;
      for (int v = 0; v < VECTORS; v++) {
        Vf x = WHOLE ? load_f16(row + v * W) : load_f16_n(row, n);
        for (int h = 0; h < HEADS; h++) sums[h][v] = fma(set(w[h * kAttentionChunk + slot]), x, sums[h][v]);
      }
    }
  }
  const Vf floor = set(kOutputFloor);
  for (int h = 0; h < HEADS; h++) {
    for (int v = 0; v < VECTORS; v++) {
      Vf o = zero_below(sums[h][v], floor);
      float* to = out + h * stride + d + v * W;
      if (WHOLE) store(to, o); else store_n(to, o, n);
    }
  }
}

// All dimensions: as many vectors at a time as fit the registers, then half as many, and so on.
template <int HEADS, int VECTORS>
void output_chunk(const HeadCache& cache, const ChunkRange& range, const float* weights, int d, float* out, size_t stride) {
  for (; d + VECTORS * W <= cache.head_dim; d += VECTORS * W)
    output_dimensions<HEADS, VECTORS, true>(cache, range, weights, d, W, out, stride);
  if constexpr (VECTORS > 1) {
    output_chunk<HEADS, VECTORS / 2>(cache, range, weights, d, out, stride);
  } else if (d < cache.head_dim) {
    output_dimensions<HEADS, 1, false>(cache, range, weights, d, cache.head_dim - d, out, stride);
  }
}

// Partials of HEADS heads of one chunk that is not empty. scores: HEADS * kAttentionChunk floats.
template <int HEADS>
void chunk_partials(const HeadCache& cache, const ChunkRange& range, int ahead, const float* q, int q_stride, float* partials,
                    float* scores) {
  const size_t stride = attention_partial_floats(cache.head_dim);
  score_chunk<HEADS>(cache, range, ahead, q, q_stride, scores);
  for (int h = 0; h < HEADS; h++)
    chunk_weights(range, scores + h * kAttentionChunk, partials[h * stride], partials[h * stride + 1]);
  output_chunk<HEADS, kOutputVectors[HEADS]>(cache, range, scores, 0, partials + 2, stride);
}

using PartialsFunction = void (*)(const HeadCache&, const ChunkRange&, int, const float*, int, float*, float*);
constexpr PartialsFunction kChunkPartials[kHeadTile + 1] = {nullptr, chunk_partials<1>, chunk_partials<2>, chunk_partials<3>,
                                                            chunk_partials<4>};

inline int tile_heads(int left) { return left < kHeadTile ? left : kHeadTile; }

// (m, l, o) becomes the merge of itself and the partial of a later chunk.
void merge_partial(float& m, float& l, float* o, const float* later, int head_dim) {
  const float top = m > later[0] ? m : later[0];
  const float fa = x1_exp(m - top), fc = x1_exp(later[0] - top);
  m = top;
  l = std::fma(l, fa, later[1] * fc);
  later += 2;
  const Vf va = set(fa), vc = set(fc), floor = set(kOutputFloor);
  int d = 0;
  for (; d + W <= head_dim; d += W) store(o + d, zero_below(fma(load(o + d), va, mul(load(later + d), vc)), floor));
  if (int n = head_dim - d; n > 0)
    store_n(o + d, zero_below(fma(load_n(o + d, n), va, mul(load_n(later + d, n), vc)), floor), n);
}

void divide_by_sum(const float* o, float l, int head_dim, float* out) {
  const Vf r = set(x1_recip(l));
  int d = 0;
  for (; d + W <= head_dim; d += W) store(out + d, mul(load(o + d), r));
  if (int n = head_dim - d; n > 0) store_n(out + d, mul(load_n(o + d, n), r), n);
}

// Chunk by chunk for all tokens: keys and values behind a deep context come from memory once and not for each token.
void attention_tokens(const AttentionArgs* tokens, int count, const KvView& kv, float* const* out, int out_stride, float* scratch) {
  const HeadCache cache = head_cache(tokens[0], kv);
  const size_t stride = attention_partial_floats(kv.head_dim);
  int first = tokens[0].first_visible, last = tokens[0].position;
  for (int t = 1; t < count; t++) {
    first = tokens[t].first_visible < first ? tokens[t].first_visible : first;
    last = tokens[t].position > last ? tokens[t].position : last;
  }
  for (int h = 0; h < tokens[0].group; h += kHeadTile) {
    const int heads = tile_heads(tokens[0].group - h);
    float* scores = scratch;
    float* next = scores + heads * kAttentionChunk;
    float* merged = next + heads * stride;
    bool any[kMaxAttentionTokens] = {};
    for (int chunk = first / kAttentionChunk; chunk <= last / kAttentionChunk; chunk++) {
      for (int t = 0; t < count; t++) {
        const ChunkRange range = chunk_range(tokens[t], chunk);
        if (range.empty()) continue;
        const float* q = tokens[t].q + (size_t)h * tokens[t].q_stride;
        float* of_token = merged + (size_t)t * heads * stride;
        // The first token brings a chunk near; with the second, the next chunk comes while this one is computed.
        const int ahead = t == 1 && chunk < last / kAttentionChunk ? last / kSlots + 1 : 0;
        kChunkPartials[heads](cache, range, ahead, q, tokens[t].q_stride, any[t] ? next : of_token, scores);
        for (int i = 0; any[t] && i < heads; i++) {
          float* a = of_token + i * stride;
          merge_partial(a[0], a[1], a + 2, next + i * stride, kv.head_dim);
        }
        any[t] = true;
      }
    }
    for (int t = 0; t < count; t++) {
      for (int i = 0; i < heads; i++) {
        const float* a = merged + ((size_t)t * heads + i) * stride;
        divide_by_sum(a + 2, a[1], kv.head_dim, out[t] + (size_t)(h + i) * out_stride);
      }
    }
  }
}

void attention(const AttentionArgs& args, const KvView& kv, float* out, int out_stride, float* scratch) {
  attention_tokens(&args, 1, kv, &out, out_stride, scratch);
}

bool attention_chunk(const AttentionArgs& args, const KvView& kv, int chunk, float* partials, float* scratch) {
  const ChunkRange range = chunk_range(args, chunk);
  if (range.empty()) return false;
  const HeadCache cache = head_cache(args, kv);
  const size_t stride = attention_partial_floats(kv.head_dim);
  for (int h = 0; h < args.group; h += kHeadTile) {
    kChunkPartials[tile_heads(args.group - h)](cache, range, 0, args.q + (size_t)h * args.q_stride, args.q_stride,
                                               partials + h * stride, scratch);
  }
  return true;
}

void attention_merge(const float* const* partials, const uint8_t* present, int num_chunks, int head_dim, float* out) {
  float m = 0.0f, l = 0.0f;
  bool any = false;
  for (int i = 0; i < num_chunks; i++) {
    if (!present[i]) continue;
    if (any) {
      merge_partial(m, l, out, partials[i], head_dim);
    } else {
      m = partials[i][0];
      l = partials[i][1];
      std::memcpy(out, partials[i] + 2, (size_t)head_dim * sizeof(float));
      any = true;
    }
  }
  divide_by_sum(out, l, head_dim, out);
}

}  // namespace
}  // namespace isobatch::ISOBATCH_UNIT
