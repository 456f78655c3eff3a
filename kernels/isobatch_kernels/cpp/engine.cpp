#include "engine.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "contract.h"
#include "cpu_features.h"

namespace isobatch {
namespace {

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument("[engine] " + message);
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Unit find_unit(const std::string& name) {
  const CpuFeatures cpu = detect_cpu_features();
  if (name == "reference") return {reference_row_ops(), reference_linear_ops(), reference_float_ops()};
  if (name == "scalar") return {scalar_row_ops(), scalar_linear_ops(), scalar_float_ops()};
  if (name == "avx2" && cpu.avx2) return {avx2_row_ops(), avx2_linear_ops(), avx2_float_ops()};
  if (name == "vnni" && cpu.avx512_vnni) return {avx512_row_ops(), avx512_linear_ops(), avx512_float_ops()};
  if (name == "amx" && cpu.amx_int8) return {avx512_row_ops(), amx_linear_ops(), avx512_float_ops()};
  if (name == "neon" && cpu.neon) return {neon_row_ops(), cpu.dotprod ? neon_dotprod_linear_ops() : neon_linear_ops(), neon_float_ops()};
  return {};
}

void Buffer::ensure(int rows, int panel) {
  if (block == 0) {
    values.ensure((size_t)rows * width * sizeof(float));
    return;
  }
  // The last panel is laid out like the others, however few rows it has.
  const size_t padded = (size_t)(rows + panel - 1) / panel * panel;
  const size_t blocks = padded * ((width + block - 1) / block);
  values.ensure(blocks * block * 2);
  for (AlignedBuffer* meta : {&d, &s}) meta->ensure(blocks * sizeof(float));
  if (half_sums) {
    for (AlignedBuffer* meta : {&s_low, &s_high}) meta->ensure(blocks * sizeof(float));
  }
}

Engine::Engine(const EngineConfig& config, std::vector<float> rope_table)
    : config_(config),
      unit_(find_unit(config.unit)),
      pool_(config.num_threads > 0 ? config.num_threads : usable_cpus()),
      checker_({config.max_tokens, config.max_rows, config.vocab_size, config.context_length, config.num_blocks, config.block_size}),
      kv_(config.num_layers, config.num_kv_heads, config.head_dim, config.block_size, config.num_blocks),
      rope_table_(std::move(rope_table)),
      scratch_(pool_.size()) {
  require(unit_.available(), "unit must be one that this processor and build have, got " + config.unit);
  require(config.num_heads % config.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads");
  require(rope_table_.size() >= (size_t)config.context_length * config.rotary_dim, "the RoPE table must cover the context");
}

int Engine::add_buffer(int width, int block, bool half_sums) {
  require(width > 0, "buffer width must be positive, got " + std::to_string(width));
  require(block == 0 || block == 32 || block == 64, "activation blocks must have 32 or 64 elements, got " + std::to_string(block));
  buffers_.emplace_back();
  buffers_.back().width = width;
  buffers_.back().block = block;
  buffers_.back().half_sums = half_sums;
  return (int)buffers_.size() - 1;
}

int Engine::add_quantized(const std::vector<QuantizedSource>& sources, int b) {
  weights_.emplace_back();
  weights_.back().quantized = pack_quantized(sources, b, config_.unit == "reference", arena_, pool_);
  return (int)weights_.size() - 1;
}

int Engine::add_dense(const std::vector<DenseSource>& sources) {
  weights_.emplace_back();
  weights_.back().dense = pack_dense(sources, config_.unit == "reference", arena_);
  return (int)weights_.size() - 1;
}

void Engine::add_op(Op op) {
  check_op(op);
  if (op.wanted_only) buffers_[op.out].wanted_only = true;
  if (op.kind == OpKind::kRowStatistics) logits_ = op.x;
  ops_.push_back(std::move(op));
  counters_ = std::make_unique<WorkCounter[]>(2 * ops_.size());
}

void Engine::check_op(const Op& op) const {
  const auto known = [&](int buffer) { return buffer >= 0 && buffer < (int)buffers_.size(); };
  const auto width_is = [&](int buffer, int width, const char* what) {
    require(known(buffer), std::string(what) + " must name a buffer");
    require(buffers_[buffer].width == width,
            std::string(what) + " must be " + std::to_string(width) + " wide, got " + std::to_string(buffers_[buffer].width));
  };
  const int heads = config_.num_heads * config_.head_dim, kv = config_.num_kv_heads * config_.head_dim;
  for (int weight : op.weights) require(weight >= 0 && weight < (int)weights_.size(), "unknown weight");
  switch (op.kind) {
    case OpKind::kEmbed:
      require(op.weights.size() == 1, "embed takes one weight");
      require(weights_[op.weights[0]].outputs() >= config_.vocab_size, "the embedding must cover the vocabulary");
      width_is(op.out, weights_[op.weights[0]].inputs(), "embed's out");
      break;
    case OpKind::kNormQuantize:
      width_is(op.x, (int)op.vector.size(), "norm's x");
      [[fallthrough]];
    case OpKind::kQuantize:
      require(known(op.x) && known(op.out), "quantize needs x and out");
      width_is(op.out, buffers_[op.x].width, "quantize's out");
      require(buffers_[op.x].block == 0, "quantize's x must be fp32");
      require(op.kind == OpKind::kNormQuantize || buffers_[op.out].block != 0, "quantize's out must be quantised");
      break;
    case OpKind::kLinear: check_linear(op); break;
    case OpKind::kRopeWriteKV: width_is(op.x, heads + 2 * kv, "qkv"); break;
    case OpKind::kPagedAttention:
      width_is(op.x, heads + 2 * kv, "qkv");
      width_is(op.out, heads, "attention's out");
      break;
    case OpKind::kGateQuantize:
      require(known(op.x) && known(op.out), "gate_quantize needs gate_up and out");
      width_is(op.x, 2 * buffers_[op.out].width, "gate_up");
      break;
    case OpKind::kRowStatistics: width_is(op.x, config_.vocab_size, "logits"); break;
    case OpKind::kNothing: break;
  }
  require(op.layer >= 0 && op.layer < config_.num_layers, "layer must be one of the model's");
}

void Engine::check_linear(const Op& op) const {
  require(!op.weights.empty(), "linear needs a weight");
  require(op.x >= 0 && op.out >= 0, "linear needs x and out");
  const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
  int outputs = 0;
  for (int index : op.weights) {
    const Weight& w = weights_[index];
    outputs += w.outputs();
    require(w.inputs() == x.width, "linear's x must be as wide as its weight's inputs");
    if (op.policy != LinearPolicy::kExact) continue;
    require((x.block != 0) == (w.quantized != nullptr), "quantised weights take quantised activations, dense weights fp32");
    if (!w.quantized) continue;
    const PackedView& v = w.quantized->view;
    require(v.b == std::min(v.G, x.block), "linear's sub-blocks must be min(group size, activation block)");
    require(v.b == x.block || x.half_sums, "groups of 16 need half sums of the activations");
  }
  if (op.policy != LinearPolicy::kExact) {
    require(x.block == 0, "a float linear's x must be fp32");
    for (int index : op.weights) {
      require((weights_[index].quantized != nullptr) == (weights_[op.weights[0]].quantized != nullptr),
              "a float linear's weights must be all quantised or all dense");
    }
  }
  require(op.threshold_rows >= 0, "linear's threshold_rows must not be negative, got " + std::to_string(op.threshold_rows));
  require(out.width == outputs && out.block == 0, "linear's out must be fp32 and as wide as the weights' outputs");
  require(op.vector.empty() || (int)op.vector.size() == outputs, "linear's bias must have one value an output");
  require(op.residual < 0 || (buffers_[op.residual].width == outputs && buffers_[op.residual].block == 0),
          "linear's residual must be fp32 and as wide as out");
}

ActView Engine::view(int buffer, int op_index) const {
  const Buffer& b = buffers_[buffer];
  ActView v{};
  v.K = b.width;
  v.A = b.block;
  v.NB = (b.width + b.block - 1) / b.block;
  v.M = rows_of(b.wanted_only);
  v.P = panel_for(v.M);
  v.limit = config_.activation_limit;
  v.format = unit_.linears->format_of(v.limit);
  v.half_sums = b.half_sums;
  v.q = b.values.as<uint8_t>();
  v.d = b.d.as<float>();
  v.s = b.s.as<float>();
  v.s_low = b.s_low.as<float>();
  v.s_high = b.s_high.as<float>();
  v.non_finite = const_cast<uint32_t*>(b.wanted_only ? wanted_non_finite_.data() : non_finite_.data());
  v.op_index = (uint32_t)op_index;
  return v;
}

void Engine::set_panel_limits(std::vector<PanelLimit> limits) {
  std::lock_guard<std::mutex> lock(running_);
  for (size_t i = 0; i < limits.size(); i++) {
    require(limits[i].rows > (i ? limits[i - 1].rows : 0), "rows of panel limits must ascend from 1");
    require(limits[i].most >= 0 && limits[i].most <= kMaxPanelRows, "panels must have 1 (or 0, the default) to " + std::to_string(kMaxPanelRows) + " rows");
  }
  panel_limits_ = std::move(limits);
}

int Engine::panel_for(int rows) const {
  for (const PanelLimit& limit : panel_limits_) {
    if (rows <= limit.rows && limit.most) return panel_rows(rows, limit.most);
    if (rows <= limit.rows) break;
  }
  return unit_.linears->panel(rows);
}

int Engine::piece(int total) const { return std::max(1, total / (pool_.size() * 8)); }

Engine::Times Engine::run(const StepArrays& step) {
  std::lock_guard<std::mutex> lock(running_);
  checker_.check(step);
  const int64_t start = now_ns();
  times_ = {};
  statistics_start_ = 0;
  prepare_step(step);
  pool_.run([this](int thread) { run_thread(thread); });
  finish_step(step);
  const int64_t end = now_ns();
  times_.statistics_ns = statistics_start_ ? end - statistics_start_ : 0;
  times_.forward_ns = end - start - times_.statistics_ns;
  return times_;
}

void Engine::prepare_step(const StepArrays& step) {
  step_ = step;
  for (Buffer& buffer : buffers_) {
    const int rows = std::max(1, rows_of(buffer.wanted_only));
    buffer.ensure(rows, panel_for(rows));
  }
  non_finite_.assign(step.tokens, 0);
  wanted_non_finite_.assign(step.wanted_count, 0);
  token_rows_.resize(step.tokens);
  int last_position = 0;
  for (int row = 0; row < step.rows; row++) {
    for (int i = step.row_starts[row]; i < step.row_starts[row + 1]; i++) token_rows_[i] = row;
    last_position = std::max(last_position, step.positions[step.row_starts[row + 1] - 1]);
  }
  max_chunks_ = last_position / kAttentionChunk + 1;
  const int items = step.tokens * config_.num_kv_heads, group = config_.num_heads / config_.num_kv_heads;
  by_chunks_ = pool_.size() > 1 && unit_.rows->attention_chunk && max_chunks_ > 1 && items < 4 * pool_.size();
  tile_attention();
  if (by_chunks_) {
    partials_.ensure((size_t)items * max_chunks_ * group * attention_partial_floats(config_.head_dim) * sizeof(float));
    present_.resize((size_t)items * max_chunks_);
  }
  size_t scratch = attention_scratch_floats(group, config_.head_dim, kMaxAttentionTokens);
  if (step.wanted_count > 0) scratch = std::max(scratch, (size_t)config_.vocab_size);
  for (AlignedBuffer& buffer : scratch_) buffer.ensure(scratch * sizeof(float));
  int dense_width = 0;
  for (const Op& op : ops_) {
    if (op.kind == OpKind::kLinear && weights_[op.weights[0]].dense) dense_width = std::max(dense_width, buffers_[op.x].width);
  }
  if (dense_width > 0) {
    dense_rows_.ensure((size_t)step.tokens * dense_width * sizeof(float));
    dense_powers_.ensure((size_t)step.tokens * sizeof(float));
  }
  prepare_float_rows(step);
  for (size_t i = 0; i < 2 * ops_.size(); i++) counters_[i].reset();
  zeroing_.reset();
}

void Engine::finish_step(const StepArrays& step) {
  to_zero_.clear();
  for (int i = 0; i < step.wanted_count; i++) {
    uint32_t& token = non_finite_[step.wanted[i]];
    if (token == 0) token = wanted_non_finite_[i];
  }
  for (int row = 0; row < step.rows; row++) {
    uint32_t first = 0;
    for (int i = step.row_starts[row]; i < step.row_starts[row + 1]; i++) {
      if (non_finite_[i] != 0 && (first == 0 || non_finite_[i] < first)) first = non_finite_[i];
    }
    step.non_finite_ops[row] = (int32_t)first - 1;
  }
}

void Engine::run_thread(int thread) {
  ScopedFloatMode mode(flush_subnormals_);
  zero_shared();
  for (int i = 0; i < (int)ops_.size(); i++) {
    if (thread == 0 && ops_[i].kind == OpKind::kRowStatistics) statistics_start_ = now_ns();
    run_op(i, thread);
  }
}

void Engine::zero_blocks(const int32_t* blocks, int count) {
  std::lock_guard<std::mutex> lock(running_);
  for (int i = 0; i < count; i++) {
    require(blocks[i] >= 0 && blocks[i] < config_.num_blocks, "block ids must lie in the pool, got " + std::to_string(blocks[i]));
  }
  // A caller that computes nothing does not make the list grow for ever.
  if (to_zero_.size() + count > (size_t)config_.num_blocks) zero_now();
  to_zero_.insert(to_zero_.end(), blocks, blocks + count);
}

// From every thread of a step, before its first op.
void Engine::zero_shared() {
  const int layers = kv_.layers(), total = (int)to_zero_.size() * layers;
  if (total == 0) return;
  pool_.share(zeroing_, total, piece(total), [&](int begin, int end) {
    for (int i = begin; i < end; i++) kv_.zero_block(to_zero_[i / layers], i % layers);
  });
}

void Engine::zero_now() {
  for (int32_t block : to_zero_) {
    for (int layer = 0; layer < kv_.layers(); layer++) kv_.zero_block(block, layer);
  }
  to_zero_.clear();
}

void Engine::read_block(int block, uint16_t* out) {
  std::lock_guard<std::mutex> lock(running_);
  require(block >= 0 && block < config_.num_blocks, "block ids must lie in the pool, got " + std::to_string(block));
  zero_now();
  kv_.read_block(block, out);
}

void Engine::write_block(int block, const uint16_t* in) {
  std::lock_guard<std::mutex> lock(running_);
  require(block >= 0 && block < config_.num_blocks, "block ids must lie in the pool, got " + std::to_string(block));
  zero_now();
  kv_.write_block(block, in);
}

}  // namespace isobatch
