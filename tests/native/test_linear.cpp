// Linear layers, quantised and dense, and embeddings: every table against the reference.
#include "activations.h"
#include "check.h"
#include "contract.h"
#include "random_weights.h"
#include "tables.h"

namespace isobatch::testing {
namespace {

constexpr int kRows[] = {1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 23, 25};
constexpr int kOutputs[] = {1, 3, 4, 5, 8, 15, 16, 17, 24, 29, 31, 32, 33, 40, 50, 65};

// Epilogue operands and results with gaps between rows that nobody may touch.
struct Output {
  std::vector<float> y, bias, residual;
  LinearOutput view{};

  Output(Random& random, int M, int N) {
    view.stride = N + random.below(4);
    view.residual_stride = N + random.below(4);
    y.assign(M * view.stride, 7.5f);
    bias = random_values(random, N, 1);
    residual = random_values(random, (int)(M * view.residual_stride), 1);
    if (random.once_in(2)) view.bias = bias.data();
    if (random.once_in(2)) view.residual = residual.data();
    view.plus_zero = random.once_in(2);
    view.y = y.data();
  }
  Output(const Output&) = delete;
};

// Tiles in one or two calls, as threads share them.
template <class Run>
void in_parts(Random& random, int tiles, Run&& run) {
  const int cut = random.below(tiles + 1);
  run(0, cut);
  run(cut, tiles);
}

struct Shape {
  int bits, group, A, limit;
};

void quantized_case(Random& random, ThreadPool& pool, const LinearOps* ops, bool flush, const Shape& shape) {
  const int N = random.pick(kOutputs), K = shape.group * (1 + random.below(shape.group == 16 ? 13 : 6)), M = random.pick(kRows);
  const bool half = random.once_in(2);
  const RandomWeight matrix(random, N, K, shape.bits, shape.group, half, !random.once_in(4));
  const int b = shape.group < shape.A ? shape.group : shape.A;
  Arena arena;
  const auto plain = pack_quantized({matrix.source}, b, true, arena, pool);
  const auto packed = pack_quantized({matrix.source}, b, false, arena, pool);
  const int P = ops->panel(M);
  Activations natural(K, shape.A, M, P, ActFormat::kInt16, b < shape.A, shape.limit),
      other(K, shape.A, M, P, ops->format_of(shape.limit), b < shape.A, shape.limit);
  for (int m = 0; m < M; m++) {
    const std::vector<float> x = random_row(random, K);
    reference_row_ops()->quantize(x.data(), natural.view, m);
    reference_row_ops()->quantize(x.data(), other.view, m);
    other.encode_row(m);
  }
  Output expected(random, M, N);
  reference_linear_ops()->quantized(plain->view, natural.view, expected.view, 0, 1);
  std::vector<float> y(expected.y.size(), 7.5f);
  LinearOutput out = expected.view;
  out.y = y.data();
  ScopedFloatMode mode(flush);
  in_parts(random, packed->view.tiles,
           [&](int begin, int end) { ops->quantized_of(shape.limit)(packed->view, other.view, out, begin, end); });
  expect(same_bits(expected.y, y), std::string(ops->name) + (flush ? " flushed " : " ") + std::to_string(shape.bits) +
                                       " bits in groups of " + std::to_string(shape.group) + " with blocks of " +
                                       std::to_string(shape.A) + " up to " + std::to_string(shape.limit) + ", " + std::to_string(K) + " to " + std::to_string(N) +
                                       ", rows " + std::to_string(M));
  std::vector<float> row(K), expected_row(K);
  const int id = random.below(N);
  embed_quantized(plain->view, id, expected_row.data());
  embed_quantized(packed->view, id, row.data());
  expect(same_bits(expected_row, row), "embedding of " + std::to_string(shape.bits) + " bits");
}

void dense_case(Random& random, const LinearOps* ops, bool flush) {
  const int N = random.pick(kOutputs), K = 1 + random.below(150), M = random.pick(kRows);
  const bool bfloat = random.once_in(2);
  const std::vector<uint16_t> values = random_dense(random, N, K, bfloat);
  const DenseSource source{N, K, bfloat, values.data()};
  Arena arena;
  const auto plain = pack_dense({source}, true, arena), packed = pack_dense({source}, false, arena);
  std::vector<float> x, scaled((size_t)M * K), powers(M);
  for (int m = 0; m < M; m++) {
    const std::vector<float> row = random_row(random, K);
    x.insert(x.end(), row.begin(), row.end());
  }
  Output expected(random, M, N);
  reference_linear_ops()->dense(plain->view, x.data(), nullptr, M, expected.view, 0, 1);
  std::vector<float> y(expected.y.size(), 7.5f);
  LinearOutput out = expected.view;
  out.y = y.data();
  ScopedFloatMode mode(flush);
  for (int m = 0; m < M; m++) prepare_dense_row(&x[(size_t)m * K], K, bfloat, &scaled[(size_t)m * K], &powers[m]);
  in_parts(random, packed->view.tiles,
           [&](int begin, int end) { ops->dense(packed->view, scaled.data(), powers.data(), M, out, begin, end); });
  expect(same_bits(expected.y, y), std::string(ops->name) + (flush ? " flushed " : " ") + (bfloat ? "bf16 " : "fp16 ") +
                                       std::to_string(K) + " to " + std::to_string(N) + ", rows " + std::to_string(M));
}

}  // namespace

void test_linear() {
  Random random(5);
  ThreadPool pool(1);
  for (const LinearOps* ops : linear_tables()) {
    for (bool flush : {false, true}) {
      for (int bits = 2; bits <= 8; bits++) {
        for (int group : {16, 32, 64, 128}) {
          for (int A : {32, 64}) {
            // Blocks of 64 are for groups that are multiples of 64.
            if (A == 64 && group < 64) continue;
            if (group == 16 && bits % 2 != 0) continue;  // rows fill whole words
            for (int i = 0; i < 4; i++) {
              quantized_case(random, pool, ops, flush, {bits, group, A, i % 2 ? kShortActivationMax : kActivationMax});
            }
          }
        }
      }
    }
  }
}

void test_dense() {
  Random random(6);
  for (const LinearOps* ops : linear_tables()) {
    for (bool flush : {false, true}) {
      for (int i = 0; i < 40; i++) dense_case(random, ops, flush);
    }
  }
}

}  // namespace isobatch::testing
