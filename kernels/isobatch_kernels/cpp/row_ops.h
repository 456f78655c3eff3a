// Every operation except linear layers, one table per instruction set. All tables give the same bits.
#pragma once
#include "views.h"

namespace isobatch {

constexpr int kMaxAttentionTokens = 8;

// The only block size of the cache that attention knows: 16 keys of one dimension fill a vector.
constexpr int kCacheBlock = 16;

// The rule that a cache breaks, for the caller to raise, or null. Callers check once; the operations do not.
static inline const char* cache_problem(const KvView& kv) {
  if (kv.block_size != kCacheBlock) return "[attention] block_size must be 16";
  if (kv.head_dim < 2 || kv.head_dim % 2 != 0) return "[attention] head_dim must be a positive multiple of 2";
  return nullptr;
}

struct RowOps {
  const char* name;
  // Quantises row m of an activation buffer from K floats (numerics.md section 2).
  void (*quantize)(const float* x, const ActView& out, int m);
  // RMS norm of x (K floats) with weight w, then quantise into row m.
  void (*norm_quantize)(const float* x, const float* w, float eps, const ActView& out, int m);
  // RMS norm alone, for dense consumers: y (K floats).
  void (*norm)(const float* x, const float* w, float eps, int K, float* y);
  // SwiGLU of gate and up (K floats each), then quantise into row m.
  void (*gate_quantize)(const float* gate, const float* up, const ActView& out, int m);
  // SwiGLU alone: y (K floats).
  void (*gate)(const float* gate, const float* up, int K, float* y);
  // In place on one token's queries (num_heads, head_dim): RoPE, times scale, floor. `position` selects the table row.
  // Returns false when a value is non-finite (numerics.md section 0).
  bool (*rope_query)(float* q, int num_heads, int head_dim, float scale, const RopeArgs& rope, int position);
  // RoPE of one token's keys (num_kv_heads, head_dim), then keys and values as fp16 into the cache at (block, slot).
  bool (*write_kv)(const float* k, const float* v, const RopeArgs& rope, int position, const KvView& kv, int block, int slot);
  // All chunks of one token and one key/value head; out: (group, head_dim), out_stride apart.
  // scratch: at least attention_scratch_floats(group, head_dim) floats.
  void (*attention)(const AttentionArgs& args, const KvView& kv, float* out, int out_stride, float* scratch);
  // The same for up to kMaxAttentionTokens tokens of one sequence and one key/value head, each with its own positions; scratch for
  // so many. Null where there is no gain.
  void (*attention_tokens)(const AttentionArgs* tokens, int count, const KvView& kv, float* const* out, int out_stride, float* scratch);
  // One chunk only: partials, `group` of them, attention_partial_floats(head_dim) floats each.
  // Returns false for an empty chunk (nothing visible), whose partials are then not written.
  bool (*attention_chunk)(const AttentionArgs& args, const KvView& kv, int chunk, float* partials, float* scratch);
  // Merges the partials of one query head in ascending chunk order (entries with present[i] == 0 are skipped), writes head_dim floats.
  void (*attention_merge)(const float* const* partials, const uint8_t* present, int num_chunks, int head_dim, float* out);
  // Row statistics; applies edits in place to logits (V floats). Top entries past V get id -1, logit -infinity, weight +0.
  // scratch: V floats.
  void (*statistics)(float* logits, int V, const StatisticsArgs& args, StatisticsResult& result, float* scratch);
};

static inline size_t attention_scratch_floats(int group, int head_dim, int tokens = 1) {
  return (size_t)group * (256 + 64) + (size_t)group * (2 + head_dim) * (1 + tokens) + 1024;
}

// Tables. scalar_row_ops is portable C++; the others are null where they are not compiled in.
const RowOps* scalar_row_ops();
const RowOps* avx2_row_ops();
const RowOps* avx512_row_ops();
const RowOps* neon_row_ops();

}  // namespace isobatch
