// The float linear kernels on vectors of W outputs. The including file defines ISOBATCH_UNIT, includes its vector header
// and then gives, in the same namespace: kRows and kVectors (the GEMM's registers: rows, and vectors of outputs), `Codes`
// (the stored integers of W outputs, four or eight inputs each), load_codes, nibble, byte_value and load_bfloat.
#pragma once
#include "linear_float.h"

namespace isobatch::ISOBATCH_UNIT {
namespace {

constexpr int kTileVectors = kTileOutputs / W;
constexpr int kGemvVectors = 2;  // with four chains each, enough to hide the latency of fma

// Vector v of 32 stored fp16 or fp32 values.
inline Vf load_values(FloatStorage storage, const uint8_t* at, int v) {
  if (storage == FloatStorage::kHalf) return load_f16(reinterpret_cast<const uint16_t*>(at) + v * W);
  if (storage == FloatStorage::kSingle) return load(reinterpret_cast<const float*>(at) + v * W);
  return zero();
}

// Where the integers of vector v begin in a record.
inline const uint8_t* codes_of(const PackedView& w, const uint8_t* record, int v) {
  return record + (v * W / 16) * w.half_bytes + v * W % 16 * 4;
}

// Integer of input i (below 8 for nibbles, 4 for bytes) of the codes.
template <WeightCode C>
inline Vf code_value(Codes codes, int i) {
  if (C == WeightCode::kNibble) return nibble(codes, i);
  const Vf value = byte_value(codes, i);
  return C == WeightCode::kByteCentred ? sub(value, set(128.0f)) : value;
}

template <WeightCode C>
constexpr int codes_inputs() { return C == WeightCode::kNibble ? 8 : 4; }

// Saturated. What is not finite stays so: zero times it is NaN.
inline Vf rounded_to_half(Vf a) {
  uint16_t halves[W];
  store_f16(halves, min(max(a, set(-kLargestHalf)), set(kLargestHalf)));
  return fma(a, zero(), load_f16(halves));
}

// One vector of sums becomes outputs n0.. of row m.
inline void finish(int N, const LinearOutput& out, int n0, int m, Vf sums) {
  const int n = N - n0 < W ? N - n0 : W;
  if (n <= 0) return;
  Vf v = rounded_to_half(sums);
  if (out.bias) v = add(v, load_n(out.bias + n0, n));
  if (out.residual) v = add(v, load_n(out.residual + (size_t)m * out.residual_stride + n0, n));
  if (out.plus_zero) v = add(v, zero());
  store_n(out.y + (size_t)m * out.stride + n0, v, n);
}

// ------------------------------------------------------------------------------------------------------------- rows

bool prepare(const float* x, const FloatRows& out, int m) {
  float* row = out.row(m);
  bool finite = true;
  alignas(64) float values[16], parts[4];
  for (int k0 = 0; k0 < out.K; k0 += 16) {
    const int count = out.K - k0 < 16 ? out.K - k0 : 16;
    for (int k = 0; k < 16; k += W) {
      const int n = count - k < 0 ? 0 : count - k < W ? count - k : W;
      const Vf v = n == W ? load(x + k0 + k) : load_n(x + k0 + k, n);
      finite = finite && mask_ge(set(0x1p96f), max(v, negate(v))) == (1u << W) - 1 && mask_ge(v, v) == (1u << W) - 1;
      store(values + k, rounded_to_half(v));
    }
    for (int k = 0; k < count; k++) row[(size_t)(k0 + k) * out.P] = values[k];
    if (!out.sums) continue;
    for (int i = 0; i < 4; i++) parts[i] = ((values[i] + values[i + 4]) + values[i + 8]) + values[i + 12];
    out.row_sums(m)[k0 / kSumInputs] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  }
  if (!finite) {
    for (int k = 0; k < out.K; k++) row[(size_t)k * out.P] = 0.0f;
    if (out.sums) std::memset(out.row_sums(m), 0, (size_t)(out.K / kSumInputs) * sizeof(float));
  }
  return finite;
}

// ------------------------------------------------------------------------------------------------------------- gemv

// Outputs v0*W.. of one row: a dot with the integers for each sub-block, then its scale and bias.
template <WeightCode C>
void gemv_vectors(const PackedView& w, const float* x, const float* sums, const LinearOutput& out, int tile, int m, int v0) {
  constexpr int kInputs = codes_inputs<C>();
  Vf total[kGemvVectors];
  for (int g = 0; g < kGemvVectors; g++) total[g] = zero();
  const uint8_t* records = w.record(tile, 0);
  for (int j = 0; j < w.NB; j++) {
    const uint8_t* record = records + (size_t)j * w.record_bytes;
    Vf chain[kGemvVectors][4];
    for (int g = 0; g < kGemvVectors; g++) {
      for (int i = 0; i < 4; i++) chain[g][i] = zero();
    }
    const uint8_t* quants[kGemvVectors];
    for (int g = 0; g < kGemvVectors; g++) {
      quants[g] = codes_of(w, record, v0 + g);
      prefetch(quants[g] + 4 * w.record_bytes);
    }
    const float* xj = x + (size_t)j * w.b;
    for (int k = 0; k < w.b; k += kInputs) {
      Codes codes[kGemvVectors];
      for (int g = 0; g < kGemvVectors; g++) codes[g] = load_codes(quants[g] + 64 * (k / kInputs));
#pragma GCC unroll 8
      for (int i = 0; i < kInputs; i++) {
        const Vf factor = set(xj[k + i]);
        for (int g = 0; g < kGemvVectors; g++) chain[g][i % 4] = fma(factor, code_value<C>(codes[g], i), chain[g][i % 4]);
      }
    }
    float sum = sums[j * (w.b / kSumInputs)];
    for (int i = 1; i < w.b / kSumInputs; i++) sum = sum + sums[j * (w.b / kSumInputs) + i];
    for (int g = 0; g < kGemvVectors; g++) {
      const Vf dot = add(add(chain[g][0], chain[g][1]), add(chain[g][2], chain[g][3]));
      const Vf scale = load_values(w.scale_storage, record + w.scale_offset, v0 + g);
      const Vf bias = load_values(w.bias_storage, record + w.bias_offset, v0 + g);
      total[g] = add(total[g], fma(scale, dot, mul(bias, set(sum))));
    }
  }
  for (int g = 0; g < kGemvVectors; g++) finish(w.N, out, tile * kTileOutputs + (v0 + g) * W, m, total[g]);
}

template <WeightCode C>
void gemv_tiles(const PackedView& w, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end) {
  for (int tile = tile_begin; tile < tile_end; tile++) {
    for (int m = 0; m < x.M; m++) {
      for (int v = 0; v < kTileVectors; v += kGemvVectors) gemv_vectors<C>(w, x.row(m), x.row_sums(m), out, tile, m, v);
    }
  }
}

void gemv(const PackedView& w, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end) {
  switch (w.code) {
    case WeightCode::kNibble: return gemv_tiles<WeightCode::kNibble>(w, x, out, tile_begin, tile_end);
    case WeightCode::kByte: return gemv_tiles<WeightCode::kByte>(w, x, out, tile_begin, tile_end);
    default: return gemv_tiles<WeightCode::kByteCentred>(w, x, out, tile_begin, tile_end);
  }
}

inline Vf load_dense(const DenseView& w, const uint16_t* at) { return w.bfloat ? load_bfloat(at) : load_f16(at); }

void dense_gemv(const DenseView& w, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end) {
  for (int tile = tile_begin; tile < tile_end; tile++) {
    const uint16_t* values = w.data + (size_t)tile * w.K * kTileOutputs;
    for (int m = 0; m < x.M; m++) {
      const float* row = x.row(m);
      for (int v = 0; v < kTileVectors; v++) {
        Vf total = zero();
        for (int k0 = 0; k0 < w.K; k0 += kDenseSubBlock) {
          const int end = k0 + kDenseSubBlock < w.K ? k0 + kDenseSubBlock : w.K;
          Vf chain[4];
          for (int i = 0; i < 4; i++) chain[i] = zero();
          const auto step = [&](int k, int i) {
            chain[i] = fma(set(row[k + i]), load_dense(w, values + (size_t)(k + i) * kTileOutputs + v * W), chain[i]);
          };
          int k = k0;
          for (; k + 4 <= end; k += 4) {
            for (int i = 0; i < 4; i++) step(k, i);
          }
          for (int i = 0; k + i < end; i++) step(k, i);
          total = add(total, add(add(chain[0], chain[1]), add(chain[2], chain[3])));
        }
        finish(w.N, out, tile * kTileOutputs + v * W, m, total);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- gemm

constexpr int kChunkRows = 96;  // rows whose sums are kept while the weights of a block are decoded

using DecodedBlock = float[kFloatInputs][kTileOutputs];

// R rows times `count` inputs for kVectors vectors of outputs; x is P floats an input. Adds the block's chains to `sums`.
template <int R>
void block_rows(const float* x, int P, const float* weights, int count, float* sums, bool first) {
  Vf chain[R][kVectors];
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < kVectors; v++) chain[r][v] = zero();
  }
  for (int k = 0; k < count; k++) {
    Vf w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) w[v] = load(weights + (size_t)k * kTileOutputs + v * W);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Vf factor = set(x[(size_t)k * P + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) chain[r][v] = fma(factor, w[v], chain[r][v]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < kVectors; v++) {
      float* at = sums + r * kTileOutputs + v * W;
      store(at, first ? chain[r][v] : add(load(at), chain[r][v]));
    }
  }
}

using BlockRows = void (*)(const float*, int, const float*, int, float*, bool);

template <int R>
constexpr BlockRows pick_block_rows(int rows) {
  if constexpr (R == 1) return block_rows<1>;
  else return rows == R ? block_rows<R> : pick_block_rows<R - 1>(rows);
}

// decode(k0, count, block) gives the weights of inputs k0.. of the tile.
template <class Decode>
void gemm_tile(int N, const FloatRows& x, const LinearOutput& out, int tile, const Decode& decode) {
  alignas(64) DecodedBlock block;
  alignas(64) float sums[kChunkRows][kTileOutputs];
  const int chunk = kChunkRows / x.P * x.P;
  const BlockRows whole = pick_block_rows<kRows>(x.P);
  for (int m0 = 0; m0 < x.M; m0 += chunk) {
    const int end = m0 + chunk < x.M ? m0 + chunk : x.M;
    for (int k0 = 0; k0 < x.K; k0 += kFloatInputs) {
      const int count = x.K - k0 < kFloatInputs ? x.K - k0 : kFloatInputs;
      decode(k0, count, block);
      for (int m = m0; m < end; m += x.P) {
        const float* rows = x.row(m) + (size_t)k0 * x.P;
        const BlockRows run = end - m >= x.P ? whole : pick_block_rows<kRows>(end - m);
        for (int v = 0; v < kTileVectors; v += kVectors) run(rows, x.P, &block[0][v * W], count, &sums[m - m0][v * W], k0 == 0);
      }
    }
    for (int m = m0; m < end; m++) {
      for (int v = 0; v < kTileVectors; v++) finish(N, out, tile * kTileOutputs + v * W, m, load(&sums[m - m0][v * W]));
    }
  }
}

// w = fma(scale, q, bias) for the inputs of one record.
template <WeightCode C>
void decode_record(const PackedView& w, const uint8_t* record, float (*block)[kTileOutputs]) {
  constexpr int kInputs = codes_inputs<C>();
  for (int v = 0; v < kTileVectors; v++) {
    const uint8_t* quants = codes_of(w, record, v);
    const Vf scale = load_values(w.scale_storage, record + w.scale_offset, v);
    const Vf bias = load_values(w.bias_storage, record + w.bias_offset, v);
    for (int k = 0; k < w.b; k += kInputs) {
      const Codes codes = load_codes(quants + 64 * (k / kInputs));
#pragma GCC unroll 8
      for (int i = 0; i < kInputs; i++) store(&block[k + i][v * W], fma(scale, code_value<C>(codes, i), bias));
    }
  }
}

template <WeightCode C>
void gemm_tiles(const PackedView& w, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end) {
  for (int tile = tile_begin; tile < tile_end; tile++) {
    gemm_tile(w.N, x, out, tile, [&](int k0, int count, DecodedBlock& block) {
      for (int k = 0; k < count; k += w.b) decode_record<C>(w, w.record(tile, (k0 + k) / w.b), block + k);
    });
  }
}

void gemm(const PackedView& w, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end) {
  switch (w.code) {
    case WeightCode::kNibble: return gemm_tiles<WeightCode::kNibble>(w, x, out, tile_begin, tile_end);
    case WeightCode::kByte: return gemm_tiles<WeightCode::kByte>(w, x, out, tile_begin, tile_end);
    default: return gemm_tiles<WeightCode::kByteCentred>(w, x, out, tile_begin, tile_end);
  }
}

void dense_gemm(const DenseView& w, const FloatRows& x, const LinearOutput& out, int tile_begin, int tile_end) {
  for (int tile = tile_begin; tile < tile_end; tile++) {
    const uint16_t* values = w.data + (size_t)tile * w.K * kTileOutputs;
    gemm_tile(w.N, x, out, tile, [&](int k0, int count, DecodedBlock& block) {
      for (int k = 0; k < count; k++) {
        const uint16_t* at = values + (size_t)(k0 + k) * kTileOutputs;
        for (int v = 0; v < kTileVectors; v++) store(&block[k][v * W], load_dense(w, at + v * W));
      }
    });
  }
}

constexpr FloatLinearOps float_ops_table() { return {kRows, prepare, gemv, gemm, dense_gemv, dense_gemm}; }

}  // namespace
}  // namespace isobatch::ISOBATCH_UNIT
