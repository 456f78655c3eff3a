// Linear layers on tiles of 16 rows: products of bytes in a matrix unit, then the contract's fp32 tail in AVX-512. The unit
// is a parameter: AMX itself (linear_amx.cpp), or its emulation, by which any processor with AVX-512 can test this code.
//
// A `Tiles` has eight tiles of up to 16 rows of 64 bytes, as AMX has, and
//   Tiles(rows, inputs)      sums and activations have `rows` rows, activations `inputs` bytes, weights inputs/4 rows
//   zero<T>()                tile T of sums becomes 0
//   load<T>(base, stride)    rows of tile T from memory, `stride` bytes apart
//   store<T>(base)           rows of 16 sums to memory, one behind the other
//   add_signed<C, A, B>()    sums C[m][n] += signed bytes A[m][k] times unsigned bytes B[k/4][4*n + k%4], over k
//   add_unsigned<C, A, B>()  the same with unsigned bytes in A
// A weight record's quants are such a B as they lie there: row k/4, byte 4*n + k%4.
#pragma once
#include <immintrin.h>

#include "linear.h"

namespace isobatch {
namespace {

constexpr int kSums = 0, kLowSums = 1, kActivations = 2, kLowActivations = 3, kWeights = 4, kWeights16 = 5;
constexpr int kTileRows = 16;

inline __m512 load_tail(FloatStorage storage, const uint8_t* at, int half) {
  if (storage == FloatStorage::kHalf) return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)(at + 32 * half)));
  return storage == FloatStorage::kSingle ? _mm512_load_ps(at + 64 * half) : _mm512_setzero_ps();
}

// Nibbles of B inputs as bytes w, and as 16*w: with those the high halves of activations need no shift of their own.
template <int B>
inline void decode_nibbles(const uint8_t* quants, uint8_t* bytes, uint8_t* bytes16) {
  const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8((char)0xf0);
#pragma GCC unroll 8
  for (int j = 0; j < B / 8; j++) {
    const __m512i q = _mm512_load_si512(quants + 64 * j);
    const __m512i first = _mm512_and_si512(q, low), second16 = _mm512_and_si512(q, high);
    _mm512_store_si512(bytes + 128 * j, first);
    _mm512_store_si512(bytes + 128 * j + 64, _mm512_srli_epi16(second16, 4));
    _mm512_store_si512(bytes16 + 128 * j, _mm512_slli_epi16(first, 4));
    _mm512_store_si512(bytes16 + 128 * j + 64, second16);
  }
}

// Sums of products of one sub-block: 16 outputs by the panel's rows, in `sums` (and `low_sums`, where they come in two parts).
template <class Tiles, bool Short, WeightCode C, int B>
inline void multiply(Tiles& tiles, const uint8_t* quants, const uint8_t* rows, int row_bytes, int low_offset, int32_t* sums,
                     int32_t* low_sums) {
  tiles.template load<kActivations>(rows, row_bytes);
  if constexpr (!Short) tiles.template load<kLowActivations>(rows + low_offset, row_bytes);
  tiles.template zero<kSums>();
  if constexpr (C == WeightCode::kNibble) {
    alignas(64) uint8_t bytes[16 * B], bytes16[16 * B];
    decode_nibbles<B>(quants, bytes, bytes16);
    tiles.template load<kWeights>(bytes, 64);
    if constexpr (Short) {
      tiles.template add_signed<kSums, kActivations, kWeights>();
    } else {
      tiles.template load<kWeights16>(bytes16, 64);
      tiles.template add_signed<kSums, kActivations, kWeights16>();
      tiles.template add_unsigned<kSums, kLowActivations, kWeights>();
    }
  } else {
    tiles.template load<kWeights>(quants, 64);
    tiles.template add_signed<kSums, kActivations, kWeights>();
    if constexpr (!Short) {
      tiles.template zero<kLowSums>();
      tiles.template add_unsigned<kLowSums, kLowActivations, kWeights>();
      tiles.template store<kLowSums>(low_sums);
    }
  }
  tiles.template store<kSums>(sums);
}

// The 16 outputs `half` of one tile of weights, for the panel that begins at row m0; totals of all its rows.
template <class Tiles, bool Short, WeightCode C, int B>
void panel_totals(Tiles& tiles, const PackedView& w, const ActView& x, int tile, int half, int m0, float (*total)[16]) {
  constexpr int A = B == 16 ? 32 : B, kParts = A / B, kRowBytes = 2 * A;
  const int P = x.P;
  const size_t first = x.block_index(m0, 0);
  const uint8_t* q = x.q + first * kRowBytes;
  const float *d = x.d + first, *s[2] = {x.s + first, x.s + first};
  if (kParts == 2) s[0] = x.s_low + first, s[1] = x.s_high + first;
  const uint8_t* records = w.record(tile, 0);
  const size_t prefetch = 4 * w.record_bytes;
  alignas(64) int32_t sums[16 * kTileRows], low_sums[16 * kTileRows];
  alignas(64) float chain[kTileRows][16];
  bool started = false;
  for (int slice = 0; slice < kSlices; slice++) {
    const int begin = slice_begin(slice, w.NB), end = slice_begin(slice + 1, w.NB);
    if (begin == end) continue;
    for (int m = 0; m < P; m++) _mm512_store_ps(chain[m], _mm512_setzero_ps());
    for (int j = begin; j < end; j++) {
      const int block = j / kParts, part = j % kParts;
      const uint8_t* record = records + (size_t)j * w.record_bytes;
      for (size_t o = half * (w.record_bytes / 2); o < (half + 1) * (w.record_bytes / 2); o += 64) {
        _mm_prefetch((const char*)record + prefetch + o, _MM_HINT_T0);
      }
      multiply<Tiles, Short, C, B>(tiles, record + half * w.half_bytes, q + (size_t)block * P * kRowBytes + part * B, kRowBytes,
                                   A, sums, low_sums);
      const float *dj = d + (size_t)block * P, *sj = s[part] + (size_t)block * P;
      const __m512 scale = load_tail(w.scale_storage, record + w.scale_offset, half);
      const __m512 bias = load_tail(w.bias_storage, record + w.bias_offset, half);
      for (int m = 0; m < P; m++) {
        __m512i dot = _mm512_load_si512(sums + 16 * m);
        if constexpr (!Short && C != WeightCode::kNibble) {
          dot = _mm512_add_epi32(_mm512_slli_epi32(dot, 4), _mm512_load_si512(low_sums + 16 * m));
        }
        // Stored bytes are 128 too large: take 128 times the sum of the activations away.
        if constexpr (C == WeightCode::kByteCentred) dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(128 * (int32_t)sj[m]));
        const __m512 t = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dot), _mm512_mul_ps(bias, _mm512_set1_ps(sj[m])));
        _mm512_store_ps(chain[m], _mm512_fmadd_ps(_mm512_set1_ps(dj[m]), t, _mm512_load_ps(chain[m])));
      }
    }
    for (int m = 0; m < P; m++) {
      const __m512 sum = _mm512_load_ps(chain[m]);
      _mm512_store_ps(total[m], started ? _mm512_add_ps(_mm512_load_ps(total[m]), sum) : sum);
    }
    started = true;
  }
}

inline void store_totals(const PackedView& w, const LinearOutput& out, int n0, int m0, int rows, const float (*total)[16]) {
  if (n0 >= w.N) return;
  const __mmask16 mask = w.N - n0 >= 16 ? 0xffff : (__mmask16)((1u << (w.N - n0)) - 1);
  for (int m = m0; m < m0 + rows; m++) {
    __m512 v = _mm512_load_ps(total[m - m0]);
    if (out.bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, out.bias + n0));
    if (out.residual) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, out.residual + m * out.residual_stride + n0));
    if (out.plus_zero) v = _mm512_add_ps(v, _mm512_setzero_ps());
    _mm512_mask_storeu_ps(out.y + m * out.stride + n0, mask, v);
  }
}

template <class Tiles, bool Short, WeightCode C, int B>
void multiply_tiles(const PackedView& w, const ActView& x, const LinearOutput& out, int tile_begin, int tile_end) {
  Tiles tiles(x.P, B);
  alignas(64) float total[kTileRows][16];
  for (int tile = tile_begin; tile < tile_end; tile++) {
    for (int m0 = 0; m0 < x.M; m0 += x.P) {
      const int rows = x.M - m0 < x.P ? x.M - m0 : x.P;
      for (int half = 0; half < 2; half++) {
        panel_totals<Tiles, Short, C, B>(tiles, w, x, tile, half, m0, total);
        store_totals(w, out, tile * kTileOutputs + 16 * half, m0, rows, total);
      }
    }
  }
}

template <class Tiles, bool Short, WeightCode C>
QuantizedFn pick_tiles(int b) {
  return b == 16   ? multiply_tiles<Tiles, Short, C, 16>
         : b == 32 ? multiply_tiles<Tiles, Short, C, 32>
                   : multiply_tiles<Tiles, Short, C, 64>;
}

// A QuantizedFn for any number of rows up to the panel's; every panel is one tile high.
template <class Tiles, bool Short>
void quantized_by_tiles(const PackedView& w, const ActView& x, const LinearOutput& out, int tile_begin, int tile_end) {
  switch (w.code) {
    case WeightCode::kNibble: return pick_tiles<Tiles, Short, WeightCode::kNibble>(w.b)(w, x, out, tile_begin, tile_end);
    case WeightCode::kByte: return pick_tiles<Tiles, Short, WeightCode::kByte>(w.b)(w, x, out, tile_begin, tile_end);
    default: return pick_tiles<Tiles, Short, WeightCode::kByteCentred>(w.b)(w, x, out, tile_begin, tile_end);
  }
}

}  // namespace
}  // namespace isobatch
