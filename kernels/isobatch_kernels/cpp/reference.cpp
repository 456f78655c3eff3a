#include "reference.h"

#include "contract.h"

namespace isobatch::reference {
namespace {

// The tree of sum256: halves are added until one chain is left.
float add_chains(float (&chains)[256]) {
  for (int w = 128; w >= 1; w /= 2)
    for (int l = 0; l < w; l++) chains[l] = chains[l] + chains[l + w];
  return chains[0];
}

uint32_t largest_magnitude(const float* x, int n) {
  uint32_t a = 0;
  for (int k = 0; k < n; k++) a = magnitude_bits(x[k]) > a ? magnitude_bits(x[k]) : a;
  return a;
}

}  // namespace

float sum256(const float* v, int n) {
  float chains[256] = {};
  for (int k = 0; k < n; k++) chains[k % 256] = chains[k % 256] + v[k];
  return add_chains(chains);
}

// Section 2.
bool quantize(const float* x, int K, int A, int limit, int16_t* q, float* d) {
  const float largest = (float)limit;
  bool finite = true;
  for (int start = 0, g = 0; start < K; start += A, g++) {
    const int n = K - start < A ? K - start : A;
    const uint32_t a = largest_magnitude(x + start, n);
    if (a >= kNonFiniteBits) finite = false;
    if (a >= kNonFiniteBits || a < kBlockFloorBits) {
      d[g] = 0.0f;
      for (int k = start; k < start + n; k++) q[k] = 0;
      continue;
    }
    const float inverse = largest * x1_recip(bits_float(a));
    d[g] = bits_float(a) * inverse_limit(limit);
    for (int k = start; k < start + n; k++) {
      const float v = std::rint(x[k] * inverse);
      q[k] = (int16_t)(v < -largest ? -largest : v > largest ? largest : v);
    }
  }
  return finite;
}

// Section 3.
void linear(const Weights& w, int A, const int16_t* q, const float* d, const float* bias, const float* residual, float* y) {
  const int b = w.G < A ? w.G : A, NB = w.K / b;
  for (int n = 0; n < w.N; n++) {
    float total = 0.0f;
    bool first = true;
    for (int slice = 0; slice < kSlices; slice++) {
      const int begin = slice_begin(slice, NB), end = slice_begin(slice + 1, NB);
      if (begin == end) continue;
      float acc = 0.0f;
      for (int j = begin; j < end; j++) {
        int32_t p = 0, s = 0;
        for (int k = j * b; k < (j + 1) * b; k++) {
          p += (int32_t)q[k] * w.q[(size_t)n * w.K + k];
          s += q[k];
        }
        const size_t group = (size_t)n * (w.K / w.G) + j * b / w.G;
        const float t = std::fma(w.scales[group], (float)p, w.biases[group] * (float)s);
        acc = std::fma(d[j * b / A], t, acc);
      }
      total = first ? acc : total + acc;
      first = false;
    }
    if (bias) total = total + bias[n];
    if (residual) total = total + residual[n];
    y[n] = total;
  }
}

// Section 3, dense weights.
bool dense_linear(const float* w, int N, int K, int type, const float* x, const float* bias, const float* residual, float* y) {
  const uint32_t a = largest_magnitude(x, K);
  std::vector<float> scaled(K, 0.0f);
  const int exponent = (int)(a >> 23) - 127;
  if (a >= kDenseRowFloorBits && a < kNonFiniteBits) {
    const float down = bits_float((uint32_t)(127 - exponent) << 23);
    for (int k = 0; k < K; k++) {
      float v = x[k] * down;
      if (type == 0) {
        v = from_f16(to_f16(v));
      } else {
        const uint32_t bits = float_bits(v);
        v = bits_float((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
      }
      scaled[k] = flush_below(v, kDenseFloor);
    }
  }
  const float up = a < kDenseRowFloorBits ? 1.0f : bits_float((uint32_t)(exponent + 127) << 23);
  for (int n = 0; n < N; n++) {
    float total = 0.0f;
    bool first = true;
    for (int slice = 0; slice < kSlices; slice++) {
      const int begin = slice_begin(slice, K), end = slice_begin(slice + 1, K);
      if (begin == end) continue;
      float acc = 0.0f;
      for (int k = begin; k < end; k++) acc = std::fma(scaled[k], flush_below(w[(size_t)n * K + k], kDenseFloor), acc);
      total = first ? acc : total + acc;
      first = false;
    }
    total = total * up;
    if (bias) total = total + bias[n];
    if (residual) total = total + residual[n];
    y[n] = total;
  }
  return a < kNonFiniteBits;
}

// Section 1.
void embed(const Weights& w, int id, float* x) {
  for (int k = 0; k < w.K; k++) {
    const size_t group = (size_t)id * (w.K / w.G) + k / w.G;
    x[k] = std::fma(w.scales[group], (float)w.q[(size_t)id * w.K + k], w.biases[group]);
  }
}

uint16_t to_f16(float x) {
  if (x > 65504.0f) x = 65504.0f;
  if (!(x >= -65504.0f)) x = x < 0.0f ? -65504.0f : 65504.0f;  // also NaN, whose row is non-finite anyway
  const uint32_t sign = float_bits(x) >> 16 & 0x8000u, a = magnitude_bits(x);
  if (a < 0x38800000u)  // below 2^-14 the spacing is 2^-24
    return (uint16_t)(sign | (uint32_t)std::rint(bits_float(a) * 0x1p24f));
  return (uint16_t)(sign | (a - (112u << 23) + 0xfffu + (a >> 13 & 1u)) >> 13);
}

float from_f16(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest < 0x400u) return bits_float(sign | float_bits((float)rest * 0x1p-24f));
  if (rest < 0x7c00u) return bits_float(sign | ((rest << 13) + (112u << 23)));
  return bits_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
}

// Section 4.
void rms_norm(const float* x, const float* w, float eps, int K, float* y) {
  float chains[256] = {};
  for (int k = 0; k < K; k++) {
    const float v = flush_below(x[k], kInputFloor);
    chains[k % 256] = std::fma(v, v, chains[k % 256]);
  }
  const float r = x1_rsqrt(std::fma(add_chains(chains), 1.0f / (float)K, eps));
  for (int k = 0; k < K; k++) y[k] = (flush_below(x[k], kInputFloor) * r) * w[k];
}

void silu_mul(const float* gate, const float* up, int K, float* y) {
  for (int k = 0; k < K; k++) y[k] = x1_silu_mul(gate[k], up[k]);
}

void rope(float* x, int num_heads, int head_dim, const RopeArgs& rope, int position) {
  const int half = rope.rotary_dim / 2;
  const float* table = rope.table + (size_t)position * rope.rotary_dim;
  for (int h = 0; h < num_heads; h++, x += head_dim) {
    for (int i = 0; i < half; i++) {
      float& first = x[rope.interleaved ? 2 * i : i];
      float& second = x[rope.interleaved ? 2 * i + 1 : i + half];
      const float x0 = flush_below(first, kRopeInputFloor), x1 = flush_below(second, kRopeInputFloor);
      const float c = table[2 * i], s = table[2 * i + 1];
      first = std::fma(x0, c, -(x1 * s));
      second = std::fma(x0, s, x1 * c);
    }
  }
}

void attention(const float* q, const float* keys, const float* values, int num_keys, int first_visible, int head_dim, float* out) {
  float m = 0.0f, l = 0.0f;
  bool any = false;
  std::vector<float> o(head_dim), chunk_o(head_dim);
  for (int start = 0; start < num_keys; start += kAttentionChunk) {
    const int first = start > first_visible ? start : first_visible;
    const int last = num_keys < start + kAttentionChunk ? num_keys : start + kAttentionChunk;
    if (first >= last) continue;

    float p[kAttentionChunk] = {};  // by position in the chunk; hidden keys stay +0
    float chunk_m = -INFINITY;
    for (int j = first; j < last; j++) {
      float c = 0.0f;
      for (int d = 0; d < head_dim; d++) c = std::fma(q[d], keys[(size_t)j * head_dim + d], c);
      p[j - start] = c;
      chunk_m = c > chunk_m ? c : chunk_m;
    }
    for (int j = first; j < last; j++) p[j - start] = x1_exp(p[j - start] - chunk_m);
    const float chunk_l = sum256(p, kAttentionChunk);
    for (int d = 0; d < head_dim; d++) {
      float c = 0.0f;
      for (int j = first; j < last; j++) c = std::fma(p[j - start], values[(size_t)j * head_dim + d], c);
      chunk_o[d] = flush_below(c, kOutputFloor);
    }

    if (!any) {
      m = chunk_m;
      l = chunk_l;
      o = chunk_o;
      any = true;
      continue;
    }
    const float top = m > chunk_m ? m : chunk_m;
    const float fa = x1_exp(m - top), fc = x1_exp(chunk_m - top);
    for (int d = 0; d < head_dim; d++) o[d] = flush_below(std::fma(o[d], fa, chunk_o[d] * fc), kOutputFloor);
    l = std::fma(l, fa, chunk_l * fc);
    m = top;
  }
  for (int d = 0; d < head_dim; d++) out[d] = o[d] * x1_recip(l);
}

// Section 5.
void statistics(float* logits, int V, const StatisticsArgs& args, StatisticsResult& result) {
  for (int i = 0; i < args.num_edits; i++)
    logits[args.edit_ids[i]] = logits[args.edit_ids[i]] + flush_below(args.edit_values[i], kInputFloor);
  int best = 0;
  for (int i = 1; i < V; i++) best = logits[i] > logits[best] ? i : best;
  const float m = logits[best];
  result.argmax_id = best;
  result.max_logit = m;
  result.normalizer = 0.0f;
  result.quantile_id = -1;

  std::vector<float> weights(V);
  for (int i = 0; i < V; i++) weights[i] = x1_exp((logits[i] - m) * args.inverse_temperature);

  std::vector<uint8_t> taken(V, 0);
  for (int rank = 0; rank < args.top_k; rank++) {
    int next = -1;
    for (int i = 0; i < V; i++)
      if (!taken[i] && (next < 0 || logits[i] > logits[next])) next = i;
    if (next >= 0) taken[next] = 1;
    result.top_ids[rank] = next;  // past V: no id, the logit -infinity, the weight +0
    result.top_logits[rank] = next < 0 ? -INFINITY : logits[next];
    result.top_weights[rank] = next < 0 ? 0.0f : weights[next];
  }

  std::vector<float> running;
  for (int start = 0; start < V; start += kStatisticsChunk) {
    const float sum = sum256(&weights[start], V - start < kStatisticsChunk ? V - start : kStatisticsChunk);
    running.push_back(running.empty() ? sum : running.back() + sum);
  }
  const float z = running.back();
  if (args.normalizer) result.normalizer = z;
  if (!args.quantile) return;
  const float target = args.u * z;
  const int num_chunks = (int)running.size();
  int chunk = 0;
  while (chunk < num_chunks && !(running[chunk] > target)) chunk++;
  int begin = 0, end = V;
  if (chunk < num_chunks) {
    begin = chunk * kStatisticsChunk;
    end = V < begin + kStatisticsChunk ? V : begin + kStatisticsChunk;
    float b = chunk == 0 ? 0.0f : running[chunk - 1];
    for (int i = begin; i < end; i++) {
      b = b + weights[i];
      if (b > target) {
        result.quantile_id = i;
        return;
      }
    }
  }
  int last = end - 1;
  while (last > begin && !(weights[last] > 0.0f)) last--;
  result.quantile_id = last;
}

}  // namespace isobatch::reference
