// What both NEON files of linear layers share: decoding, the ordered sums over sub-blocks, the epilogue. Each file brings
// a class SubBlock<C, B>: the decoded integers of 4*kQuads outputs and B inputs, and their dot products with one row.
//
// A quad is 4 outputs, one register of sums. A tile's records are read once and in order; each weight is decoded once and
// then meets all rows of the panel.
#pragma once
#include <arm_neon.h>

#include "dense_impl.h"
#include "linear.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace isobatch {
namespace {

constexpr int kTileQuads = kTileOutputs / 4;

// Inputs 8*chunk .. +3 and +4 .. +7 of a quad's outputs, 4 bytes an output, as signed bytes.
template <WeightCode C>
ALWAYS_INLINE void decode8(const uint8_t* quants, int chunk, int8x16_t& first, int8x16_t& second) {
  if constexpr (C == WeightCode::kNibble) {
    const uint8x16_t q = vld1q_u8(quants + 64 * chunk);
    first = vreinterpretq_s8_u8(vandq_u8(q, vdupq_n_u8(15)));
    second = vreinterpretq_s8_u8(vshrq_n_u8(q, 4));
  } else {
    // Bytes of 8-bit weights are 128 too large: the highest bit turned over makes them signed.
    const uint8x16_t flip = vdupq_n_u8(C == WeightCode::kByteCentred ? 128 : 0);
    first = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(quants + 128 * chunk), flip));
    second = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(quants + 128 * chunk + 64), flip));
  }
}

ALWAYS_INLINE float32x4_t load_quad(FloatStorage storage, const uint8_t* at, int quad) {
  if (storage == FloatStorage::kHalf) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(at) + 4 * quad)));
  }
  return storage == FloatStorage::kSingle ? vld1q_f32(reinterpret_cast<const float*>(at) + 4 * quad) : vdupq_n_f32(0.0f);
}

void store_quad(const PackedView& w, const LinearOutput& out, int n0, int m, float32x4_t v) {
  float* y = out.y + m * out.stride + n0;
  const float* bias = out.bias ? out.bias + n0 : nullptr;
  const float* residual = out.residual ? out.residual + m * out.residual_stride + n0 : nullptr;
  if (n0 + 4 <= w.N) {
    if (bias) v = vaddq_f32(v, vld1q_f32(bias));
    if (residual) v = vaddq_f32(v, vld1q_f32(residual));
    if (out.plus_zero) v = vaddq_f32(v, vdupq_n_f32(0.0f));
    vst1q_f32(y, v);
    return;
  }
  float lanes[4];
  vst1q_f32(lanes, v);
  for (int n = 0; n < w.N - n0; n++) {
    float value = lanes[n];
    if (bias) value = value + bias[n];
    if (residual) value = value + residual[n];
    y[n] = out.plus_zero ? value + 0.0f : value;
  }
}

// One tile for the `rows` rows from m0 on, all of one panel.
template <template <WeightCode, int> class SubBlock, WeightCode C, int B>
void tile_panel(const PackedView& w, const ActView& x, const LinearOutput& out, int tile, int m0, int rows) {
  constexpr int A = B == 16 ? 32 : B, kParts = A / B, kQuads = SubBlock<C, B>::kQuads;
  const int n0 = tile * kTileOutputs, left = (w.N - n0 + 3) / 4, quads = left < kTileQuads ? left : kTileQuads;
  const size_t first = x.block_index(m0, 0);
  const float *d = x.d + first, *s[2] = {x.s + first, x.s + first};
  if (kParts == 2) s[0] = x.s_low + first, s[1] = x.s_high + first;
  float32x4_t chain[kMaxPanelRows][kTileQuads], total[kMaxPanelRows][kTileQuads];
  bool started = false;
  for (int slice = 0; slice < kSlices; slice++) {
    const int begin = slice_begin(slice, w.NB), end = slice_begin(slice + 1, w.NB);
    if (begin == end) continue;
    for (int m = 0; m < rows; m++) {
      for (float32x4_t& sum : chain[m]) sum = vdupq_n_f32(0.0f);
    }
    for (int j = begin; j < end; j++) {
      const int block = j / kParts, part = j % kParts;
      const uint8_t* record = w.record(tile, j);
      const uint8_t* activations = x.q + (first + (size_t)block * x.P) * 2 * A;
      const float *dj = d + (size_t)block * x.P, *sj = s[part] + (size_t)block * x.P;
      for (int quad = 0; quad < quads; quad += kQuads) {
        SubBlock<C, B> weights;
        weights.decode(record + quad / 4 * w.half_bytes + 16 * (quad % 4));
        float32x4_t scale[kQuads], bias[kQuads];
        for (int i = 0; i < kQuads; i++) {
          scale[i] = load_quad(w.scale_storage, record + w.scale_offset, quad + i);
          bias[i] = load_quad(w.bias_storage, record + w.bias_offset, quad + i);
        }
        for (int m = 0; m < rows; m++) {
          int32x4_t dot[kQuads];
          weights.dot(activations + (size_t)m * 2 * A, A, part, dot);
          for (int i = 0; i < kQuads; i++) {
            const float32x4_t t = vfmaq_f32(vmulq_n_f32(bias[i], sj[m]), scale[i], vcvtq_f32_s32(dot[i]));
            chain[m][quad + i] = vfmaq_n_f32(chain[m][quad + i], t, dj[m]);
          }
        }
      }
    }
    for (int m = 0; m < rows; m++) {
      for (int i = 0; i < kTileQuads; i++) total[m][i] = started ? vaddq_f32(total[m][i], chain[m][i]) : chain[m][i];
    }
    started = true;
  }
  for (int m = 0; m < rows; m++) {
    for (int i = 0; i < quads; i++) store_quad(w, out, n0 + 4 * i, m0 + m, total[m][i]);
  }
}

using TileFn = void (*)(const PackedView&, const ActView&, const LinearOutput&, int, int, int);

template <template <WeightCode, int> class SubBlock, WeightCode C>
TileFn pick_block(int b) {
  return b == 16 ? tile_panel<SubBlock, C, 16> : b == 32 ? tile_panel<SubBlock, C, 32> : tile_panel<SubBlock, C, 64>;
}

template <template <WeightCode, int> class SubBlock>
void quantized(const PackedView& w, const ActView& x, const LinearOutput& out, int tile_begin, int tile_end) {
  const TileFn run = w.code == WeightCode::kNibble ? pick_block<SubBlock, WeightCode::kNibble>(w.b)
                     : w.code == WeightCode::kByte ? pick_block<SubBlock, WeightCode::kByte>(w.b)
                                                   : pick_block<SubBlock, WeightCode::kByteCentred>(w.b);
  for (int tile = tile_begin; tile < tile_end; tile++) {
    for (int m = 0; m < x.M; m += x.P) run(w, x, out, tile, m, x.M - m < x.P ? x.M - m : x.P);
  }
}

}  // namespace
}  // namespace isobatch
