// The engine's attention: by token and key/value head where there are many of them, else by chunk with an ordered merge,
// so that one long sequence still uses every thread.
#include <algorithm>

#include "contract.h"
#include "engine.h"

namespace isobatch {
namespace {

constexpr int kTilesPerThread = 12;
// Positions that a piece of attention's work should have at least: some microseconds.
constexpr int64_t kPiecePositions = 1024;

}  // namespace

void Engine::rope_write_kv(int index, WorkCounter& work) {
  const Op& op = ops_[index];
  const Buffer& qkv = buffers_[op.x];
  const KvView& kv = kv_.layer(op.layer);
  const RopeArgs rope{rope_table_.data(), config_.rotary_dim, config_.rope_interleaved};
  const int heads = config_.num_heads * config_.head_dim, kv_width = config_.num_kv_heads * config_.head_dim;
  pool_.share(work, step_.tokens, piece(step_.tokens), [&](int begin, int end) {
    for (int m = begin; m < end; m++) {
      float *q = qkv.row(m), *k = q + heads, *v = k + kv_width;
      const int position = step_.positions[m];
      const int32_t* table = step_.block_tables + (int64_t)token_rows_[m] * step_.max_blocks;
      const int block = table[position / kv.block_size], slot = position % kv.block_size;
      const bool query = unit_.rows->rope_query(q, config_.num_heads, config_.head_dim, config_.attention_scale, rope, position);
      const bool cached = unit_.rows->write_kv(k, v, rope, position, kv, block, slot);
      if (!(query && cached) && non_finite_[m] == 0) non_finite_[m] = 1 + (uint32_t)index;
    }
  });
}

AttentionArgs Engine::attention_args(const Op& op, int token, int kv_head) const {
  AttentionArgs args{};
  args.group = config_.num_heads / config_.num_kv_heads;
  args.q = buffers_[op.x].row(token) + (size_t)kv_head * args.group * config_.head_dim;
  args.q_stride = config_.head_dim;
  args.block_table = step_.block_tables + (int64_t)token_rows_[token] * step_.max_blocks;
  args.kv_head = kv_head;
  args.position = step_.positions[token];
  args.first_visible = op.window > 0 ? std::max(0, args.position + 1 - op.window) : 0;
  return args;
}

void Engine::attention(const Op& op, WorkCounter& work, WorkCounter& merge, int thread) {
  float* scratch = scratch_[thread].as<float>();
  if (by_chunks_) {
    attention_by_chunks(op, work, merge, scratch);
    return;
  }
  const int kv_heads = config_.num_kv_heads, items = (int)attention_tiles_.size() * kv_heads;
  const int group = config_.num_heads / kv_heads;
  const KvView& kv = kv_.layer(op.layer);
  // From the last token on: the longest contexts of a prefill first, so that threads end together.
  pool_.share(work, items, attention_piece_, [&](int begin, int end) {
    for (int i = begin; i < end; i++) {
      const int item = items - 1 - i, kv_head = item % kv_heads;
      const AttentionTile tile = attention_tiles_[item / kv_heads];
      AttentionArgs args[kMaxAttentionTokens];
      float* out[kMaxAttentionTokens];
      for (int t = 0; t < tile.count; t++) {
        args[t] = attention_args(op, tile.token + t, kv_head);
        out[t] = buffers_[op.out].row(tile.token + t) + (size_t)kv_head * group * config_.head_dim;
      }
      if (tile.count > 1) {
        unit_.rows->attention_tokens(args, tile.count, kv, out, config_.head_dim, scratch);
      } else {
        unit_.rows->attention(args[0], kv, out[0], config_.head_dim, scratch);
      }
    }
  });
}

// Tokens of one row share keys and values; tiles are small enough that every thread has many.
void Engine::tile_attention() {
  const int fewest = pool_.size() * kTilesPerThread;
  const int most = std::clamp(step_.tokens * config_.num_kv_heads / fewest, 1, kMaxAttentionTokens);
  const int count = unit_.rows->attention_tokens ? most : 1;
  attention_tiles_.clear();
  int64_t positions = 0;
  for (int row = 0; row < step_.rows; row++) {
    const int end = step_.row_starts[row + 1];
    for (int token = step_.row_starts[row]; token < end; token += count) {
      attention_tiles_.push_back({token, std::min(count, end - token)});
    }
    for (int token = step_.row_starts[row]; token < end; token++) positions += step_.positions[token] + 1;
  }
  // Behind long contexts one item at a time: whoever took several last would keep the other threads waiting in every layer.
  const int tiles = (int)attention_tiles_.size();
  attention_piece_ = std::clamp((int)(kPiecePositions * tiles / positions), 1, piece(tiles * config_.num_kv_heads));
}

void Engine::attention_by_chunks(const Op& op, WorkCounter& work, WorkCounter& merge, float* scratch) {
  const int kv_heads = config_.num_kv_heads, items = step_.tokens * kv_heads, chunks = max_chunks_;
  const int group = config_.num_heads / kv_heads;
  const size_t partial = attention_partial_floats(config_.head_dim);
  const KvView& kv = kv_.layer(op.layer);
  pool_.share(work, items * chunks, 1, [&](int i, int) {
    const int item = i / chunks, chunk = i % chunks, token = item / kv_heads;
    const AttentionArgs args = attention_args(op, token, item % kv_heads);
    float* out = partials_.as<float>() + (size_t)i * group * partial;
    const bool reached = (int64_t)chunk * kAttentionChunk <= args.position;
    present_[i] = reached && unit_.rows->attention_chunk(args, kv, chunk, out, scratch);
  });
  pool_.share(merge, items * group, 1, [&](int i, int) {
    const int item = i / group, head = i % group, token = item / kv_heads, kv_head = item % kv_heads;
    std::vector<const float*> parts(chunks);
    for (int chunk = 0; chunk < chunks; chunk++) {
      parts[chunk] = partials_.as<float>() + (((size_t)item * chunks + chunk) * group + head) * partial;
    }
    float* out = buffers_[op.out].row(token) + ((size_t)kv_head * group + head) * config_.head_dim;
    unit_.rows->attention_merge(parts.data(), &present_[(size_t)item * chunks], chunks, config_.head_dim, out);
  });
}

}  // namespace isobatch
