#include "small_model.h"

#include <deque>

#include "random_weights.h"
#include "rope_table.h"

namespace isobatch::testing {
namespace {

constexpr int kHidden = 64, kHeads = 6, kKvHeads = 2, kHeadDim = 16, kInner = 96, kQkv = (kHeads + 2 * kKvHeads) * kHeadDim;
constexpr int kTopK = 7;

class Builder {
 public:
  Builder(Engine& engine, const ModelShape& shape) : engine_(engine), shape_(shape) {}

  int matrix(int outputs, int inputs, int bits) {
    if (shape_.dense) {
      const std::vector<uint16_t> values = random_dense(random_, outputs, inputs, false);
      return engine_.add_dense({{outputs, inputs, false, values.data()}});
    }
    // Two sources, joined along the outputs.
    const int first = outputs / 3;
    const RandomWeight a(random_, first, inputs, bits, shape_.group, true, true);
    const RandomWeight b(random_, outputs - first, inputs, bits, shape_.group, true, true);
    return engine_.add_quantized({a.source, b.source}, shape_.group < shape_.block ? shape_.group : shape_.block);
  }
  int activations(int width) {
    const int block = shape_.dense ? 0 : shape_.block;
    return engine_.add_buffer(width, block, block == 32 && shape_.group == 16);
  }
  std::vector<float> norm_weight() {
    std::vector<float> w = random_values(random_, kHidden, 0.5f);
    for (float& v : w) v = v + 1.0f;
    return w;
  }
  Op& add(OpKind kind, int x, int out) {
    ops_.emplace_back();
    ops_.back().kind = kind;
    ops_.back().x = x;
    ops_.back().out = out;
    return ops_.back();
  }
  void norm(int x, int out, bool wanted_only) {
    Op& op = add(OpKind::kNormQuantize, x, out);
    op.vector = norm_weight();
    op.epsilon = 1e-5f;
    op.wanted_only = wanted_only;
  }
  void linear(int x, int out, int residual, int outputs, int inputs) {
    Op& op = add(OpKind::kLinear, x, out);
    op.weights = {matrix(outputs, inputs, 4)};
    op.residual = residual;
    if (residual < 0) op.vector = random_values(random_, outputs, 0.1f);
  }

  void build() {
    const int x = engine_.add_buffer(kHidden, 0, false), qkv = engine_.add_buffer(kQkv, 0, false);
    const int mixed = engine_.add_buffer(kHeads * kHeadDim, 0, false), gate_up = engine_.add_buffer(2 * kInner, 0, false);
    const int logits = engine_.add_buffer(kVocabulary, 0, false);
    const int a = activations(kHidden), heads = activations(kHeads * kHeadDim), inner = activations(kInner);
    const int last = activations(kHidden), embedding = matrix(kVocabulary, kHidden, 8);
    add(OpKind::kEmbed, -1, x).weights = {embedding};
    for (int layer = 0; layer < kLayers; layer++) {
      norm(x, a, false);
      linear(a, qkv, -1, kQkv, kHidden);
      add(OpKind::kRopeWriteKV, qkv, -1).layer = layer;
      Op& attention = add(OpKind::kPagedAttention, qkv, mixed);
      attention.layer = layer;
      attention.window = layer == 0 ? 40 : 0;
      if (!shape_.dense) add(OpKind::kQuantize, mixed, heads);
      linear(shape_.dense ? mixed : heads, x, x, kHidden, kHeads * kHeadDim);
      norm(x, a, false);
      linear(a, gate_up, -1, 2 * kInner, kHidden);
      add(OpKind::kGateQuantize, gate_up, inner);
      linear(inner, x, x, kHidden, kInner);
    }
    norm(x, last, true);
    Op& head = add(OpKind::kLinear, last, logits);
    head.weights = {embedding};
    head.wanted_only = true;
    add(OpKind::kRowStatistics, logits, -1);
    for (Op& op : ops_) engine_.add_op(std::move(op));
  }

 private:
  Engine& engine_;
  ModelShape shape_;
  Random random_{77};
  std::deque<Op> ops_;  // added once their weights are
};

}  // namespace

std::unique_ptr<Engine> make_engine(const ModelShape& shape, const char* unit, int threads) {
  EngineConfig config{};
  config.hidden_size = kHidden;
  config.num_layers = kLayers;
  config.num_heads = kHeads;
  config.num_kv_heads = kKvHeads;
  config.head_dim = kHeadDim;
  config.vocab_size = kVocabulary;
  config.context_length = kContext;
  config.attention_scale = 0.25f;
  config.rotary_dim = kHeadDim;
  config.rope_interleaved = false;
  config.num_blocks = shape.num_blocks;
  config.block_size = kCacheBlock;
  config.max_rows = kMostRows;
  config.max_tokens = kMostTokens;
  config.num_threads = threads;
  config.unit = unit;
  std::vector<float> table((size_t)kContext * kHeadDim);
  build_rope_table(table.data(), kContext, kHeadDim, 10000.0, nullptr, 1.0);
  auto engine = std::make_unique<Engine>(config, std::move(table));
  Builder(*engine, shape).build();
  return engine;
}

Step::Step(Random& random, const std::vector<Row>& rows, bool more_wanted) {
  row_starts.push_back(0);
  size_t most_blocks = 0;
  for (const Row& row : rows) most_blocks = row.blocks.size() > most_blocks ? row.blocks.size() : most_blocks;
  for (const Row& row : rows) {
    for (int i = 0; i < row.tokens; i++) {
      token_ids.push_back(random.below(kVocabulary));
      positions.push_back(row.start + i);
    }
    std::vector<int32_t> table = row.blocks;
    table.resize(most_blocks, -1);
    block_tables.insert(block_tables.end(), table.begin(), table.end());
    if (more_wanted && row.tokens > 1) wanted.push_back(row_starts.back());
    row_starts.push_back((int32_t)token_ids.size());
    wanted.push_back(row_starts.back() - 1);
  }
  edit_starts.push_back(0);
  for (size_t i = 0; i < wanted.size(); i++) {
    statistics.push_back(kStatTopK | kStatNormalizer | kStatQuantile);
    top_k.push_back(kTopK);
    inverse_temperatures.push_back(random.uniform(0.2f, 1.5f));
    quantiles.push_back(random.uniform(0, 0.999f));
    if (random.once_in(2)) {
      edit_ids.push_back(random.below(kVocabulary));
      edit_values.push_back(random.uniform(-5, 5));
    }
    edit_starts.push_back((int32_t)edit_ids.size());
  }
  connect();
}

void Step::connect() {
  const size_t count = wanted.size();
  top_k_starts.assign(1, 0);
  for (size_t i = 0; i < count; i++) top_k_starts.push_back(top_k_starts.back() + top_k[i]);
  for (std::vector<int32_t>* v : {&argmax_ids, &quantile_ids}) v->assign(count, -9);
  for (std::vector<float>* v : {&max_logits, &normalizers}) v->assign(count, -9);
  top_k_ids.assign(top_k_starts.back(), -9);
  for (std::vector<float>* v : {&top_k_logits, &top_k_weights}) v->assign(top_k_starts.back(), -9);
  non_finite_ops.assign(row_starts.size() - 1, -9);
  arrays.tokens = (int32_t)token_ids.size();
  arrays.rows = (int32_t)row_starts.size() - 1;
  arrays.wanted_count = (int32_t)count;
  arrays.max_blocks = (int32_t)(block_tables.size() / (row_starts.size() - 1));
  arrays.edit_count = (int32_t)edit_ids.size();
  arrays.token_ids = token_ids.data();
  arrays.positions = positions.data();
  arrays.row_starts = row_starts.data();
  arrays.block_tables = block_tables.data();
  arrays.wanted = wanted.data();
  arrays.statistics = statistics.data();
  arrays.top_k = top_k.data();
  arrays.inverse_temperatures = inverse_temperatures.data();
  arrays.quantiles = quantiles.data();
  arrays.edit_starts = edit_starts.data();
  arrays.edit_ids = edit_ids.data();
  arrays.edit_values = edit_values.data();
  arrays.argmax_ids = argmax_ids.data();
  arrays.max_logits = max_logits.data();
  arrays.normalizers = normalizers.data();
  arrays.quantile_ids = quantile_ids.data();
  arrays.top_k_starts = top_k_starts.data();
  arrays.top_k_ids = top_k_ids.data();
  arrays.top_k_logits = top_k_logits.data();
  arrays.top_k_weights = top_k_weights.data();
  arrays.non_finite_ops = non_finite_ops.data();
}

bool Step::results_equal(const Step& other) const {
  return argmax_ids == other.argmax_ids && quantile_ids == other.quantile_ids && top_k_ids == other.top_k_ids &&
         non_finite_ops == other.non_finite_ops && same_bits(max_logits, other.max_logits) &&
         same_bits(normalizers, other.normalizers) && same_bits(top_k_logits, other.top_k_logits) &&
         same_bits(top_k_weights, other.top_k_weights);
}

}  // namespace isobatch::testing
