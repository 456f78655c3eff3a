// Float linear layers of the classes for comparison (docs/numerics.md section 8): what engines do that multiply fp16
// activations with dequantised weights. Two kernels whose sums round differently; each gives one row the same bits
// whatever the other rows are, and the same bits on every instruction set.
#pragma once
#include "linear.h"

namespace isobatch {

enum class LinearPolicy : int32_t { kExact, kGemv, kGemm, kThreshold };

constexpr int kFloatInputs = 128;    // inputs of a block of the GEMM
constexpr int kDenseSubBlock = 64;   // inputs of a partial sum of the GEMV on 16-bit matrices
constexpr int kSumInputs = 16;       // inputs of one entry of FloatRows::sums
constexpr int kFloatPanel = 12;      // most rows of a panel, over all instruction sets
constexpr float kLargestHalf = 65504.0f;

// Activations of M rows, rounded to fp16 and held as fp32. Element k of row m is at x[((m / P) * K + k) * P + m % P].
struct FloatRows {
  int32_t K, M, P;
  float* x;
  float* sums;  // (M, K / 16): sums of 16 elements; only for the GEMV on quantised weights
  float* row(int m) const { return x + (size_t)(m / P) * K * P + m % P; }
  float* row_sums(int m) const { return sums + (size_t)m * (K / kSumInputs); }
};

// Rows of a panel for M rows: as many as `most` at once, panels of nearly equal size.
static inline int float_panel_rows(int M, int most) {
  if (M < 1) return 1;
  const int panels = (M + most - 1) / most;
  return (M + panels - 1) / panels;
}

struct FloatLinearOps {
  int panel_rows;  // rows that share a decoded weight in the GEMM
  // Rounds row m; false for a non-finite row, which becomes zero.
  bool (*prepare)(const float* x, const FloatRows& out, int m);
  // All rows for the outputs of tiles [tile_begin, tile_end). The GEMV takes P == 1.
  void (*gemv)(const PackedView& w, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end);
  void (*gemm)(const PackedView& w, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end);
  void (*dense_gemv)(const DenseView& w, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end);
  void (*dense_gemm)(const DenseView& w, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end);
};

const FloatLinearOps* reference_float_ops();
const FloatLinearOps* scalar_float_ops();
// Null where not compiled in.
const FloatLinearOps* avx2_float_ops();
const FloatLinearOps* avx512_float_ops();
const FloatLinearOps* neon_float_ops();

}  // namespace isobatch
