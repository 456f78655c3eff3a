// Attention over the paged cache, whole and by chunks: every table against the reference.
#include "check.h"
#include "contract.h"
#include "tables.h"

namespace isobatch::testing {
namespace {

// One sequence in a cache whose other places hold NaN, so that whatever reads them is seen.
struct AttentionCase {
  int kv_heads, blocks;
  KvView kv{};
  AttentionArgs args{};
  std::vector<uint16_t> keys, values;
  std::vector<int32_t> table;
  std::vector<float> q;

  explicit AttentionCase(Random& random) {
    static const int kHeadDims[] = {2, 6, 16, 24, 64, 80, 128};
    static const int kPositions[] = {0, 1, 15, 16, 31, 40, 200, 254, 255, 256, 257, 300, 511, 512, 530};
    const int head_dim = random.pick(kHeadDims);
    kv_heads = 1 + random.below(3);
    args.position = random.pick(kPositions);
    blocks = args.position / kCacheBlock + 1;
    args.group = 1 + random.below(9);
    args.kv_head = random.below(kv_heads);
    args.first_visible = random.once_in(2) ? 0 : random.below(args.position + 1);
    kv = {kv_heads, head_dim, kCacheBlock, blocks + 2, nullptr, nullptr};
    keys.assign(kv.block_stride() * kv.num_blocks, 0x7e00);
    values = keys;
    kv.keys = keys.data();
    kv.values = values.data();
    const bool shared_factor = kv.num_blocks % 7 == 0;
    for (int i = 0; i < blocks; i++) table.push_back(shared_factor ? kv.num_blocks - 1 - i : (7 * i + 3) % kv.num_blocks);
    args.block_table = table.data();
    for (int j = args.first_visible; j <= args.position; j++) {
      const size_t base = table[j / kCacheBlock] * kv.block_stride() + args.kv_head * kv.head_stride();
      for (int d = 0; d < head_dim; d++) {
        keys[base + d * kCacheBlock + j % kCacheBlock] = random_half(random);
        values[base + (size_t)(j % kCacheBlock) * head_dim + d] = random_half(random);
      }
    }
    args.q_stride = head_dim + random.below(3);
    q = random_values(random, args.q_stride * args.group, random.once_in(3) ? 0x1p-20f : 0.5f);
    for (float& v : q) v = flush_below(random.once_in(10) ? 0x1p-63f * v : v, kQueryFloor);
    args.q = q.data();
  }
};

void attention_case(Random& random, const RowOps* ops, bool flush) {
  const AttentionCase c(random);
  const int group = c.args.group, dim = c.kv.head_dim, stride = dim + random.below(2);
  std::vector<float> expected((size_t)group * stride, 7.5f), got = expected, merged = expected;
  std::vector<float> scratch(attention_scratch_floats(group, dim));
  reference_row_ops()->attention(c.args, c.kv, expected.data(), stride, nullptr);
  ScopedFloatMode mode(flush);
  ops->attention(c.args, c.kv, got.data(), stride, scratch.data());
  const std::string what = std::string(ops->name) + (flush ? " flushed" : "") + " attention at " +
                           std::to_string(c.args.position) + " from " + std::to_string(c.args.first_visible) + " heads of " +
                           std::to_string(dim);
  expect(same_bits(expected, got), what);

  const int chunks = c.args.position / kAttentionChunk + 1;
  const size_t partial = attention_partial_floats(dim);
  std::vector<std::vector<float>> partials(chunks, std::vector<float>(partial * group));
  std::vector<uint8_t> present(chunks);
  for (int chunk = 0; chunk < chunks; chunk++) {
    present[chunk] = ops->attention_chunk(c.args, c.kv, chunk, partials[chunk].data(), scratch.data());
  }
  for (int h = 0; h < group; h++) {
    std::vector<const float*> of_head(chunks);
    for (int chunk = 0; chunk < chunks; chunk++) of_head[chunk] = partials[chunk].data() + h * partial;
    ops->attention_merge(of_head.data(), present.data(), chunks, dim, &merged[(size_t)h * stride]);
  }
  expect(same_bits(expected, merged), what + " by chunks");
}

}  // namespace

void test_attention() {
  Random random(3);
  for (const RowOps* ops : row_tables()) {
    for (bool flush : {false, true}) {
      for (int i = 0; i < 60; i++) attention_case(random, ops, flush);
    }
  }
}

}  // namespace isobatch::testing
