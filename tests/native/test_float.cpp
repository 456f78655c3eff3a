// Float linear layers: both kernels of every table against the reference, quantised and dense.
#include "check.h"
#include "random_weights.h"
#include "tables.h"

namespace isobatch::testing {
namespace {

constexpr int kRows[] = {1, 2, 3, 5, 6, 7, 12, 13, 25, 97};
constexpr int kOutputs[] = {1, 3, 8, 15, 17, 31, 32, 33, 50, 65};

std::vector<float> random_rows(Random& random, int M, int K) {
  std::vector<float> x;
  for (int m = 0; m < M; m++) {
    const std::vector<float> row = random_row(random, K);
    x.insert(x.end(), row.begin(), row.end());
  }
  if (random.once_in(6)) {
    std::vector<float> row(x.begin(), x.begin() + K);
    spoil(random, row);
    std::copy(row.begin(), row.end(), x.begin());
  }
  return x;
}

struct Result {
  std::vector<float> y;
  std::vector<uint8_t> finite;
};

// One layer of N outputs on rows of K inputs; run(rows, out) multiplies.
template <class Run>
Result layer(const FloatLinearOps* ops, const std::vector<float>& x, int N, int K, bool gemv, bool sums, bool plus_zero, Run&& run) {
  const int M = (int)(x.size() / K), P = gemv ? 1 : float_panel_rows(M, ops->panel_rows);
  std::vector<float> rounded((size_t)(M + kFloatPanel) * K), sum16((size_t)(M + kFloatPanel) * (K / kSumInputs + 1));
  const FloatRows rows{K, M, P, rounded.data(), sums ? sum16.data() : nullptr};
  Result result{std::vector<float>((size_t)M * N, 7.5f), std::vector<uint8_t>(M)};
  for (int m = 0; m < M; m++) result.finite[m] = ops->prepare(&x[(size_t)m * K], rows, m);
  // In place: the residual is what the rows hold.
  run(rows, LinearOutput{result.y.data(), (size_t)N, nullptr, result.y.data(), (size_t)N, plus_zero});
  return result;
}

void quantized_case(Random& random, ThreadPool& pool, const FloatLinearOps* ops, const char* unit, int bits, int group, bool gemv) {
  const int N = random.pick(kOutputs), K = group * (1 + random.below(group == 16 ? 13 : 6)), M = random.pick(kRows);
  const RandomWeight matrix(random, N, K, bits, group, random.once_in(2), !random.once_in(4));
  const int b = group < 64 ? group : 64;
  Arena arena;
  const auto plain = pack_quantized({matrix.source}, b, true, arena, pool), packed = pack_quantized({matrix.source}, b, false, arena, pool);
  const std::vector<float> x = random_rows(random, M, K);
  const bool plus_zero = random.once_in(2);
  const FloatLinearOps* reference = reference_float_ops();
  const Result expected = layer(reference, x, N, K, gemv, gemv, plus_zero, [&](const FloatRows& rows, const LinearOutput& out) {
    (gemv ? reference->gemv : reference->gemm)(plain->view, rows, out, 0, 1);
  });
  const int cut = random.below(packed->view.tiles + 1);
  const Result got = layer(ops, x, N, K, gemv, gemv, plus_zero, [&](const FloatRows& rows, const LinearOutput& out) {
    (gemv ? ops->gemv : ops->gemm)(packed->view, rows, out, 0, cut);
    (gemv ? ops->gemv : ops->gemm)(packed->view, rows, out, cut, packed->view.tiles);
  });
  expect(same_bits(expected.y, got.y) && same_bits(expected.finite, got.finite),
         std::string(unit) + (gemv ? " gemv " : " gemm ") + std::to_string(bits) + " bits in groups of " + std::to_string(group) + ", " +
             std::to_string(K) + " to " + std::to_string(N) + ", rows " + std::to_string(M));
}

void dense_case(Random& random, const FloatLinearOps* ops, const char* unit, bool gemv) {
  const int N = random.pick(kOutputs), K = 1 + random.below(300), M = random.pick(kRows);
  const bool bfloat = random.once_in(2);
  const std::vector<uint16_t> values = random_dense(random, N, K, bfloat);
  const DenseSource source{N, K, bfloat, values.data()};
  Arena arena;
  const auto plain = pack_dense({source}, true, arena), packed = pack_dense({source}, false, arena);
  const std::vector<float> x = random_rows(random, M, K);
  const FloatLinearOps* reference = reference_float_ops();
  const Result expected = layer(reference, x, N, K, gemv, false, false, [&](const FloatRows& rows, const LinearOutput& out) {
    (gemv ? reference->dense_gemv : reference->dense_gemm)(plain->view, rows, out, 0, 1);
  });
  const Result got = layer(ops, x, N, K, gemv, false, false, [&](const FloatRows& rows, const LinearOutput& out) {
    (gemv ? ops->dense_gemv : ops->dense_gemm)(packed->view, rows, out, 0, packed->view.tiles);
  });
  expect(same_bits(expected.y, got.y) && same_bits(expected.finite, got.finite),
         std::string(unit) + (gemv ? " gemv " : " gemm ") + (bfloat ? "bf16 " : "fp16 ") + std::to_string(K) + " to " + std::to_string(N) +
             ", rows " + std::to_string(M));
}

}  // namespace

void test_float() {
  Random random(9);
  ThreadPool pool(1);
  for (const char* unit : engine_units()) {
    const FloatLinearOps* ops = find_unit(unit).floats;
    expect(ops != nullptr, std::string(unit) + " has float kernels");
    for (bool gemv : {false, true}) {
      for (int bits = 2; bits <= 8; bits++) {
        for (int group : {16, 32, 64, 128}) {
          if (group == 16 && bits % 2 != 0) continue;  // rows fill whole words
          quantized_case(random, pool, ops, unit, bits, group, gemv);
        }
      }
      for (int i = 0; i < 12; i++) dense_case(random, ops, unit, gemv);
    }
  }
}

}  // namespace isobatch::testing
