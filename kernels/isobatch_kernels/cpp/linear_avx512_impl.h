// Linear layers with AVX-512 VNNI: unsigned bytes of weights times signed bytes of activations. Activations of 12 bits come
// as two halves q = 16*hi + lo, those of 8 bits as one byte. The rows of a panel share each decoded weight; 16 outputs are
// one register. Included by one file for each width, so that they compile side by side.
#pragma once
#include <immintrin.h>

#include "linear.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace isobatch {
namespace {

static ALWAYS_INLINE __m512i broadcast4(const uint8_t* at) {
  int32_t word;
  std::memcpy(&word, at, 4);
  return _mm512_set1_epi32(word);
}

static ALWAYS_INLINE __m512 load_floats(FloatStorage storage, const uint8_t* at, int half) {
  if (storage == FloatStorage::kHalf) {
    return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)(at + 32 * half)));
  }
  return storage == FloatStorage::kSingle ? _mm512_load_ps(at + 64 * half) : _mm512_setzero_ps();
}

// The sub-block's dot products of R rows whose integers are single bytes, the first row's at q, rows RowBytes apart.
template <WeightCode C, int B, int R, int RowBytes>
static ALWAYS_INLINE void dot_short_rows(const uint8_t* quants, const uint8_t* q, const int32_t* centres, __m512i (&dot)[R]) {
  for (int m = 0; m < R; m++) {
    dot[m] = C == WeightCode::kByteCentred ? _mm512_set1_epi32(centres[m]) : _mm512_setzero_si512();
  }
  if constexpr (C == WeightCode::kNibble) {
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int j = 0; j < B / 8; j++) {
      const __m512i w = _mm512_load_si512(quants + 64 * j);
      const __m512i w0 = _mm512_and_si512(w, low), w1 = _mm512_and_si512(_mm512_srli_epi16(w, 4), low);
#pragma GCC unroll 16
      for (int m = 0; m < R; m++) {
        dot[m] = _mm512_dpbusd_epi32(dot[m], w0, broadcast4(q + m * RowBytes + 8 * j));
        dot[m] = _mm512_dpbusd_epi32(dot[m], w1, broadcast4(q + m * RowBytes + 8 * j + 4));
      }
    }
  } else {
#pragma GCC unroll 8
    for (int j = 0; j < B / 4; j++) {
      const __m512i w = _mm512_load_si512(quants + 64 * j);
#pragma GCC unroll 16
      for (int m = 0; m < R; m++) dot[m] = _mm512_dpbusd_epi32(dot[m], w, broadcast4(q + m * RowBytes + 4 * j));
    }
  }
}

// The same for integers in halves: hi and lo are the first row's.
template <WeightCode C, int B, int R, int RowBytes>
static ALWAYS_INLINE void dot_rows(const uint8_t* quants, const uint8_t* hi, const uint8_t* lo, const int32_t* centres,
                                   __m512i (&dot)[R]) {
  if constexpr (C == WeightCode::kNibble) {
    const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8((char)0xf0);
    for (int m = 0; m < R; m++) dot[m] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = 0; j < B / 8; j++) {
      const __m512i q = _mm512_load_si512(quants + 64 * j);
      // 16*w fits a byte too, so the high halves need no shift of their own.
      const __m512i w0 = _mm512_and_si512(q, low), w1x16 = _mm512_and_si512(q, high);
      const __m512i w0x16 = _mm512_slli_epi16(w0, 4), w1 = _mm512_srli_epi16(w1x16, 4);
#pragma GCC unroll 16
      for (int m = 0; m < R; m++) {
        const uint8_t *h = hi + m * RowBytes + 8 * j, *l = lo + m * RowBytes + 8 * j;
        dot[m] = _mm512_dpbusd_epi32(dot[m], w0x16, broadcast4(h));
        dot[m] = _mm512_dpbusd_epi32(dot[m], w1x16, broadcast4(h + 4));
        dot[m] = _mm512_dpbusd_epi32(dot[m], w0, broadcast4(l));
        dot[m] = _mm512_dpbusd_epi32(dot[m], w1, broadcast4(l + 4));
      }
    }
  } else {
    for (int m = 0; m < R; m++) dot[m] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = 0; j < B / 4; j++) {
      const __m512i w = _mm512_load_si512(quants + 64 * j);
#pragma GCC unroll 16
      for (int m = 0; m < R; m++) dot[m] = _mm512_dpbusd_epi32(dot[m], w, broadcast4(hi + m * RowBytes + 4 * j));
    }
#pragma GCC unroll 16
    for (int m = 0; m < R; m++) {
      dot[m] = _mm512_slli_epi32(dot[m], 4);
      // Stored bytes are 128 too large: take 128 times the sum of the activations away.
      if constexpr (C == WeightCode::kByteCentred) dot[m] = _mm512_add_epi32(dot[m], _mm512_set1_epi32(centres[m]));
    }
#pragma GCC unroll 8
    for (int j = 0; j < B / 4; j++) {
      const __m512i w = _mm512_load_si512(quants + 64 * j);
#pragma GCC unroll 16
      for (int m = 0; m < R; m++) dot[m] = _mm512_dpbusd_epi32(dot[m], w, broadcast4(lo + m * RowBytes + 4 * j));
    }
  }
}

static ALWAYS_INLINE void store_row(const PackedView& w, const LinearOutput& out, int n0, int m, __m512 v) {
  if (n0 >= w.N) return;
  const __mmask16 mask = w.N - n0 >= 16 ? 0xffff : (__mmask16)((1u << (w.N - n0)) - 1);
  if (out.bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, out.bias + n0));
  if (out.residual) {
    v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, out.residual + m * out.residual_stride + n0));
  }
  if (out.plus_zero) v = _mm512_add_ps(v, _mm512_setzero_ps());
  _mm512_mask_storeu_ps(out.y + m * out.stride + n0, mask, v);
}

// The R rows m0.. of one panel for one tile.
template <bool Short, WeightCode C, int B, int R>
void tile_rows(const PackedView& w, const ActView& x, const LinearOutput& out, int tile, int m0) {
  constexpr int A = B == 16 ? 32 : B, kParts = A / B, kRowBytes = 2 * A;
  // Few rows: both groups of 16 outputs together, so that memory is read strictly in order.
  constexpr int kGroups = R <= 3 ? 2 : 1;
  const size_t first = x.block_index(m0, 0);
  const uint8_t* q = x.q + first * kRowBytes;
  const float *d = x.d + first, *s[2] = {x.s + first, x.s + first};
  if (kParts == 2) s[0] = x.s_low + first, s[1] = x.s_high + first;
  const uint8_t* records = w.record(tile, 0);
  const size_t prefetch = 16 * w.record_bytes;
  alignas(64) int32_t centres[16];
  __m512 total[2][R];
  bool started = false;
  for (int slice = 0; slice < kSlices; slice++) {
    const int begin = slice_begin(slice, w.NB), end = slice_begin(slice + 1, w.NB);
    if (begin == end) continue;
#pragma GCC unroll 2
    for (int c0 = 0; c0 < 2; c0 += kGroups) {
      __m512 chain[kGroups][R];
      for (int c = 0; c < kGroups; c++) {
        for (int m = 0; m < R; m++) chain[c][m] = _mm512_setzero_ps();
      }
      for (int j = begin; j < end; j++) {
        const int block = j / kParts, part = j % kParts;
        const uint8_t* record = records + (size_t)j * w.record_bytes;
        const uint8_t* hi = q + (size_t)block * x.P * kRowBytes + part * B;
        const float *dj = d + (size_t)block * x.P, *sj = s[part] + (size_t)block * x.P;
        if constexpr (C == WeightCode::kByteCentred) {
          const __m512 sums = _mm512_maskz_loadu_ps((__mmask16)((1u << R) - 1), sj);
          _mm512_store_si512(centres, _mm512_cvtps_epi32(_mm512_mul_ps(sums, _mm512_set1_ps(-128.0f))));
        }
        // In order, both groups at once: in the second pass over a slice its records are in the cache. One or two rows read
        // bytes faster than anybody could ask for them. Measured: into the second-level cache, far ahead.
        if (c0 == 0 && (C == WeightCode::kNibble || R > 2)) {
          for (size_t o = 0; o < w.record_bytes; o += 64) _mm_prefetch((const char*)record + prefetch + o, _MM_HINT_T1);
        }
#pragma GCC unroll 2
        for (int c = 0; c < kGroups; c++) {
          const int half = c0 + c;
          __m512i dot[R];
          const uint8_t* quants = record + half * w.half_bytes;
          if constexpr (Short) dot_short_rows<C, B, R, kRowBytes>(quants, hi, centres, dot);
          else dot_rows<C, B, R, kRowBytes>(quants, hi, hi + A, centres, dot);
          const __m512 scale = load_floats(w.scale_storage, record + w.scale_offset, half);
          const __m512 bias = load_floats(w.bias_storage, record + w.bias_offset, half);
#pragma GCC unroll 16
          for (int m = 0; m < R; m++) {
            const __m512 t = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dot[m]), _mm512_mul_ps(bias, _mm512_set1_ps(sj[m])));
            chain[c][m] = _mm512_fmadd_ps(_mm512_set1_ps(dj[m]), t, chain[c][m]);
          }
        }
      }
      for (int c = 0; c < kGroups; c++) {
        for (int m = 0; m < R; m++) {
          total[c0 + c][m] = started ? _mm512_add_ps(total[c0 + c][m], chain[c][m]) : chain[c][m];
        }
      }
    }
    started = true;
  }
  for (int m = 0; m < R; m++) {
    store_row(w, out, tile * kTileOutputs, m0 + m, total[0][m]);
    store_row(w, out, tile * kTileOutputs + 16, m0 + m, total[1][m]);
  }
}

using TileFn = void (*)(const PackedView&, const ActView&, const LinearOutput&, int, int);

template <bool Short, WeightCode C, int B>
TileFn pick_rows(int rows) {
  static const TileFn table[kMaxPanelRows] = {
      tile_rows<Short, C, B, 1>,  tile_rows<Short, C, B, 2>,  tile_rows<Short, C, B, 3>,  tile_rows<Short, C, B, 4>,
      tile_rows<Short, C, B, 5>,  tile_rows<Short, C, B, 6>,  tile_rows<Short, C, B, 7>,  tile_rows<Short, C, B, 8>,
      tile_rows<Short, C, B, 9>,  tile_rows<Short, C, B, 10>, tile_rows<Short, C, B, 11>, tile_rows<Short, C, B, 12>,
      tile_rows<Short, C, B, 13>, tile_rows<Short, C, B, 14>, tile_rows<Short, C, B, 15>, tile_rows<Short, C, B, 16>};
  return table[rows - 1];
}

template <bool Short, WeightCode C>
TileFn pick_block(int b, int rows) {
  return b == 16 ? pick_rows<Short, C, 16>(rows) : b == 32 ? pick_rows<Short, C, 32>(rows) : pick_rows<Short, C, 64>(rows);
}

template <bool Short>
TileFn pick(const PackedView& w, int rows) {
  switch (w.code) {
    case WeightCode::kNibble: return pick_block<Short, WeightCode::kNibble>(w.b, rows);
    case WeightCode::kByte: return pick_block<Short, WeightCode::kByte>(w.b, rows);
    default: return pick_block<Short, WeightCode::kByteCentred>(w.b, rows);
  }
}

template <bool Short>
void quantized(const PackedView& w, const ActView& x, const LinearOutput& out, int tile_begin, int tile_end) {
  const TileFn whole = pick<Short>(w, x.P);
  for (int tile = tile_begin; tile < tile_end; tile++) {
    int m = 0;
    for (; m + x.P <= x.M; m += x.P) whole(w, x, out, tile, m);
    if (m < x.M) pick<Short>(w, x.M - m)(w, x, out, tile, m);
  }
}

}  // namespace
}  // namespace isobatch
