// The reference behind the kernel table: whole matrices, row by row, on plain copies of the weights.
#include <vector>

#include "half.h"
#include "linear.h"
#include "reference.h"

namespace isobatch {
namespace {

// One tile stands for all outputs.
void quantized(const PackedView& w, const ActView& x, const LinearOutput& out, int tile_begin, int tile_end) {
  if (tile_begin >= tile_end) return;
  const int padded = x.NB * x.A;
  std::vector<int16_t> q(padded);
  std::vector<float> d(x.NB);
  for (int m = 0; m < x.M; m++) {
    for (int g = 0; g < x.NB; g++) {
      const size_t at = x.block_index(m, g);
      std::memcpy(&q[(size_t)g * x.A], x.q + at * 2 * x.A, 2 * (size_t)x.A);
      d[g] = x.d[at];
    }
    float* y = out.y + m * out.stride;
    reference::linear(*static_cast<const reference::Weights*>(w.plain), x.A, q.data(), d.data(), out.bias,
                      out.residual ? out.residual + m * out.residual_stride : nullptr, y);
    if (out.plus_zero) {
      for (int n = 0; n < w.N; n++) y[n] = y[n] + 0.0f;
    }
  }
}

// Rows arrive as they are: reference::dense_linear prepares them by itself (see prepare_dense).
void dense(const DenseView& w, const float* x, const float*, int M, const LinearOutput& out, int tile_begin, int tile_end) {
  if (tile_begin >= tile_end) return;
  for (int m = 0; m < M; m++) {
    float* y = out.y + m * out.stride;
    reference::dense_linear(static_cast<const float*>(w.plain), w.N, w.K, w.bfloat ? 1 : 0, x + (size_t)m * w.K, out.bias,
                            out.residual ? out.residual + m * out.residual_stride : nullptr, y);
    if (out.plus_zero) {
      for (int n = 0; n < w.N; n++) y[n] = y[n] + 0.0f;
    }
  }
}

}  // namespace

const LinearOps* reference_linear_ops() {
  static const LinearOps ops{"reference", ActFormat::kInt16, ActFormat::kInt16, quantized, quantized, dense};
  return &ops;
}

}  // namespace isobatch
