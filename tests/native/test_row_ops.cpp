// Norm, SwiGLU, quantisation, RoPE and writes to the cache: every table against the reference.
#include "activations.h"
#include "check.h"
#include "contract.h"
#include "rope_table.h"
#include "tables.h"

namespace isobatch::testing {
namespace {

constexpr int kWidths[] = {1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 160, 255, 256, 257, 300, 576, 1100};
constexpr ActFormat kFormats[] = {ActFormat::kInt16, ActFormat::kInt16Shuffled, ActFormat::kHalves, ActFormat::kBytes};

std::string describe(const RowOps* ops, bool flush, const char* op, int a, int b) {
  return std::string(ops->name) + (flush ? " flushed " : " ") + op + " " + std::to_string(a) + " " + std::to_string(b);
}

struct RowInputs {
  std::vector<float> x, weight, gate, up;
};

// One row through one of the three ways to quantised values.
void quantize_row(const RowOps* ops, int way, const RowInputs& in, const ActView& view, int m) {
  if (way == 0) ops->quantize(in.x.data(), view, m);
  if (way == 1) ops->norm_quantize(in.x.data(), in.weight.data(), 1e-5f, view, m);
  if (way == 2) ops->gate_quantize(in.gate.data(), in.up.data(), view, m);
}

void quantize_case(Random& random, const RowOps* ops, bool flush, int width, int A, ActFormat format) {
  const int P = 1 + random.below(16), M = 1 + random.below(2 * P), m = random.below(M), way = random.below(3);
  const bool half_sums = A == 32 && random.once_in(2);
  RowInputs in{random_row(random, width), random_values(random, width, 2), random_row(random, width), random_row(random, width)};
  const bool spoiled = way == 0 && random.once_in(5);
  if (spoiled) spoil(random, in.x);
  const int limit = format == ActFormat::kBytes || random.once_in(3) ? kShortActivationMax : kActivationMax;
  Activations expected(width, A, M, P, format, half_sums, limit), got(width, A, M, P, format, half_sums, limit);
  quantize_row(reference_row_ops(), way, in, expected.view, m);
  expected.encode_row(m);
  {
    ScopedFloatMode mode(flush);
    quantize_row(ops, way, in, got.view, m);
  }
  const std::string what = describe(ops, flush, "quantize", width, (int)format) + " up to " + std::to_string(limit);
  if (expected.non_finite[m] != 0) {
    expect(got.non_finite == expected.non_finite, what + " of a row that is not finite");
  } else {
    expect(got.equals(expected), what + " by way " + std::to_string(way));
  }
}

void plain_case(Random& random, const RowOps* ops, bool flush, int width) {
  const std::vector<float> x = random_row(random, width), up = random_row(random, width), w = random_values(random, width, 2);
  std::vector<float> expected(width), got(width);
  reference_row_ops()->norm(x.data(), w.data(), 1e-6f, width, expected.data());
  {
    ScopedFloatMode mode(flush);
    ops->norm(x.data(), w.data(), 1e-6f, width, got.data());
  }
  bool finite = true;  // the squares of a row may overflow: its bits are then nobody's promise
  for (float v : expected) finite = finite && magnitude_bits(v) < kNonFiniteBits;
  expect(!finite || same_bits(expected, got), describe(ops, flush, "norm", width, 0));
  reference_row_ops()->gate(x.data(), up.data(), width, expected.data());
  {
    ScopedFloatMode mode(flush);
    ops->gate(x.data(), up.data(), width, got.data());
  }
  // A product of two tiny numbers may be subnormal here; consumers floor it.
  for (std::vector<float>* row : {&expected, &got}) {
    for (float& v : *row) v = flush_below(v, kInputFloor);
  }
  expect(same_bits(expected, got), describe(ops, flush, "gate", width, 0));
}

struct RopeCase {
  int heads, head_dim, position;
  RopeArgs rope;
  std::vector<float> table;

  explicit RopeCase(Random& random) {
    static const int kHeadDims[] = {2, 4, 6, 10, 16, 24, 32, 64, 80, 128};
    heads = 1 + random.below(4);
    head_dim = random.pick(kHeadDims);
    const int rotary_dim = random.once_in(3) ? 2 + random.below(head_dim / 2) * 2 : head_dim, positions = 12;
    position = random.below(positions);
    table.resize((size_t)positions * rotary_dim);
    build_rope_table(table.data(), positions, rotary_dim, 10000.0, nullptr, 1.0);
    rope = {table.data(), rotary_dim, random.once_in(2)};
  }
};

void query_case(Random& random, const RowOps* ops, bool flush) {
  const RopeCase c(random);
  std::vector<float> expected = random_row(random, c.heads * c.head_dim);
  if (random.once_in(6)) spoil(random, expected);
  std::vector<float> got = expected;
  const bool finite = reference_row_ops()->rope_query(expected.data(), c.heads, c.head_dim, 0.125f, c.rope, c.position);
  ScopedFloatMode mode(flush);
  const bool says = ops->rope_query(got.data(), c.heads, c.head_dim, 0.125f, c.rope, c.position);
  expect(says == finite && (!finite || same_bits(expected, got)), describe(ops, flush, "rope_query", c.heads, c.head_dim));
}

void write_case(Random& random, const RowOps* ops, bool flush) {
  const RopeCase c(random);
  constexpr int kBlocks = 3;
  std::vector<float> k = random_row(random, c.heads * c.head_dim), v = random_row(random, c.heads * c.head_dim);
  for (float& value : v) {  // every kind of fp16, with ties and numbers past the largest
    if (random.once_in(3)) value = random.uniform(-1, 1) * (random.once_in(2) ? 0x1p-13f : 0x1p-22f);
    if (random.once_in(9)) value = (float)(2 * random.below(2048) + 1) * 0x1p-25f;
    if (random.once_in(30)) value = random.once_in(2) ? 65519.9f : -65520.0f;
  }
  const bool spoiled = random.once_in(6);
  if (spoiled) spoil(random, random.once_in(2) ? k : v);
  KvView kv{c.heads, c.head_dim, kCacheBlock, kBlocks, nullptr, nullptr};
  const int block = random.below(kBlocks), slot = random.below(kCacheBlock);
  std::vector<uint16_t> caches[2][2];
  bool finite[2];
  for (int i = 0; i < 2; i++) {
    for (std::vector<uint16_t>& cache : caches[i]) cache.assign(kv.block_stride() * kBlocks, 0x3abc);
    kv.keys = caches[i][0].data();
    kv.values = caches[i][1].data();
    ScopedFloatMode mode(i == 1 && flush);
    finite[i] = (i == 0 ? reference_row_ops() : ops)->write_kv(k.data(), v.data(), c.rope, c.position, kv, block, slot);
  }
  const std::string what = describe(ops, flush, "write_kv", c.heads, c.head_dim);
  expect(finite[0] == finite[1], what + " finite");
  if (finite[0]) {
    expect(same_bits(caches[0][0], caches[1][0]) && same_bits(caches[0][1], caches[1][1]), what);
    return;
  }
  bool clean = true;
  for (const std::vector<uint16_t>& cache : caches[1]) {
    for (uint16_t h : cache) clean = clean && (h & 0x7fffu) < 0x7c00u;
  }
  expect(clean, what + " never caches NaN or infinity");
}

}  // namespace

void test_quantize() {
  Random random(1);
  for (const RowOps* ops : row_tables()) {
    for (bool flush : {false, true}) {
      for (int width : kWidths) {
        plain_case(random, ops, flush, width);
        for (int A : {32, 64}) {
          for (ActFormat format : kFormats) {
            for (int i = 0; i < 3; i++) quantize_case(random, ops, flush, width, A, format);
          }
        }
      }
    }
  }
}

void test_rope() {
  Random random(2);
  for (const RowOps* ops : row_tables()) {
    for (bool flush : {false, true}) {
      for (int i = 0; i < 150; i++) {
        query_case(random, ops, flush);
        write_case(random, ops, flush);
      }
    }
  }
}

}  // namespace isobatch::testing
