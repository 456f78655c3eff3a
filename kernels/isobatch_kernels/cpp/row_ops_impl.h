// RMS norm, SwiGLU and quantisation of one row (docs/numerics.md sections 2 and 4). Included only through row_ops_unit.h.
#pragma once

namespace isobatch::ISOBATCH_UNIT {
namespace {

// Where a row's values come from: load(k, n) gives elements k.. k+n-1, n in 0..W, missing lanes +0.
struct PlainSource {
  const float* x;
  Vf load(int k, int n) const { return n >= W ? ISOBATCH_UNIT::load(x + k) : load_n(x + k, n); }
};

struct NormSource {
  const float *x, *w;
  Vf r;
  Vf load(int k, int n) const {
    const Vf floor = set(kInputFloor);
    if (n >= W) return mul(mul(zero_below(ISOBATCH_UNIT::load(x + k), floor), r), ISOBATCH_UNIT::load(w + k));
    return mul(mul(zero_below(load_n(x + k, n), floor), r), load_n(w + k, n));
  }
};

struct GateSource {
  const float *gate, *up;
  Vf load(int k, int n) const {
    if (n >= W) return vector_silu_mul(ISOBATCH_UNIT::load(gate + k), ISOBATCH_UNIT::load(up + k));
    return vector_silu_mul(load_n(gate + k, n), load_n(up + k, n));
  }
};

inline int lanes_left(int n) { return n < 0 ? 0 : n < W ? n : W; }

NormSource norm_source(const float* x, const float* w, float eps, int K) {
  const Vf floor = set(kInputFloor);
  Vf chains[256 / W];
  for (int i = 0; i < 256 / W; i++) {
    Vf c = zero();
    int k = i * W;
    for (; k + W <= K; k += 256) {
      Vf v = zero_below(load(x + k), floor);
      c = fma(v, v, c);
    }
    if (k < K) {
      Vf v = zero_below(load_n(x + k, K - k), floor);
      c = fma(v, v, c);
    }
    chains[i] = c;
  }
  float mean = std::fma(sum_chains(chains), 1.0f / (float)K, eps);
  return {x, w, set(x1_rsqrt(mean))};
}

// Writes the integers of elements [begin, end) of one block and returns their sums by lane.
template <ActFormat FORMAT>
inline Vi write_block(const float* values, int begin, int end, int A, int limit, float inverse, uint8_t* block) {
  const Vf inv = set(inverse);
  Vi sums = zero_i();
  for (int k = begin; k < end; k += W) {
    const Vi q = clamp(to_int(mul(load(values + k), inv)), -limit, limit);
    sums = add(sums, q);
    if (FORMAT == ActFormat::kInt16) store_int16(block, k, q);
    else if (FORMAT == ActFormat::kInt16Shuffled) store_int16_shuffled(block, k, q);
    else if (FORMAT == ActFormat::kHalves) store_halves(block, k, A, q);
    else store_bytes(block, k, q);
  }
  return sums;
}

// Works on 16 blocks at a time, so that their reciprocals are one vector computation instead of a chain for each block.
template <ActFormat FORMAT, class Source>
void quantize_blocks(const Source& source, const ActView& out, int m) {
  constexpr int kBatch = 16;
  alignas(64) float values[kBatch * 64];
  alignas(64) float largest[kBatch], inverse[kBatch], scale[kBatch];
  const int A = out.A, K = out.K;
  bool finite = true;
  for (int first = 0; first < out.NB; first += kBatch) {
    const int count = out.NB - first < kBatch ? out.NB - first : kBatch;
    const int start = first * A, left = K - start, size = count * A;
    const int whole = left < size ? left / W * W : size;  // elements in vectors that K does not cut
    for (int k = 0; k < whole; k += W) store(values + k, source.load(start + k, W));
    for (int k = whole; k < size; k += W) store(values + k, source.load(start + k, lanes_left(left - k)));
    for (int b = 0; b < kBatch; b++) largest[b] = 0.0f;
    for (int b = 0; b < count; b++) {
      Vi top = zero_i();
      for (int k = 0; k < A; k += W) top = max(top, magnitude(load(values + b * A + k)));
      int32_t bits = max_lanes(top);
      std::memcpy(largest + b, &bits, 4);
    }
    for (int b = 0; b < kBatch; b += W) {
      Vf a = load(largest + b);
      store(inverse + b, mul(set((float)out.limit), vector_recip(a)));
      store(scale + b, mul(a, set(inverse_limit(out.limit))));
    }
    for (int b = 0; b < count; b++) {
      const size_t at = out.block_index(m, first + b);
      uint8_t* block = out.q + at * 2 * A;
      uint32_t bits;
      std::memcpy(&bits, largest + b, 4);
      Vi low = zero_i(), rest = zero_i();
      if (bits < kBlockFloorBits || bits >= kNonFiniteBits) {
        finite = finite && bits < kNonFiniteBits;
        std::memset(block, 0, (FORMAT == ActFormat::kBytes ? 1 : 2) * (size_t)A);
        out.d[at] = 0.0f;
      } else {
        low = write_block<FORMAT>(values + b * A, 0, 16, A, out.limit, inverse[b], block);
        rest = write_block<FORMAT>(values + b * A, 16, A, A, out.limit, inverse[b], block);
        out.d[at] = scale[b];
      }
      out.s[at] = (float)sum_lanes(add(low, rest));
      if (out.half_sums) {
        out.s_low[at] = (float)sum_lanes(low);
        out.s_high[at] = (float)sum_lanes(rest);
      }
    }
  }
  if (!finite && out.non_finite[m] == 0) out.non_finite[m] = out.op_index + 1;
}

template <class Source>
void quantize_source(const Source& source, const ActView& out, int m) {
  switch (out.format) {
    case ActFormat::kInt16: quantize_blocks<ActFormat::kInt16>(source, out, m); break;
    case ActFormat::kInt16Shuffled: quantize_blocks<ActFormat::kInt16Shuffled>(source, out, m); break;
    case ActFormat::kHalves: quantize_blocks<ActFormat::kHalves>(source, out, m); break;
    case ActFormat::kBytes: quantize_blocks<ActFormat::kBytes>(source, out, m); break;
  }
}

template <class Source>
void copy_source(const Source& source, int K, float* y) {
  int k = 0;
  for (; k + W <= K; k += W) store(y + k, source.load(k, W));
  if (k < K) store_n(y + k, source.load(k, K - k), K - k);
}

void quantize(const float* x, const ActView& out, int m) { quantize_source(PlainSource{x}, out, m); }
void norm_quantize(const float* x, const float* w, float eps, const ActView& out, int m) {
  quantize_source(norm_source(x, w, eps, out.K), out, m);
}
void norm(const float* x, const float* w, float eps, int K, float* y) { copy_source(norm_source(x, w, eps, K), K, y); }
void gate_quantize(const float* gate, const float* up, const ActView& out, int m) {
  quantize_source(GateSource{gate, up}, out, m);
}
void gate(const float* gate, const float* up, int K, float* y) { copy_source(GateSource{gate, up}, K, y); }

}  // namespace
}  // namespace isobatch::ISOBATCH_UNIT
