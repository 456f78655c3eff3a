// The reference behind the row-operation table, so that the engine can run a whole program on it.
#include <vector>

#include "contract.h"
#include "linear.h"
#include "reference.h"
#include "row_ops.h"

namespace isobatch {
namespace {

float sum_of(const int16_t* q, int n) {
  int sum = 0;
  for (int k = 0; k < n; k++) sum += q[k];
  return (float)sum;
}

bool finite(const float* x, int n) {
  for (int k = 0; k < n; k++) {
    if (magnitude_bits(x[k]) >= kNonFiniteBits) return false;
  }
  return true;
}

void quantize(const float* x, const ActView& out, int m) {
  std::vector<int16_t> q((size_t)out.NB * out.A, 0);
  std::vector<float> d(out.NB);
  if (!reference::quantize(x, out.K, out.A, out.limit, q.data(), d.data()) && out.non_finite[m] == 0) out.non_finite[m] = out.op_index + 1;
  for (int g = 0; g < out.NB; g++) {
    const size_t at = out.block_index(m, g);
    const int16_t* block = &q[(size_t)g * out.A];
    std::memcpy(out.q + at * 2 * out.A, block, 2 * (size_t)out.A);
    out.d[at] = d[g];
    out.s[at] = sum_of(block, out.A);
    if (out.half_sums) {
      out.s_low[at] = sum_of(block, 16);
      out.s_high[at] = sum_of(block + 16, 16);
    }
  }
}

void norm(const float* x, const float* w, float eps, int K, float* y) { reference::rms_norm(x, w, eps, K, y); }

void norm_quantize(const float* x, const float* w, float eps, const ActView& out, int m) {
  std::vector<float> y(out.K);
  reference::rms_norm(x, w, eps, out.K, y.data());
  quantize(y.data(), out, m);
}

void gate(const float* gate, const float* up, int K, float* y) { reference::silu_mul(gate, up, K, y); }

void gate_quantize(const float* gate, const float* up, const ActView& out, int m) {
  std::vector<float> y(out.K);
  reference::silu_mul(gate, up, out.K, y.data());
  quantize(y.data(), out, m);
}

bool rope_query(float* q, int num_heads, int head_dim, float scale, const RopeArgs& rope, int position) {
  const bool ok = finite(q, num_heads * head_dim);
  reference::rope(q, num_heads, head_dim, rope, position);
  for (int i = 0; i < num_heads * head_dim; i++) q[i] = flush_below(q[i] * scale, kQueryFloor);
  return ok;
}

bool write_kv(const float* k, const float* v, const RopeArgs& rope, int position, const KvView& kv, int block, int slot) {
  const int total = kv.num_kv_heads * kv.head_dim;
  std::vector<float> keys(k, k + total);
  reference::rope(keys.data(), kv.num_kv_heads, kv.head_dim, rope, position);
  for (int i = 0; i < total; i++) {
    const int head = i / kv.head_dim, d = i % kv.head_dim;
    const size_t base = (size_t)block * kv.block_stride() + head * kv.head_stride();
    kv.keys[base + (size_t)d * kv.block_size + slot] = reference::to_f16(keys[i]);
    kv.values[base + (size_t)slot * kv.head_dim + d] = reference::to_f16(v[i]);
  }
  return finite(k, total) && finite(v, total);
}

void attention(const AttentionArgs& args, const KvView& kv, float* out, int out_stride, float*) {
  const int count = args.position + 1, dim = kv.head_dim;
  std::vector<float> keys((size_t)count * dim), values(keys.size());
  for (int j = args.first_visible; j < count; j++) {
    const size_t base = (size_t)args.block_table[j / kv.block_size] * kv.block_stride() + args.kv_head * kv.head_stride();
    const int slot = j % kv.block_size;
    for (int d = 0; d < dim; d++) {
      keys[(size_t)j * dim + d] = reference::from_f16(kv.keys[base + (size_t)d * kv.block_size + slot]);
      values[(size_t)j * dim + d] = reference::from_f16(kv.values[base + (size_t)slot * dim + d]);
    }
  }
  for (int h = 0; h < args.group; h++) {
    reference::attention(args.q + (size_t)h * args.q_stride, keys.data(), values.data(), count, args.first_visible, dim,
                         out + (size_t)h * out_stride);
  }
}

void statistics(float* logits, int V, const StatisticsArgs& args, StatisticsResult& result, float*) {
  reference::statistics(logits, V, args, result);
}

}  // namespace

// Attention by chunks is a way to share work, not part of the definition: absent here.
const RowOps* reference_row_ops() {
  static const RowOps table{"reference", quantize, norm_quantize, norm,    gate_quantize, gate,
                            rope_query,  write_kv, attention,     nullptr, nullptr, nullptr,      statistics};
  return &table;
}

}  // namespace isobatch
