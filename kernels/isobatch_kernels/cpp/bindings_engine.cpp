// The engine as a Python class: built op by op from a Program, then one call a step.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings.h"
#include "engine.h"
#include "greedy.h"

namespace isobatch {
namespace {

using QuantizedArrays = std::tuple<In<uint32_t, 2>, AnyMatrix, std::optional<AnyMatrix>>;

// Dimensions are checked here, where arrays still know them.
void expect(size_t got, size_t want, const char* name) {
  if (got != want) {
    throw std::invalid_argument("[step] " + std::string(name) + " must have " + std::to_string(want) + " entries, got " + std::to_string(got));
  }
}

std::pair<int64_t, int64_t> run_step(Engine& engine, In<int32_t, 1> token_ids, In<int32_t, 1> positions, In<int32_t, 1> row_starts,
                       In<int32_t, 2> block_tables, In<int32_t, 1> wanted, In<uint32_t, 1> statistics, In<int32_t, 1> top_k,
                       In<float, 1> inverse_temperatures, In<float, 1> quantiles, In<int32_t, 1> edit_starts,
                       In<int32_t, 1> edit_ids, In<float, 1> edit_values, Out<int32_t, 1> argmax_ids,
                       Out<float, 1> max_logits, Out<float, 1> normalizers, Out<int32_t, 1> quantile_ids,
                       In<int32_t, 1> top_k_starts, Out<int32_t, 1> top_k_ids, Out<float, 1> top_k_logits,
                       Out<float, 1> top_k_weights, Out<int32_t, 1> non_finite_ops) {
  StepArrays s;
  const size_t tokens = token_ids.size(), rows = block_tables.shape(0), wanted_count = wanted.size();
  expect(positions.size(), tokens, "positions");
  expect(row_starts.size(), rows + 1, "query_start_loc");
  expect(statistics.size(), wanted_count, "statistics");
  expect(top_k.size(), wanted_count, "top_k");
  expect(inverse_temperatures.size(), wanted_count, "inverse_temperatures");
  expect(quantiles.size(), wanted_count, "quantiles");
  expect(edit_starts.size(), wanted_count + 1, "edit_starts");
  expect(edit_values.size(), edit_ids.size(), "edit_values");
  expect(argmax_ids.size(), wanted_count, "argmax_ids");
  expect(max_logits.size(), wanted_count, "max_logits");
  expect(normalizers.size(), wanted_count, "normalizers");
  expect(quantile_ids.size(), wanted_count, "quantile_ids");
  expect(top_k_starts.size(), wanted_count + 1, "top_k_starts");
  expect(non_finite_ops.size(), rows, "non_finite_ops");
  for (size_t i = 0; i < wanted_count; i++) {
    const int entries = statistics.data()[i] & kStatTopK ? top_k.data()[i] : 0;
    expect(top_k_starts.data()[i + 1], (size_t)top_k_starts.data()[i] + entries, "top_k_starts");
  }
  for (size_t size : {top_k_ids.size(), top_k_logits.size(), top_k_weights.size()}) {
    expect(size, top_k_starts.data()[wanted_count], "top-k results");
  }
  s.tokens = (int32_t)tokens;
  s.rows = (int32_t)rows;
  s.wanted_count = (int32_t)wanted_count;
  s.max_blocks = (int32_t)block_tables.shape(1);
  s.edit_count = (int32_t)edit_ids.size();
  s.token_ids = token_ids.data();
  s.positions = positions.data();
  s.row_starts = row_starts.data();
  s.block_tables = block_tables.data();
  s.wanted = wanted.data();
  s.statistics = statistics.data();
  s.top_k = top_k.data();
  s.inverse_temperatures = inverse_temperatures.data();
  s.quantiles = quantiles.data();
  s.edit_starts = edit_starts.data();
  s.edit_ids = edit_ids.data();
  s.edit_values = edit_values.data();
  s.argmax_ids = argmax_ids.data();
  s.max_logits = max_logits.data();
  s.normalizers = normalizers.data();
  s.quantile_ids = quantile_ids.data();
  s.top_k_starts = top_k_starts.data();
  s.top_k_ids = top_k_ids.data();
  s.top_k_logits = top_k_logits.data();
  s.top_k_weights = top_k_weights.data();
  s.non_finite_ops = non_finite_ops.data();
  nb::gil_scoped_release released;
  const Engine::Times times = engine.run(s);
  return {times.forward_ns, times.statistics_ns};
}

// By row: drafts, confidences, passes, and whether all of them were finite.
using Drafted = std::tuple<std::vector<int32_t>, std::vector<double>, int, bool>;

std::tuple<int64_t, int, std::vector<Drafted>> draft(Engine& engine, std::vector<std::vector<int32_t>> token_ids,
                                                     const std::vector<int32_t>& start_positions,
                                                     const std::vector<int32_t>& max_drafts,
                                                     const std::vector<float>& min_confidences, In<int32_t, 2> block_tables,
                                                     int num_ids) {
  const size_t count = token_ids.size();
  expect(start_positions.size(), count, "start_positions");
  expect(max_drafts.size(), count, "max_drafts");
  expect(min_confidences.size(), count, "min_confidences");
  expect(block_tables.shape(0), count, "block_tables");
  std::vector<GreedyRow> rows(count);
  for (size_t i = 0; i < count; i++) {
    rows[i].token_ids = std::move(token_ids[i]);
    rows[i].start_position = start_positions[i];
    rows[i].max_drafts = max_drafts[i];
    rows[i].min_confidence = min_confidences[i];
  }
  GreedyTimes times;
  {
    nb::gil_scoped_release released;
    times = draft_greedily(engine, rows, block_tables.data(), (int)block_tables.shape(1), num_ids);
  }
  std::vector<Drafted> drafted;
  for (GreedyRow& row : rows) drafted.emplace_back(std::move(row.drafts), std::move(row.confidences), row.num_passes, row.is_finite);
  return {times.nanoseconds, times.passes, std::move(drafted)};
}

int add_quantized(Engine& engine, const std::vector<QuantizedArrays>& matrices, int bits, int group, int sub_block) {
  std::vector<QuantizedSource> sources;
  for (const auto& [packed, scales, biases] : matrices) sources.push_back(quantized_source(packed, scales, biases, bits, group));
  nb::gil_scoped_release released;
  return engine.add_quantized(sources, sub_block);
}

int add_dense(Engine& engine, const std::vector<In<uint16_t, 2>>& matrices, bool bfloat) {
  std::vector<DenseSource> sources;
  for (const auto& m : matrices) sources.push_back({(int)m.shape(0), (int)m.shape(1), bfloat, m.data()});
  nb::gil_scoped_release released;
  return engine.add_dense(sources);
}

OpKind op_kind(const std::string& name) {
  static const std::pair<const char*, OpKind> kinds[] = {
      {"nothing", OpKind::kNothing}, {"embed", OpKind::kEmbed}, {"norm_quantize", OpKind::kNormQuantize},
      {"quantize", OpKind::kQuantize}, {"linear", OpKind::kLinear}, {"rope_write_kv", OpKind::kRopeWriteKV},
      {"paged_attention", OpKind::kPagedAttention}, {"gate_quantize", OpKind::kGateQuantize},
      {"row_statistics", OpKind::kRowStatistics}};
  for (const auto& [text, kind] : kinds) {
    if (name == text) return kind;
  }
  throw std::invalid_argument("[engine] unknown op " + name);
}

LinearPolicy linear_policy(const std::string& name) {
  static const std::pair<const char*, LinearPolicy> policies[] = {
      {"exact", LinearPolicy::kExact}, {"gemv", LinearPolicy::kGemv}, {"gemm", LinearPolicy::kGemm},
      {"threshold", LinearPolicy::kThreshold}};
  for (const auto& [text, policy] : policies) {
    if (name == text) return policy;
  }
  throw std::invalid_argument("[linear] policy must be exact, gemv, gemm or threshold, got " + name);
}

void add_op(Engine& engine, const std::string& kind, int x, int out, int residual, const std::vector<int>& weights,
            std::optional<In<float, 1>> vector, float epsilon, int layer, int window, bool wanted_only,
            const std::string& policy, int threshold_rows) {
  Op op;
  op.kind = op_kind(kind);
  op.x = x;
  op.out = out;
  op.residual = residual;
  op.weights = weights;
  if (vector) op.vector.assign(vector->data(), vector->data() + vector->size());
  op.epsilon = epsilon;
  op.layer = layer;
  op.window = window;
  op.wanted_only = wanted_only;
  op.policy = linear_policy(policy);
  op.threshold_rows = threshold_rows;
  engine.add_op(std::move(op));
}

}  // namespace

void bind_engine(nb::module_& module) {
  nb::class_<Engine>(module, "Engine", "Interprets one Program over one paged key/value cache.")
      .def("__init__",
           [](Engine* self, In<float, 1> rope_table, int hidden_size, int num_layers, int num_heads, int num_kv_heads,
              int head_dim, int vocab_size, int context_length, float attention_scale, int rotary_dim, bool rope_interleaved,
              int num_blocks, int block_size, int max_rows, int max_tokens, int num_threads, std::string unit,
              int activation_bits) {
             const EngineConfig config{hidden_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size, context_length,
                                       attention_scale, rotary_dim, rope_interleaved, num_blocks, block_size, max_rows,
                                       max_tokens, num_threads, std::move(unit), activation_limit(activation_bits)};
             new (self) Engine(config, std::vector<float>(rope_table.data(), rope_table.data() + rope_table.size()));
           },
           nb::arg("rope_table"), nb::kw_only(), nb::arg("hidden_size"), nb::arg("num_layers"), nb::arg("num_heads"),
           nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("vocab_size"), nb::arg("context_length"),
           nb::arg("attention_scale"), nb::arg("rotary_dim"), nb::arg("rope_interleaved"), nb::arg("num_blocks"),
           nb::arg("block_size"), nb::arg("max_rows"), nb::arg("max_tokens"), nb::arg("num_threads"), nb::arg("unit"),
           nb::arg("activation_bits") = 12)
      .def("add_buffer", &Engine::add_buffer, nb::arg("width"), nb::arg("block"), nb::arg("half_sums"))
      .def("add_quantized", &add_quantized, nb::arg("matrices"), nb::arg("bits"), nb::arg("group_size"), nb::arg("sub_block"))
      .def("add_dense", &add_dense, nb::arg("matrices"), nb::arg("bfloat"))
      .def("add_op", &add_op, nb::arg("kind"), nb::kw_only(), nb::arg("x") = -1, nb::arg("out") = -1, nb::arg("residual") = -1,
           nb::arg("weights") = std::vector<int>(), nb::arg("vector").none() = nb::none(), nb::arg("epsilon") = 0.0f,
           nb::arg("layer") = 0, nb::arg("window") = 0, nb::arg("wanted_only") = false,
           nb::arg("policy") = "exact", nb::arg("threshold_rows") = 0)
      .def("run", &run_step, "Computes a step into the given result arrays; returns (forward_ns, statistics_ns).")
      .def("draft", &draft, "Computes greedy passes; returns (nanoseconds, passes, by row: drafts, confidences, passes, is_finite).")
      .def("logits",
           [](nb::object self, int rows) {
             const Engine& engine = nb::cast<const Engine&>(self);
             if (rows > 0 && !engine.logits()) throw std::invalid_argument("[engine] the program makes no logits");
             return nb::ndarray<nb::numpy, const float, nb::ndim<2>>(
                 engine.logits(), {(size_t)rows, (size_t)engine.config().vocab_size}, self);
           },
           nb::arg("rows"), "View of the first rows of the last step's logits; valid until the next run.")
      .def("zero_blocks",
           [](Engine& engine, In<int32_t, 1> blocks) { engine.zero_blocks(blocks.data(), (int)blocks.size()); },
           nb::arg("block_ids"))
      .def("read_block", [](Engine& engine, int block, Out<uint16_t, 1> out) {
             const EngineConfig& c = engine.config();
             expect(out.size(), (size_t)c.num_layers * 2 * c.num_kv_heads * c.block_size * c.head_dim, "out");
             engine.read_block(block, out.data());
           },
           nb::arg("block_id"), nb::arg("out"))
      .def("write_block", [](Engine& engine, int block, In<uint16_t, 1> bits) {
             const EngineConfig& c = engine.config();
             expect(bits.size(), (size_t)c.num_layers * 2 * c.num_kv_heads * c.block_size * c.head_dim, "bits");
             engine.write_block(block, bits.data());
           },
           nb::arg("block_id"), nb::arg("bits"))
      .def("set_panel_limits",
           [](Engine& engine, const std::vector<std::pair<int, int>>& limits) {
             std::vector<Engine::PanelLimit> converted;
             for (const auto& [rows, most] : limits) converted.push_back({rows, most});
             engine.set_panel_limits(std::move(converted));
           },
           nb::arg("limits"), "Pairs (rows, most): most rows of a panel for steps of up to so many rows; 0 is the default.")
      .def("set_flush_subnormals", &Engine::set_flush_subnormals, nb::arg("flush"))
      .def_prop_ro("num_threads", &Engine::threads);
}

}  // namespace isobatch
