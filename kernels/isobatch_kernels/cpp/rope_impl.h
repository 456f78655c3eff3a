// Rotary embedding of queries and keys, and the write to the cache (docs/numerics.md sections 1 and 4).
// Included only through row_ops_unit.h.
#pragma once

namespace isobatch::ISOBATCH_UNIT {
namespace {

// Rotates one head and hands every element to sink(d, values, n): n values (1..W) of dimensions from d.
// Elements past rotary_dim go through unchanged. The sink may write to x at the place it is given.
template <class Sink>
void rotate_head(const float* x, int head_dim, const RopeArgs& rope, const float* table, const Sink& sink) {
  const int half = rope.rotary_dim / 2;
  const Vf floor = set(kRopeInputFloor);
  for (int i = 0; i < half; i += W) {
    const int n = lanes_left(half - i), first = lanes_left(2 * n), second = lanes_left(2 * n - W);
    Vf c, s, x0, x1;
    split_pairs(load_n(table + 2 * i, first), load_n(table + 2 * i + W, second), c, s);
    if (rope.interleaved) {
      split_pairs(load_n(x + 2 * i, first), load_n(x + 2 * i + W, second), x0, x1);
    } else {
      x0 = load_n(x + i, n);
      x1 = load_n(x + half + i, n);
    }
    x0 = zero_below(x0, floor);
    x1 = zero_below(x1, floor);
    const Vf o0 = fms(x0, c, mul(x1, s)), o1 = fma(x0, s, mul(x1, c));
    if (rope.interleaved) {
      Vf a, b;
      join_pairs(o0, o1, a, b);
      sink(2 * i, a, first);
      if (second > 0) sink(2 * i + W, b, second);
    } else {
      sink(i, o0, n);
      sink(half + i, o1, n);
    }
  }
  for (int d = rope.rotary_dim; d < head_dim; d += W) {
    const int n = lanes_left(head_dim - d);
    sink(d, load_n(x + d, n), n);
  }
}

const float* table_row(const RopeArgs& rope, int position) { return rope.table + (size_t)position * rope.rotary_dim; }

bool all_finite(const float* x, int n) {
  Vi top = zero_i();
  int i = 0;
  for (; i + W <= n; i += W) top = max(top, magnitude(load(x + i)));
  if (i < n) top = max(top, magnitude(load_n(x + i, n - i)));
  return (uint32_t)max_lanes(top) < kNonFiniteBits;
}

struct QuerySink {
  float* q;
  Vf scale;
  void operator()(int d, Vf v, int n) const { store_n(q + d, zero_below(mul(v, scale), set(kQueryFloor)), n); }
};

bool rope_query(float* q, int num_heads, int head_dim, float scale, const RopeArgs& rope, int position) {
  const bool finite = all_finite(q, num_heads * head_dim);
  const float* table = table_row(rope, position);
  for (int h = 0; h < num_heads; h++, q += head_dim) rotate_head(q, head_dim, rope, table, QuerySink{q, set(scale)});
  return finite;
}

// Nearest fp16, saturated; NaN becomes the largest value, so that a cache never holds one (its row is non-finite anyway).
inline Vf saturate_f16(Vf v) { return max(min(v, set(65504.0f)), set(-65504.0f)); }

struct KeySink {
  uint16_t* keys;  // slot of dimension 0
  void operator()(int d, Vf v, int n) const {
    uint16_t bits[W];
    store_f16(bits, saturate_f16(v));
    for (int i = 0; i < n; i++) keys[(size_t)(d + i) * kSlots] = bits[i];
  }
};

bool write_kv(const float* k, const float* v, const RopeArgs& rope, int position, const KvView& kv, int block, int slot) {
  const int total = kv.num_kv_heads * kv.head_dim;
  const bool finite = all_finite(k, total) && all_finite(v, total);
  const float* table = table_row(rope, position);
  for (int h = 0; h < kv.num_kv_heads; h++, k += kv.head_dim, v += kv.head_dim) {
    const size_t head = (size_t)block * kv.block_stride() + h * kv.head_stride();
    rotate_head(k, kv.head_dim, rope, table, KeySink{kv.keys + head + slot});
    uint16_t* values = kv.values + head + (size_t)slot * kv.head_dim;
    int d = 0;
    for (; d + W <= kv.head_dim; d += W) store_f16(values + d, saturate_f16(load(v + d)));
    if (int n = kv.head_dim - d; n > 0) {
      uint16_t bits[W];
      store_f16(bits, saturate_f16(load_n(v + d, n)));
      std::memcpy(values + d, bits, (size_t)n * sizeof(uint16_t));
    }
  }
  return finite;
}

}  // namespace
}  // namespace isobatch::ISOBATCH_UNIT
