// The reference and every row-operation table on numpy arrays, one call an operation: for tests and for the self-test.
// Arrays are C-contiguous; results go into arrays of the caller, whose sizes are checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "contract.h"
#include "cpu_features.h"
#include "reference.h"
#include "rope_table.h"
#include "row_ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace isobatch {
namespace {

template <class T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
using Floats = Array<float>;

void require(bool holds, const char* rule) {
  if (!holds) throw nb::value_error(rule);
}

const RowOps* find_row_ops(const std::string& name) {
  const CpuFeatures cpu = detect_cpu_features();
  if (name == "scalar") return scalar_row_ops();
  if (name == "avx2" && cpu.avx2) return avx2_row_ops();
  if (name == "avx512" && cpu.avx512_vnni) return avx512_row_ops();
  if (name == "neon" && cpu.neon) return neon_row_ops();
  return nullptr;
}

std::vector<std::string> row_ops_names() {
  std::vector<std::string> names;
  for (const char* name : {"scalar", "avx2", "avx512", "neon"})
    if (find_row_ops(name)) names.push_back(name);
  return names;
}

// Buffers of views.h's ActView, kept by numpy arrays.
struct Activations {
  int width, block, panel, limit;
  ActFormat format;
  bool half_sums;
  uint32_t op_index;
  Array<uint8_t> q;
  Floats d, s, s_low, s_high;
  Array<uint32_t> non_finite;

  ActView view(int row) const {
    const int blocks = (width + block - 1) / block, rows = (int)non_finite.size();
    const size_t total = (size_t)(rows + panel - 1) / panel * panel * blocks;
    require(width > 0 && (block == 32 || block == 64), "[activations] width must be positive and block 32 or 64");
    require(row >= 0 && row < rows, "[activations] row must be inside the buffer");
    require(q.size() == total * 2 * block && d.size() == total && s.size() == total && s_low.size() == total &&
                s_high.size() == total,
            "[activations] q, d, s, s_low and s_high must cover whole panels");
    return {width,    block,        blocks,       rows,           panel,    limit, format, half_sums, q.data(), d.data(),
            s.data(), s_low.data(), s_high.data(), non_finite.data(), op_index};
  }
};

struct Cache {
  Array<uint16_t> keys, values;
  int num_kv_heads, head_dim, block_size;

  KvView view() const {
    KvView kv{num_kv_heads, head_dim, block_size, 0, keys.data(), values.data()};
    if (const char* problem = cache_problem(kv)) throw nb::value_error(problem);
    kv.num_blocks = (int32_t)(keys.size() / kv.block_stride());
    require(keys.size() == values.size() && keys.size() == kv.num_blocks * kv.block_stride(),
            "[cache] keys and values must be whole blocks");
    return kv;
  }
};

RopeArgs rope_args(const Floats& table, int rotary_dim, bool interleaved, int position) {
  require(position >= 0 && table.size() >= (size_t)(position + 1) * rotary_dim, "[rope] table must reach the position");
  return {table.data(), rotary_dim, interleaved};
}

using StatisticsTuple = std::tuple<int, float, float, int>;

StatisticsArgs statistics_args(const Floats& logits, bool normalizer, bool quantile, float inverse_temperature, float u,
                               const Array<int32_t>& edit_ids, const Floats& edit_values, const Array<int32_t>& top_ids,
                               const Floats& top_logits, const Floats& top_weights) {
  require(logits.size() > 0 && edit_ids.size() == edit_values.size(), "[statistics] edits must be pairs, logits not empty");
  require(top_ids.size() == top_logits.size() && top_ids.size() == top_weights.size(), "[statistics] top arrays must agree");
  for (size_t i = 0; i < edit_ids.size(); i++)
    require((size_t)edit_ids.data()[i] < logits.size(), "[statistics] edit ids must be inside the vocabulary");
  return {normalizer,          quantile, (int32_t)top_ids.size(), inverse_temperature, u, edit_ids.data(), edit_values.data(),
          (int32_t)edit_ids.size()};
}

StatisticsTuple as_tuple(const StatisticsResult& r) { return {r.argmax_id, r.max_logit, r.normalizer, r.quantile_id}; }

// One table; every call runs with subnormals kept or flushed, as the constructor says.
class BoundRowOps {
 public:
  BoundRowOps(const std::string& name, bool flush_subnormals) : ops_(find_row_ops(name)), flush_(flush_subnormals) {
    if (!ops_) throw nb::value_error(("[row_ops] must be a table of this machine, got " + name).c_str());
  }
  std::string name() const { return ops_->name; }

  void quantize(Floats x, const Activations& out, int row) const {
    const ActView view = out.view(row);
    require(x.size() == (size_t)out.width, "[quantize] x must have width elements");
    ScopedFloatMode mode(flush_);
    ops_->quantize(x.data(), view, row);
  }
  void norm_quantize(Floats x, Floats w, float eps, const Activations& out, int row) const {
    const ActView view = out.view(row);
    require(x.size() == (size_t)out.width && w.size() == x.size(), "[norm_quantize] x and w must have width elements");
    ScopedFloatMode mode(flush_);
    ops_->norm_quantize(x.data(), w.data(), eps, view, row);
  }
  void norm(Floats x, Floats w, float eps, Floats y) const {
    require(x.size() == w.size() && x.size() == y.size(), "[norm] x, w and y must have equal sizes");
    ScopedFloatMode mode(flush_);
    ops_->norm(x.data(), w.data(), eps, (int)x.size(), y.data());
  }
  void gate_quantize(Floats gate, Floats up, const Activations& out, int row) const {
    const ActView view = out.view(row);
    require(gate.size() == (size_t)out.width && up.size() == gate.size(), "[gate_quantize] gate and up must have width elements");
    ScopedFloatMode mode(flush_);
    ops_->gate_quantize(gate.data(), up.data(), view, row);
  }
  void gate(Floats gate, Floats up, Floats y) const {
    require(gate.size() == up.size() && gate.size() == y.size(), "[gate] gate, up and y must have equal sizes");
    ScopedFloatMode mode(flush_);
    ops_->gate(gate.data(), up.data(), (int)gate.size(), y.data());
  }
  bool rope_query(Floats q, float scale, Floats table, int rotary_dim, bool interleaved, int position) const {
    require(q.ndim() == 2, "[rope_query] q must be (heads, head_dim)");
    const RopeArgs rope = rope_args(table, rotary_dim, interleaved, position);
    ScopedFloatMode mode(flush_);
    return ops_->rope_query(q.data(), (int)q.shape(0), (int)q.shape(1), scale, rope, position);
  }
  bool write_kv(Floats k, Floats v, Floats table, int rotary_dim, bool interleaved, int position, const Cache& cache, int block,
                int slot) const {
    const KvView kv = cache.view();
    require(k.size() == (size_t)kv.num_kv_heads * kv.head_dim && v.size() == k.size(), "[write_kv] k and v must be (heads, head_dim)");
    require(block >= 0 && block < kv.num_blocks && slot >= 0 && slot < kv.block_size, "[write_kv] block and slot must exist");
    const RopeArgs rope = rope_args(table, rotary_dim, interleaved, position);
    ScopedFloatMode mode(flush_);
    return ops_->write_kv(k.data(), v.data(), rope, position, kv, block, slot);
  }
  void attention(Floats q, const Cache& cache, Array<int32_t> blocks, int kv_head, int position, int first_visible, Floats out) const {
    const KvView kv = cache.view();
    const AttentionArgs args = attention_args(q, kv, blocks, kv_head, position, first_visible);
    require(out.size() == q.size(), "[attention] out must be (group, head_dim)");
    std::vector<float> scratch = dirty_scratch(attention_scratch_floats(args.group, kv.head_dim));
    ScopedFloatMode mode(flush_);
    ops_->attention(args, kv, out.data(), kv.head_dim, scratch.data());
  }
  bool attention_chunk(Floats q, const Cache& cache, Array<int32_t> blocks, int kv_head, int position, int first_visible, int chunk,
                       Floats partials) const {
    const KvView kv = cache.view();
    const AttentionArgs args = attention_args(q, kv, blocks, kv_head, position, first_visible);
    require(partials.size() == args.group * attention_partial_floats(kv.head_dim), "[attention_chunk] partials must be (group, 2 + head_dim)");
    std::vector<float> scratch = dirty_scratch(attention_scratch_floats(args.group, kv.head_dim));
    ScopedFloatMode mode(flush_);
    return ops_->attention_chunk(args, kv, chunk, partials.data(), scratch.data());
  }
  void attention_merge(Floats partials, Array<uint8_t> present, Floats out) const {
    const size_t stride = attention_partial_floats((int)out.size());
    require(partials.size() == present.size() * stride, "[attention_merge] partials must be (chunks, 2 + head_dim)");
    std::vector<const float*> list;
    for (size_t i = 0; i < present.size(); i++) list.push_back(partials.data() + i * stride);
    ScopedFloatMode mode(flush_);
    ops_->attention_merge(list.data(), present.data(), (int)present.size(), (int)out.size(), out.data());
  }
  StatisticsTuple statistics(Floats logits, bool normalizer, bool quantile, float inverse_temperature, float u,
                             Array<int32_t> edit_ids, Floats edit_values, Array<int32_t> top_ids, Floats top_logits,
                             Floats top_weights) const {
    const StatisticsArgs args = statistics_args(logits, normalizer, quantile, inverse_temperature, u, edit_ids, edit_values,
                                                top_ids, top_logits, top_weights);
    StatisticsResult result{0, 0, 0, 0, top_ids.data(), top_logits.data(), top_weights.data()};
    std::vector<float> scratch = dirty_scratch(logits.size());
    ScopedFloatMode mode(flush_);
    ops_->statistics(logits.data(), (int)logits.size(), args, result, scratch.data());
    return as_tuple(result);
  }

 private:
  static std::vector<float> dirty_scratch(size_t n) { return std::vector<float>(n, std::numeric_limits<float>::quiet_NaN()); }
  static AttentionArgs attention_args(const Floats& q, const KvView& kv, const Array<int32_t>& blocks, int kv_head, int position,
                                      int first_visible) {
    require(q.ndim() == 2 && q.shape(1) == (size_t)kv.head_dim, "[attention] q must be (group, head_dim)");
    require(first_visible >= 0 && first_visible <= position && kv_head >= 0 && kv_head < kv.num_kv_heads,
            "[attention] positions and kv_head must exist");
    require(blocks.size() * kv.block_size > (size_t)position, "[attention] blocks must reach the position");
    for (int i = first_visible / kv.block_size; i <= position / kv.block_size; i++)
      require(blocks.data()[i] >= 0 && blocks.data()[i] < kv.num_blocks, "[attention] visible blocks must exist");
    return {q.data(), kv.head_dim, (int32_t)q.shape(0), blocks.data(), kv_head, position, first_visible};
  }

  const RowOps* ops_;
  bool flush_;
};

reference::Weights reference_weights(const Array<int16_t>& q, const Floats& scales, const Floats& biases) {
  require(q.ndim() == 2 && scales.ndim() == 2 && scales.size() == biases.size() && scales.shape(0) == q.shape(0),
          "[reference] q must be (N, K), scales and biases (N, K/G)");
  reference::Weights w;
  w.N = (int)q.shape(0);
  w.K = (int)q.shape(1);
  w.G = w.K / (int)scales.shape(1);
  w.q.assign(q.data(), q.data() + q.size());
  w.scales.assign(scales.data(), scales.data() + scales.size());
  w.biases.assign(biases.data(), biases.data() + biases.size());
  return w;
}

const float* data_or_null(const std::optional<Floats>& a) { return a ? a->data() : nullptr; }

template <float (*FUNCTION)(float)>
void apply(Floats x, Floats y) {
  require(x.size() == y.size(), "[reference] x and y must have equal sizes");
  for (size_t i = 0; i < x.size(); i++) y.data()[i] = FUNCTION(x.data()[i]);
}

void bind_reference_functions(nb::module_& m) {
  m.def("quantize", [](Floats x, int block, Array<int16_t> q, Floats d, int activation_bits) {
    require(q.size() == x.size() && d.size() == (x.size() + block - 1) / block, "[quantize] q must be (K), d (blocks)");
    return reference::quantize(x.data(), (int)x.size(), block, activation_limit(activation_bits), q.data(), d.data());
  }, "x"_a, "block"_a, "q"_a, "d"_a, "activation_bits"_a = 12);
  m.def("linear", [](Array<int16_t> wq, Floats scales, Floats biases, int block, Array<int16_t> q, Floats d,
                     std::optional<Floats> bias, std::optional<Floats> residual, Floats y) {
    reference::linear(reference_weights(wq, scales, biases), block, q.data(), d.data(), data_or_null(bias), data_or_null(residual),
                      y.data());
  }, "wq"_a, "scales"_a, "biases"_a, "block"_a, "q"_a, "d"_a, "bias"_a.none(), "residual"_a.none(), "y"_a);
  m.def("dense_linear", [](Floats w, bool bfloat, Floats x, std::optional<Floats> bias, std::optional<Floats> residual, Floats y) {
    require(w.ndim() == 2 && w.shape(1) == x.size() && w.shape(0) == y.size(), "[dense_linear] w must be (N, K)");
    return reference::dense_linear(w.data(), (int)w.shape(0), (int)w.shape(1), bfloat ? 1 : 0, x.data(), data_or_null(bias),
                                   data_or_null(residual), y.data());
  }, "w"_a, "bfloat"_a, "x"_a, "bias"_a.none(), "residual"_a.none(), "y"_a);
  m.def("embed", [](Array<int16_t> wq, Floats scales, Floats biases, int id, Floats x) {
    reference::embed(reference_weights(wq, scales, biases), id, x.data());
  });
  m.def("sum256", [](Floats v) { return reference::sum256(v.data(), (int)v.size()); });
  m.def("rms_norm", [](Floats x, Floats w, float eps, Floats y) {
    require(x.size() == w.size() && x.size() == y.size(), "[rms_norm] x, w and y must have equal sizes");
    reference::rms_norm(x.data(), w.data(), eps, (int)x.size(), y.data());
  });
  m.def("silu_mul", [](Floats gate, Floats up, Floats y) {
    require(gate.size() == up.size() && gate.size() == y.size(), "[silu_mul] gate, up and y must have equal sizes");
    reference::silu_mul(gate.data(), up.data(), (int)gate.size(), y.data());
  });
  m.def("rope", [](Floats x, Floats table, int rotary_dim, bool interleaved, int position) {
    require(x.ndim() == 2, "[rope] x must be (heads, head_dim)");
    reference::rope(x.data(), (int)x.shape(0), (int)x.shape(1), rope_args(table, rotary_dim, interleaved, position), position);
  });
  m.def("to_f16", [](Floats x, Array<uint16_t> h) {
    for (size_t i = 0; i < x.size(); i++) h.data()[i] = reference::to_f16(x.data()[i]);
  });
  m.def("from_f16", [](Array<uint16_t> h, Floats x) {
    for (size_t i = 0; i < x.size(); i++) x.data()[i] = reference::from_f16(h.data()[i]);
  });
  m.def("attention", [](Floats q, Floats keys, Floats values, int first_visible, Floats out) {
    require(keys.ndim() == 2 && keys.shape(1) == q.size() && values.size() == keys.size() && out.size() == q.size(),
            "[attention] keys and values must be (keys, head_dim)");
    reference::attention(q.data(), keys.data(), values.data(), (int)keys.shape(0), first_visible, (int)q.size(), out.data());
  });
  m.def("statistics", [](Floats logits, bool normalizer, bool quantile, float inverse_temperature, float u, Array<int32_t> edit_ids,
                         Floats edit_values, Array<int32_t> top_ids, Floats top_logits, Floats top_weights) {
    const StatisticsArgs args = statistics_args(logits, normalizer, quantile, inverse_temperature, u, edit_ids, edit_values,
                                                top_ids, top_logits, top_weights);
    StatisticsResult result{0, 0, 0, 0, top_ids.data(), top_logits.data(), top_weights.data()};
    reference::statistics(logits.data(), (int)logits.size(), args, result);
    return as_tuple(result);
  });
  m.def("recip", &apply<x1_recip>);
  m.def("rsqrt", &apply<x1_rsqrt>);
  m.def("exp", &apply<x1_exp>);
}

void bind_rope_table(nb::module_& m) {
  m.def("rope_table", [](Floats table, int rotary_dim, double base, std::optional<Floats> factors, double position_scale) {
    require(rotary_dim > 0 && table.size() % rotary_dim == 0, "[rope_table] table must be (positions, rotary_dim/2, 2)");
    build_rope_table(table.data(), (int)(table.size() / rotary_dim), rotary_dim, base, data_or_null(factors), position_scale);
  }, "table"_a, "rotary_dim"_a, "base"_a, "factors"_a.none() = nb::none(), "position_scale"_a = 1.0);
  m.def("rope_rows", [](Array<double> rows, int first, int rotary_dim, double base, std::optional<Floats> factors, double position_scale) {
    require(rotary_dim > 0 && rows.size() % rotary_dim == 0, "[rope_rows] rows must be (positions, rotary_dim/2, 2)");
    build_rope_rows(rows.data(), first, (int)(rows.size() / rotary_dim), rotary_dim, base, data_or_null(factors), position_scale);
  }, "rows"_a, "first"_a, "rotary_dim"_a, "base"_a, "factors"_a.none() = nb::none(), "position_scale"_a = 1.0);
}

}  // namespace

void bind_reference(nb::module_& m) {
  nb::set_leak_warnings(false);  // tables that a test module keeps until exit are not leaks
  nb::module_ reference = m.def_submodule("reference", "The scalar definition of class X1.");
  bind_reference_functions(reference);
  bind_rope_table(reference);

  nb::class_<Activations>(m, "Activations")
      .def("__init__", [](Activations* self, int width, int block, int panel, int format, bool half_sums, uint32_t op_index,
                          Array<uint8_t> q, Floats d, Floats s, Floats s_low, Floats s_high, Array<uint32_t> non_finite,
                          int activation_bits) {
        new (self) Activations{width, block, panel, activation_limit(activation_bits), (ActFormat)format, half_sums, op_index, q, d, s, s_low, s_high, non_finite};
      }, "width"_a, "block"_a, "panel"_a, "format"_a, "half_sums"_a, "op_index"_a, "q"_a, "d"_a, "s"_a, "s_low"_a,
           "s_high"_a, "non_finite"_a, "activation_bits"_a = 12);
  nb::class_<Cache>(m, "Cache").def("__init__", [](Cache* self, Array<uint16_t> keys, Array<uint16_t> values, int num_kv_heads,
                                                   int head_dim, int block_size) {
    new (self) Cache{keys, values, num_kv_heads, head_dim, block_size};
    self->view();
  });
  m.def("row_ops_names", &row_ops_names, "Tables that this machine can run.");
  nb::class_<BoundRowOps>(m, "RowOps")
      .def(nb::init<const std::string&, bool>(), "name"_a, "flush_subnormals"_a = false)
      .def_prop_ro("name", &BoundRowOps::name)
      .def("quantize", &BoundRowOps::quantize)
      .def("norm_quantize", &BoundRowOps::norm_quantize)
      .def("norm", &BoundRowOps::norm)
      .def("gate_quantize", &BoundRowOps::gate_quantize)
      .def("gate", &BoundRowOps::gate)
      .def("rope_query", &BoundRowOps::rope_query)
      .def("write_kv", &BoundRowOps::write_kv)
      .def("attention", &BoundRowOps::attention)
      .def("attention_chunk", &BoundRowOps::attention_chunk)
      .def("attention_merge", &BoundRowOps::attention_merge)
      .def("statistics", &BoundRowOps::statistics);
}

}  // namespace isobatch
