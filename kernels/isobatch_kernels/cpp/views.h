// Plain views that the engine passes to kernels. No ownership, no standard containers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace isobatch {

// How the integers of one activation block (A elements, 2*A bytes) are stored.
enum class ActFormat : int32_t {
  kInt16 = 0,          // A int16 in natural order (scalar, NEON)
  kInt16Shuffled = 1,  // A int16; inside each 8 the order is 0,2,4,6,1,3,5,7 (AVX2: what nibble shifts of words produce)
  kHalves = 2,         // A int8 `hi` = floor(q/16), then A int8 `lo` = q - 16*hi in 0..15 (VNNI)
  kBytes = 3,          // A int8, for integers of 8 bits; the other A bytes are not used (VNNI)
};

// Quantised activations of M rows. Rows are grouped in panels of P rows (1 to 16, the same for the whole step),
// so that the rows of a panel lie a constant 2*A bytes apart inside a block:
//   block (p, g, r) of row m = p*P + r is at q + ((p*NB + g)*P + r) * 2*A
//   d, s, and half sums of it are at index (p*NB + g)*P + r
// NB = ceil(K / A); elements past K are zero. Buffers are sized for whole panels; rows past M hold garbage.
struct ActView {
  int32_t K, A, NB, M, P;
  int32_t limit;       // the largest integer: kActivationMax, or kShortActivationMax for activations of 8 bits
  ActFormat format;
  bool half_sums;      // also fill s_low and s_high (A == 32 with a consumer of G == 16)
  uint8_t* q;
  float* d;
  float* s;            // float(sum of the block), exact
  float* s_low;        // float(sum of elements 0..15 of the block)
  float* s_high;       // float(sum of elements 16..31)
  uint32_t* non_finite;  // one word a row: 0, or 1 + op index of the first op that met a non-finite value
  uint32_t op_index;     // op to record
  size_t block_index(int m, int g) const { return ((size_t)(m / P) * NB + g) * P + m % P; }
};

// One layer's key/value cache. A block holds `block_size` positions (16) of all key/value heads:
//   keys   fp16 [num_blocks][num_kv_heads][head_dim][16]   transposed, so that 16 keys of one d are contiguous
//   values fp16 [num_blocks][num_kv_heads][16][head_dim]
struct KvView {
  int32_t num_kv_heads, head_dim, block_size, num_blocks;
  uint16_t* keys;
  uint16_t* values;
  size_t head_stride() const { return (size_t)head_dim * block_size; }
  size_t block_stride() const { return (size_t)num_kv_heads * head_dim * block_size; }
};

// Attention of one token for the query heads of one key/value head.
struct AttentionArgs {
  const float* q;            // (group, head_dim): roped and scaled queries, q_stride apart
  int32_t q_stride;          // floats between query heads
  int32_t group;             // query heads per key/value head
  const int32_t* block_table;  // blocks of the sequence
  int32_t kv_head;
  int32_t position;          // keys 0..position are visible
  int32_t first_visible;     // first visible position (0; larger for sliding windows)
};

// Partial result of one chunk for one query head: m, l, then o[head_dim].
static inline size_t attention_partial_floats(int head_dim) { return 2 + (size_t)head_dim; }

struct RopeArgs {
  const float* table;        // (positions, head_dim/2, 2): cos, sin
  int32_t rotary_dim;        // rotated leading dimensions of a head, even
  bool interleaved;          // pairs (2i, 2i+1); else (i, i + rotary_dim/2)
};

// What is wanted of one row of logits.
struct StatisticsArgs {
  bool normalizer, quantile;
  int32_t top_k;
  float inverse_temperature, u;
  const int32_t* edit_ids; const float* edit_values; int32_t num_edits;
};
struct StatisticsResult {
  int32_t argmax_id; float max_logit; float normalizer; int32_t quantile_id;
  int32_t* top_ids; float* top_logits; float* top_weights;  // top_k entries each, caller's memory
};

}  // namespace isobatch
