// The float linear layers in scalar code, written to be read beside docs/numerics.md section 8. Slow on purpose.
#include <cmath>

#include "linear_float.h"
#include "reference.h"

namespace isobatch {
namespace {

float to_half(float x) {
  const float rounded = reference::from_f16(reference::to_f16(x));  // saturates
  return std::fma(x, 0.0f, rounded);                                // what is not finite stays so
}

bool prepare(const float* x, const FloatRows& out, int m) {
  bool finite = true;
  for (int k = 0; k < out.K; k++) finite = finite && std::fabs(x[k]) <= 0x1p96f;
  for (int k = 0; k < out.K; k++) out.row(m)[(size_t)k * out.P] = finite ? to_half(x[k]) : 0.0f;
  for (int s = 0; out.sums && s < out.K / kSumInputs; s++) {
    float parts[4];
    for (int i = 0; i < 4; i++) {
      const float* at = out.row(m) + (size_t)(s * kSumInputs + i) * out.P;
      parts[i] = ((at[0] + at[(size_t)4 * out.P]) + at[(size_t)8 * out.P]) + at[(size_t)12 * out.P];
    }
    out.row_sums(m)[s] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  }
  return finite;
}

void finish(const LinearOutput& out, int m, int n, float sum) {
  float v = to_half(sum);
  if (out.bias) v = v + out.bias[n];
  if (out.residual) v = v + out.residual[m * out.residual_stride + n];
  out.y[m * out.stride + n] = out.plus_zero ? v + 0.0f : v;
}

// Four chains over inputs [begin, end), input begin + i in chain i % 4.
template <class Value>
float four_chains(const float* x, int begin, int end, const Value& value) {
  float chain[4] = {};
  for (int k = begin; k < end; k++) chain[(k - begin) % 4] = std::fma(x[k], value(k), chain[(k - begin) % 4]);
  return (chain[0] + chain[1]) + (chain[2] + chain[3]);
}

// One chain for each block of inputs; block sums add up in ascending order.
template <class Value>
float block_chains(const FloatRows& x, int m, const Value& value) {
  float total = 0.0f;
  for (int k0 = 0; k0 < x.K; k0 += kFloatInputs) {
    float chain = 0.0f;
    for (int k = k0; k < x.K && k < k0 + kFloatInputs; k++) chain = std::fma(x.row(m)[(size_t)k * x.P], value(k), chain);
    total = k0 == 0 ? chain : total + chain;
  }
  return total;
}

const reference::Weights& plain(const PackedView& w) { return *static_cast<const reference::Weights*>(w.plain); }

void gemv(const PackedView& view, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end) {
  if (tile_begin >= tile_end) return;  // one tile stands for all outputs
  const reference::Weights& w = plain(view);
  for (int m = 0; m < x.M; m++) {
    for (int n = 0; n < w.N; n++) {
      float total = 0.0f;
      for (int k0 = 0; k0 < w.K; k0 += view.b) {
        const size_t group = (size_t)n * (w.K / w.G) + k0 / w.G;
        const float dot = four_chains(x.row(m), k0, k0 + view.b, [&](int k) { return (float)w.q[(size_t)n * w.K + k]; });
        float sum = x.row_sums(m)[k0 / kSumInputs];
        for (int i = 1; i < view.b / kSumInputs; i++) sum = sum + x.row_sums(m)[k0 / kSumInputs + i];
        total = total + std::fma(w.scales[group], dot, w.biases[group] * sum);
      }
      finish(out, m, n, total);
    }
  }
}

void gemm(const PackedView& view, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end) {
  if (tile_begin >= tile_end) return;
  const reference::Weights& w = plain(view);
  for (int m = 0; m < x.M; m++) {
    for (int n = 0; n < w.N; n++) {
      finish(out, m, n, block_chains(x, m, [&](int k) {
               const size_t group = (size_t)n * (w.K / w.G) + k / w.G;
               return std::fma(w.scales[group], (float)w.q[(size_t)n * w.K + k], w.biases[group]);
             }));
    }
  }
}

void dense_gemv(const DenseView& w, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end) {
  if (tile_begin >= tile_end) return;
  const float* values = static_cast<const float*>(w.plain);
  for (int m = 0; m < x.M; m++) {
    for (int n = 0; n < w.N; n++) {
      float total = 0.0f;
      for (int k0 = 0; k0 < w.K; k0 += kDenseSubBlock) {
        const int end = k0 + kDenseSubBlock < w.K ? k0 + kDenseSubBlock : w.K;
        total = total + four_chains(x.row(m), k0, end, [&](int k) { return values[(size_t)n * w.K + k]; });
      }
      finish(out, m, n, total);
    }
  }
}

void dense_gemm(const DenseView& w, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end) {
  if (tile_begin >= tile_end) return;
  const float* values = static_cast<const float*>(w.plain);
  for (int m = 0; m < x.M; m++) {
    for (int n = 0; n < w.N; n++) finish(out, m, n, block_chains(x, m, [&](int k) { return values[(size_t)n * w.K + k]; }));
  }
}

}  // namespace

const FloatLinearOps* reference_float_ops() {
  static const FloatLinearOps ops{1, prepare, gemv, gemm, dense_gemv, dense_gemm};
  return &ops;
}

}  // namespace isobatch
