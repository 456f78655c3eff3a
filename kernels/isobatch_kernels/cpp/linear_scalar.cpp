// Linear layers in portable C++: integers as floats, exact below 2^24, so that compilers can use any vector unit.
#include "dense_impl.h"
#include "half.h"
#include "linear.h"

namespace isobatch {
namespace {

// The integers of one record, [input of the sub-block][output of the tile].
void decode_record(const PackedView& w, const uint8_t* record, float (*tile)[kTileOutputs]) {
  for (int half = 0; half < 2; half++) {
    const uint8_t* quants = record + half * w.half_bytes;
    for (int k = 0; k < w.b; k++) {
      float* row = tile[k] + 16 * half;
      if (w.code == WeightCode::kNibble) {
        const uint8_t* at = quants + 64 * (k / 8) + k % 4;
        const int shift = k % 8 < 4 ? 0 : 4;
        for (int n = 0; n < 16; n++) row[n] = (float)(at[4 * n] >> shift & 15);
      } else {
        const uint8_t* at = quants + 64 * (k / 4) + k % 4;
        const int centre = w.code == WeightCode::kByteCentred ? 128 : 0;
        for (int n = 0; n < 16; n++) row[n] = (float)(at[4 * n] - centre);
      }
    }
  }
}

void load_floats(FloatStorage storage, const uint8_t* at, float* values) {
  for (int n = 0; n < kTileOutputs; n++) {
    if (storage == FloatStorage::kNone) {
      values[n] = 0.0f;
    } else if (storage == FloatStorage::kSingle) {
      std::memcpy(&values[n], at + 4 * n, 4);
    } else {
      uint16_t half;
      std::memcpy(&half, at + 2 * n, 2);
      values[n] = half_to_float(half);
    }
  }
}

float sub_block_sum(const ActView& x, size_t index, int b, int half) {
  if (b == x.A) return x.s[index];
  return half == 0 ? x.s_low[index] : x.s_high[index];
}

void store_row(const PackedView& w, const LinearOutput& out, int tile, int m, const float* sums) {
  const int n0 = tile * kTileOutputs, count = w.N - n0 < kTileOutputs ? w.N - n0 : kTileOutputs;
  float* y = out.y + m * out.stride + n0;
  for (int n = 0; n < count; n++) {
    float v = sums[n];
    if (out.bias) v = v + out.bias[n0 + n];
    if (out.residual) v = v + out.residual[m * out.residual_stride + n0 + n];
    y[n] = out.plus_zero ? v + 0.0f : v;
  }
}

// One tile for the rows of one panel; each record is decoded once.
void panel_tile(const PackedView& w, const ActView& x, const LinearOutput& out, int tile, int panel) {
  const int first = panel * x.P, rows = x.M - first < x.P ? x.M - first : x.P, parts = x.A / w.b;
  float integers[64][kTileOutputs], scales[kTileOutputs], biases[kTileOutputs];
  float chain[kMaxPanelRows][kTileOutputs], total[kMaxPanelRows][kTileOutputs];
  bool started = false;
  for (int slice = 0; slice < kSlices; slice++) {
    const int begin = slice_begin(slice, w.NB), end = slice_begin(slice + 1, w.NB);
    if (begin == end) continue;
    std::memset(chain, 0, sizeof chain);
    for (int j = begin; j < end; j++) {
      const uint8_t* record = w.record(tile, j);
      decode_record(w, record, integers);
      load_floats(w.scale_storage, record + w.scale_offset, scales);
      load_floats(w.bias_storage, record + w.bias_offset, biases);
      for (int r = 0; r < rows; r++) {
        const size_t index = x.block_index(first + r, j / parts);
        const uint8_t* q = x.q + index * 2 * x.A + (size_t)(j % parts) * w.b * 2;
        float dot[kTileOutputs] = {};
        for (int k = 0; k < w.b; k++) {
          int16_t value;
          std::memcpy(&value, q + 2 * k, 2);
          const float factor = (float)value;
          for (int n = 0; n < kTileOutputs; n++) dot[n] += factor * integers[k][n];
        }
        const float s = sub_block_sum(x, index, w.b, j % parts), d = x.d[index];
        for (int n = 0; n < kTileOutputs; n++) {
          chain[r][n] = std::fma(d, std::fma(scales[n], dot[n], biases[n] * s), chain[r][n]);
        }
      }
    }
    for (int r = 0; r < rows; r++) {
      for (int n = 0; n < kTileOutputs; n++) total[r][n] = started ? total[r][n] + chain[r][n] : chain[r][n];
    }
    started = true;
  }
  for (int r = 0; r < rows; r++) store_row(w, out, tile, first + r, total[r]);
}

void quantized(const PackedView& w, const ActView& x, const LinearOutput& out, int tile_begin, int tile_end) {
  const int panels = (x.M + x.P - 1) / x.P;
  for (int tile = tile_begin; tile < tile_end; tile++) {
    for (int panel = 0; panel < panels; panel++) panel_tile(w, x, out, tile, panel);
  }
}

}  // namespace

const LinearOps* scalar_linear_ops() {
  static const LinearOps ops{"scalar", ActFormat::kInt16, ActFormat::kInt16, quantized, quantized, dense_tiles};
  return &ops;
}

}  // namespace isobatch
