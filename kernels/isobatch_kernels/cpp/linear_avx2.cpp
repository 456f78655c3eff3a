// Linear layers with AVX2: vpmaddwd on int16 activations, whose order inside 8 inputs (0,2 4,6 1,3 5,7) is what shifting
// words of packed weights yields. 8 outputs are one register; up to kRows rows share each decoded weight, kGroups registers
// of outputs each loaded activation.
#include "linear.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include "dense_impl.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace isobatch {
namespace {

// Rows and groups of 8 outputs whose dot products stay in registers: 10 of the 16.
constexpr int kRows = 5, kGroups = 2;

static ALWAYS_INLINE __m256i broadcast4(const uint8_t* at) {
  int32_t word;
  std::memcpy(&word, at, 4);
  return _mm256_set1_epi32(word);
}

// GCC turns a chain of integer additions into a tree, whose products wait on the stack. This holds it to the chain.
static ALWAYS_INLINE void keep_in_register(__m256i& x) { asm("" : "+x"(x)); }

static ALWAYS_INLINE __m256 load_floats(FloatStorage storage, const uint8_t* at, int eighth) {
  if (storage == FloatStorage::kHalf) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(at + 16 * eighth)));
  return storage == FloatStorage::kSingle ? _mm256_loadu_ps((const float*)(at + 32 * eighth)) : _mm256_setzero_ps();
}

// Register v of the four that hold eight inputs of eight outputs as pairs of words.
template <WeightCode C>
static ALWAYS_INLINE __m256i decode2(const uint8_t* quants, int j, int v) {
  if constexpr (C == WeightCode::kNibble) {
    const __m256i q = _mm256_loadu_si256((const __m256i*)(quants + 64 * j));
    if (v == 3) return _mm256_srli_epi16(q, 12);
    return _mm256_and_si256(_mm256_srli_epi16(q, 4 * v), _mm256_set1_epi16(15));
  } else {
    const __m256i q = _mm256_loadu_si256((const __m256i*)(quants + 128 * j + 64 * (v & 1)));
    return v < 2 ? _mm256_and_si256(q, _mm256_set1_epi16(255)) : _mm256_srli_epi16(q, 8);
  }
}

static ALWAYS_INLINE void store_row(const PackedView& w, const LinearOutput& out, int n0, int m, __m256 v) {
  if (n0 >= w.N) return;
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(w.N - n0), lanes);
  if (out.bias) v = _mm256_add_ps(v, _mm256_maskload_ps(out.bias + n0, mask));
  if (out.residual) v = _mm256_add_ps(v, _mm256_maskload_ps(out.residual + m * out.residual_stride + n0, mask));
  if (out.plus_zero) v = _mm256_add_ps(v, _mm256_setzero_ps());
  _mm256_maskstore_ps(out.y + m * out.stride + n0, mask, v);
}

// The R rows m0.. of one panel for kGroups * 8 outputs from `eighth` (of the tile's four) on. The groups share the loads of
// the activations.
template <WeightCode C, int B, int R>
void tile_rows(const PackedView& w, const ActView& x, const LinearOutput& out, int tile, int eighth, int m0) {
  constexpr int A = B == 16 ? 32 : B, kParts = A / B, kRowBytes = 2 * A;
  const size_t first = x.block_index(m0, 0);
  const float *d = x.d + first, *s[2] = {x.s + first, x.s + first};
  if (kParts == 2) s[0] = x.s_low + first, s[1] = x.s_high + first;
  __m256 total[kGroups][R] = {};
  bool started = false;
  for (int slice = 0; slice < kSlices; slice++) {
    const int begin = slice_begin(slice, w.NB), end = slice_begin(slice + 1, w.NB);
    if (begin == end) continue;
    __m256 chain[kGroups][R];
    for (int g = 0; g < kGroups; g++) {
      for (int m = 0; m < R; m++) chain[g][m] = _mm256_setzero_ps();
    }
    for (int j = begin; j < end; j++) {
      const int block = j / kParts, part = j % kParts;
      const uint8_t* record = w.record(tile, j);
      const uint8_t* quants = record + (eighth >> 1) * w.half_bytes + 32 * (eighth & 1);
      const uint8_t* q = x.q + (first + (size_t)block * x.P) * kRowBytes + part * 2 * B;
      const float *dj = d + (size_t)block * x.P, *sj = s[part] + (size_t)block * x.P;
      if (eighth == 0) {
        for (size_t o = 0; o < w.record_bytes; o += 64) {
          _mm_prefetch((const char*)record + 16 * w.record_bytes + o, _MM_HINT_T1);
        }
      }
      __m256i dot[kGroups][R];
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; g++) {
#pragma GCC unroll 8
        for (int m = 0; m < R; m++) {
          // Stored bytes are 128 too large: take 128 times the sum of the activations away.
          dot[g][m] =
              C == WeightCode::kByteCentred ? _mm256_cvtps_epi32(_mm256_set1_ps(sj[m] * -128.0f)) : _mm256_setzero_si256();
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < B / 8; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
          __m256i words[kGroups];
#pragma GCC unroll 2
          for (int g = 0; g < kGroups; g++) words[g] = decode2<C>(quants + 32 * g, i, v);
#pragma GCC unroll 8
          for (int m = 0; m < R; m++) {
            const __m256i pair = broadcast4(q + m * kRowBytes + 16 * i + 4 * v);
#pragma GCC unroll 2
            for (int g = 0; g < kGroups; g++) {
              dot[g][m] = _mm256_add_epi32(dot[g][m], _mm256_madd_epi16(words[g], pair));
              keep_in_register(dot[g][m]);
            }
          }
        }
      }
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; g++) {
        const __m256 scale = load_floats(w.scale_storage, record + w.scale_offset, eighth + g);
        const __m256 bias = load_floats(w.bias_storage, record + w.bias_offset, eighth + g);
#pragma GCC unroll 8
        for (int m = 0; m < R; m++) {
          const __m256 correction = _mm256_mul_ps(bias, _mm256_set1_ps(sj[m]));
          const __m256 t = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(dot[g][m]), correction);
          chain[g][m] = _mm256_fmadd_ps(_mm256_set1_ps(dj[m]), t, chain[g][m]);
        }
      }
    }
    for (int g = 0; g < kGroups; g++) {
      for (int m = 0; m < R; m++) total[g][m] = started ? _mm256_add_ps(total[g][m], chain[g][m]) : chain[g][m];
    }
    started = true;
  }
  for (int g = 0; g < kGroups; g++) {
    for (int m = 0; m < R; m++) store_row(w, out, tile * kTileOutputs + 8 * (eighth + g), m0 + m, total[g][m]);
  }
}

using TileFn = void (*)(const PackedView&, const ActView&, const LinearOutput&, int, int, int);

template <WeightCode C, int B>
TileFn pick_rows(int rows) {
  static const TileFn table[kRows] = {tile_rows<C, B, 1>, tile_rows<C, B, 2>, tile_rows<C, B, 3>, tile_rows<C, B, 4>,
                                      tile_rows<C, B, 5>};
  return table[rows - 1];
}

template <WeightCode C>
TileFn pick_block(int b, int rows) {
  return b == 16 ? pick_rows<C, 16>(rows) : b == 32 ? pick_rows<C, 32>(rows) : pick_rows<C, 64>(rows);
}

TileFn pick(const PackedView& w, int rows) {
  switch (w.code) {
    case WeightCode::kNibble: return pick_block<WeightCode::kNibble>(w.b, rows);
    case WeightCode::kByte: return pick_block<WeightCode::kByte>(w.b, rows);
    default: return pick_block<WeightCode::kByteCentred>(w.b, rows);
  }
}

void quantized(const PackedView& w, const ActView& x, const LinearOutput& out, int tile_begin, int tile_end) {
  for (int tile = tile_begin; tile < tile_end; tile++) {
    for (int eighth = 0; eighth < 4 && tile * kTileOutputs + 8 * eighth < w.N; eighth += kGroups) {
      for (int first = 0; first < x.M; first += x.P) {
        // Nearly equal parts of the panel, as many rows each as registers allow.
        const int end = first + x.P < x.M ? first + x.P : x.M;
        for (int m = first, parts = (end - first + kRows - 1) / kRows; m < end; parts--) {
          const int rows = (end - m + parts - 1) / parts;
          pick(w, rows)(w, x, out, tile, eighth, m);
          m += rows;
        }
      }
    }
  }
}

}  // namespace

const LinearOps* avx2_linear_ops() {
  static const LinearOps ops{"avx2", ActFormat::kInt16Shuffled, ActFormat::kInt16Shuffled, quantized, quantized, dense_tiles};
  return &ops;
}

}  // namespace isobatch
#else
namespace isobatch {
const LinearOps* avx2_linear_ops() { return nullptr; }
}  // namespace isobatch
#endif
