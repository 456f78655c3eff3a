// Linear layers: repacked weights and one kernel table per instruction set. All tables give the same bits.
#pragma once
#include "contract.h"
#include "row_ops.h"
#include "views.h"

namespace isobatch {

constexpr int kTileOutputs = 32;
constexpr int kMaxPanelRows = 16;

// Rows of a panel (ActView::P) for M rows: panels of nearly equal size, because a kernel's speed comes from the rows that
// share a decoded weight. Measured: about 10 rows a panel are best, but 15 in one panel still beat 8 and 7.
static inline int panel_rows(int M) {
  if (M < kMaxPanelRows) return M < 1 ? 1 : M;
  const int panels = (M + 11) / 12;
  return (M + panels - 1) / panels;
}
// The same where panels have at most `most` rows, 1 to kMaxPanelRows.
static inline int panel_rows(int M, int most) {
  const int panels = M < 1 ? 1 : (M + most - 1) / most;
  return M < 1 ? 1 : (M + panels - 1) / panels;
}

// How a weight's integer is stored.
enum class WeightCode : int32_t {
  kNibble = 0,       // up to 4 bits, two to a byte
  kByte = 1,         // 5 to 7 bits
  kByteCentred = 2,  // 8 bits, stored plus 128: the contract's integer is the byte minus 128
};
enum class FloatStorage : int32_t { kNone = 0, kHalf = 1, kSingle = 2 };

// Weights of N outputs cut in tiles of 32 outputs and sub-blocks of b inputs (b = min(G, A)). A tile's sub-blocks follow
// one another, each one contiguous record:
//   quants of outputs 0..15 | quants of outputs 16..31 | 32 scales | 32 biases (or none, where all are +0)
// Inside the quants of 16 outputs, output n and input k of the sub-block are
//   nibble: byte 64*(k/8) + 4*n + k%4, the low half for k%8 < 4, else the high half
//   byte:   byte 64*(k/4) + 4*n + k%4
// Outputs past N are zero. Records are 64-byte aligned.
struct PackedView {
  int32_t N, K, G, b, NB, tiles;
  WeightCode code;
  FloatStorage scale_storage, bias_storage;
  size_t half_bytes, scale_offset, bias_offset, record_bytes;
  const uint8_t* data;
  const void* plain;  // reference::Weights; kept for the reference alone, which has no records
  const uint8_t* record(int tile, int j) const { return data + ((size_t)tile * NB + j) * record_bytes; }
};

// An unquantised matrix in tiles of 32 outputs: 16-bit values [tile][k][32], entries below the floor already +0.
struct DenseView {
  int32_t N, K, tiles;
  bool bfloat;           // else half
  const uint16_t* data;
  const void* plain;     // (N, K) floats; kept for the reference alone
};

// Where results go: y[m*stride + n] = sum, + bias[n], + residual[m*residual_stride + n], + 0.0f, each where present.
struct LinearOutput {
  float* y;
  size_t stride;
  const float* bias;
  const float* residual;  // may be y
  size_t residual_stride;
  bool plus_zero;
};

// All rows of x for the outputs of tiles [tile_begin, tile_end).
using QuantizedFn = void (*)(const PackedView& w, const ActView& x, const LinearOutput& out, int tile_begin, int tile_end);

struct LinearOps {
  const char* name;
  // Of activations of 12 and of 8 bits: the format that is read, and the kernel.
  ActFormat format, short_format;
  QuantizedFn quantized, short_quantized;
  // x: (M, K) rows prepared by prepare_dense_row, whose powers are in `powers`.
  void (*dense)(const DenseView& w, const float* x, const float* powers, int M, const LinearOutput& out, int tile_begin,
                int tile_end);

  // Rows of a panel for M rows.
  int (*panel)(int M) = panel_rows;

  ActFormat format_of(int limit) const { return limit == kShortActivationMax ? short_format : format; }
  QuantizedFn quantized_of(int limit) const { return limit == kShortActivationMax ? short_quantized : quantized; }
};

// Scales a row by a power of two, rounds it to the weight's type and floors it. Writes the power that undoes the scaling.
// Returns false for a non-finite row, which is then zero.
bool prepare_dense_row(const float* x, int K, bool bfloat, float* scaled, float* power);

// The reference as tables (reference.h): plain weights, one tile, int16 activations.
const LinearOps* reference_linear_ops();
const RowOps* reference_row_ops();
const LinearOps* scalar_linear_ops();
// Null where not compiled in.
const LinearOps* avx2_linear_ops();
const LinearOps* avx512_linear_ops();
QuantizedFn avx512_short_quantized();
const LinearOps* amx_linear_ops();
const LinearOps* neon_linear_ops();
const LinearOps* neon_dotprod_linear_ops();

}  // namespace isobatch
