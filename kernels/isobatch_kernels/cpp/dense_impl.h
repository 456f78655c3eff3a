// Linear layers of 16-bit matrices, one ordered chain per output, vectorised over the 32 outputs of a tile. Included once
// by each instruction set's file, inside whose compiler flags the loops become vectors.
#pragma once
#include "half.h"
#include "linear.h"

namespace isobatch {
namespace {

constexpr int kDenseRows = 4;     // rows that share one widening of the weights
constexpr int kDenseChunk = 64;   // inputs widened at a time

void widen_dense(const DenseView& w, const uint16_t* values, int count, float* out) {
  if (w.bfloat) {
    for (int i = 0; i < count; i++) out[i] = bfloat_to_float(values[i]);
  } else {
    for (int i = 0; i < count; i++) out[i] = half_to_float(values[i]);
  }
}

void dense_rows(const DenseView& w, const float* x, const float* powers, int m0, int rows, const LinearOutput& out, int tile) {
  float chain[kDenseRows][kTileOutputs], total[kDenseRows][kTileOutputs], weights[kDenseChunk * kTileOutputs];
  const uint16_t* values = w.data + (size_t)tile * w.K * kTileOutputs;
  bool started = false;
  for (int slice = 0; slice < kSlices; slice++) {
    const int begin = slice_begin(slice, w.K), end = slice_begin(slice + 1, w.K);
    if (begin == end) continue;
    for (int r = 0; r < rows; r++) {
      for (int n = 0; n < kTileOutputs; n++) chain[r][n] = 0.0f;
    }
    for (int k0 = begin; k0 < end; k0 += kDenseChunk) {
      const int count = end - k0 < kDenseChunk ? end - k0 : kDenseChunk;
      widen_dense(w, values + (size_t)k0 * kTileOutputs, count * kTileOutputs, weights);
      for (int r = 0; r < rows; r++) {
        const float* row = x + (size_t)(m0 + r) * w.K + k0;
        for (int k = 0; k < count; k++) {
          const float* column = weights + k * kTileOutputs;
          for (int n = 0; n < kTileOutputs; n++) chain[r][n] = std::fma(row[k], column[n], chain[r][n]);
        }
      }
    }
    for (int r = 0; r < rows; r++) {
      for (int n = 0; n < kTileOutputs; n++) total[r][n] = started ? total[r][n] + chain[r][n] : chain[r][n];
    }
    started = true;
  }
  const int n0 = tile * kTileOutputs, outputs = w.N - n0 < kTileOutputs ? w.N - n0 : kTileOutputs;
  for (int r = 0; r < rows; r++) {
    const int m = m0 + r;
    for (int n = 0; n < outputs; n++) {
      float v = total[r][n] * powers[m];
      if (out.bias) v = v + out.bias[n0 + n];
      if (out.residual) v = v + out.residual[m * out.residual_stride + n0 + n];
      out.y[m * out.stride + n0 + n] = out.plus_zero ? v + 0.0f : v;
    }
  }
}

void dense_tiles(const DenseView& w, const float* x, const float* powers, int M, const LinearOutput& out, int tile_begin,
                 int tile_end) {
  for (int tile = tile_begin; tile < tile_end; tile++) {
    for (int m = 0; m < M; m += kDenseRows) {
      dense_rows(w, x, powers, m, M - m < kDenseRows ? M - m : kDenseRows, out, tile);
    }
  }
}

}  // namespace
}  // namespace isobatch
