// Row statistics of logits (docs/numerics.md section 5). Included only through row_ops_unit.h.
#pragma once

namespace isobatch::ISOBATCH_UNIT {
namespace {

// The largest logit of every group of kGroup ids.
void group_maxima(const float* logits, int V, float* maxima) {
  const Vf lowest = set(-INFINITY);
  for (int start = 0; start < V; start += kGroup) {
    const int end = start + kGroup < V ? start + kGroup : V;
    Vf top = lowest;
    int i = start;
    for (; i + W <= end; i += W) top = max(top, load(logits + i));
    if (i < end) top = max(top, load_n(logits + i, end - i, lowest));
    *maxima++ = max_lanes(top);
  }
}

// Weights of n consecutive ids; `weights` has room for a whole vector at the end, filled with +0.
struct WeightRule {
  Vf m, inverse_temperature;
  Vf operator()(Vf logits) const { return vector_exp(mul(sub(logits, m), inverse_temperature)); }
  void fill(const float* logits, int n, float* weights) const {
    int i = 0;
    for (; i + W <= n; i += W) store(weights + i, (*this)(load(logits + i)));
    if (i < n) store(weights + i, (*this)(load_n(logits + i, n - i, set(-INFINITY))));
  }
};

// sum256 of the weights of one chunk of ids.
float chunk_sum(const float* logits, int n, const WeightRule& rule) {
  Vf chains[256 / W];
  for (int i = 0; i < 256 / W; i++) {
    Vf c = zero();
    int k = i * W;
    for (; k + W <= n; k += 256) c = add(c, rule(load(logits + k)));
    if (k < n) c = add(c, rule(load_n(logits + k, n - k, set(-INFINITY))));
    chains[i] = c;
  }
  return sum_chains(chains);
}

inline int chunk_size(int V, int chunk) {
  const int left = V - chunk * kStatisticsChunk;
  return left < kStatisticsChunk ? left : kStatisticsChunk;
}

int last_positive(const float* weights, int n) {
  while (n > 0 && !(weights[n - 1] > 0.0f)) n--;
  return n - 1;
}

// running: sums of the chunks so far, ascending.
int quantile_id(const float* logits, int V, const float* running, int num_chunks, float target, const WeightRule& rule) {
  alignas(64) float weights[kStatisticsChunk];
  int chunk = 0;
  while (chunk < num_chunks && !(running[chunk] > target)) chunk++;
  if (chunk < num_chunks) {
    const int n = chunk_size(V, chunk);
    rule.fill(logits + chunk * kStatisticsChunk, n, weights);
    float b = chunk == 0 ? 0.0f : running[chunk - 1];
    int i = 0;
    while (i < n && !((b = b + weights[i]) > target)) i++;
    return chunk * kStatisticsChunk + (i < n ? i : last_positive(weights, n));
  }
  for (chunk = num_chunks - 1; chunk >= 0; chunk--) {
    const int n = chunk_size(V, chunk);
    rule.fill(logits + chunk * kStatisticsChunk, n, weights);
    if (int i = last_positive(weights, n); i >= 0) return chunk * kStatisticsChunk + i;
  }
  return 0;  // only where the row is non-finite
}

void statistics(float* logits, int V, const StatisticsArgs& args, StatisticsResult& result, float* scratch) {
  for (int i = 0; i < args.num_edits; i++) {
    float& logit = logits[args.edit_ids[i]];
    logit = logit + flush_below(args.edit_values[i], kInputFloor);
  }
  const int num_groups = (V + kGroup - 1) / kGroup;
  float* maxima = scratch;
  group_maxima(logits, V, maxima);
  float m = maxima[0];
  for (int g = 1; g < num_groups; g++) m = maxima[g] > m ? maxima[g] : m;
  int group = 0;
  while (group < num_groups - 1 && !(maxima[group] == m)) group++;
  int best = group * kGroup;
  while (best < V - 1 && !(logits[best] == m)) best++;
  result.argmax_id = best;
  result.max_logit = m;
  result.normalizer = 0.0f;
  result.quantile_id = -1;

  const WeightRule rule{set(m), set(args.inverse_temperature)};
  if (args.top_k > 0) {
    select_top_k(logits, V, args.top_k, maxima, num_groups, result.top_ids, result.top_logits);
    for (int i = 0; i < args.top_k; i += W) {
      const int n = lanes_left(args.top_k - i);
      store_n(result.top_weights + i, rule(load_n(result.top_logits + i, n, set(-INFINITY))), n);
    }
  }
  if (!args.normalizer && !args.quantile) return;
  const int num_chunks = (V + kStatisticsChunk - 1) / kStatisticsChunk;
  float* running = scratch;  // the maxima are done with
  for (int chunk = 0; chunk < num_chunks; chunk++) {
    const float sum = chunk_sum(logits + chunk * kStatisticsChunk, chunk_size(V, chunk), rule);
    running[chunk] = chunk == 0 ? sum : running[chunk - 1] + sum;
  }
  const float z = running[num_chunks - 1];
  if (args.normalizer) result.normalizer = z;
  if (args.quantile) result.quantile_id = quantile_id(logits, V, running, num_chunks, args.u * z, rule);
}

}  // namespace
}  // namespace isobatch::ISOBATCH_UNIT
