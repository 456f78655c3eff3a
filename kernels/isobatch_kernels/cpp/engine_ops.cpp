// The engine's ops except attention: how each is cut into pieces for the threads.
#include <algorithm>
#include <cmath>

#include "engine.h"

namespace isobatch {
namespace {

// Keeps the first op that met a non-finite value.
void record(uint32_t& word, int op_index) {
  if (word == 0) word = 1 + (uint32_t)op_index;
}

}  // namespace

// Returns when the whole op is done.
void Engine::run_op(int index, int thread) {
  const Op& op = ops_[index];
  WorkCounter &work = counters_[2 * index], &second = counters_[2 * index + 1];
  if (step_.wanted_count == 0 && (op.wanted_only || op.kind == OpKind::kRowStatistics)) return;
  switch (op.kind) {
    case OpKind::kNothing: break;
    case OpKind::kEmbed: embed(op, work); break;
    case OpKind::kNormQuantize: norm(index, work); break;
    case OpKind::kQuantize: quantize(index, work); break;
    case OpKind::kLinear: linear(index, second, work); break;
    case OpKind::kRopeWriteKV: rope_write_kv(index, work); break;
    case OpKind::kPagedAttention: attention(op, work, second, thread); break;
    case OpKind::kGateQuantize: gate(index, work); break;
    case OpKind::kRowStatistics: statistics(index, work, thread); break;
  }
}

void Engine::embed(const Op& op, WorkCounter& work) {
  const Weight& w = weights_[op.weights[0]];
  const Buffer& out = buffers_[op.out];
  pool_.share(work, step_.tokens, piece(step_.tokens), [&](int begin, int end) {
    for (int m = begin; m < end; m++) {
      if (w.quantized) embed_quantized(w.quantized->view, step_.token_ids[m], out.row(m));
      else embed_dense(w.dense->view, step_.token_ids[m], out.row(m));
    }
  });
}

void Engine::norm(int index, WorkCounter& work) {
  const Op& op = ops_[index];
  const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
  const bool gather = out.wanted_only && !x.wanted_only;
  const int rows = rows_of(out.wanted_only);
  const ActView view = out.block ? this->view(op.out, index) : ActView{};
  pool_.share(work, rows, piece(rows), [&](int begin, int end) {
    for (int m = begin; m < end; m++) {
      const float* row = x.row(gather ? step_.wanted[m] : m);
      if (out.block) unit_.rows->norm_quantize(row, op.vector.data(), op.epsilon, view, m);
      else unit_.rows->norm(row, op.vector.data(), op.epsilon, x.width, out.row(m));
    }
  });
}

void Engine::quantize(int index, WorkCounter& work) {
  const Op& op = ops_[index];
  const ActView view = this->view(op.out, index);
  pool_.share(work, view.M, piece(view.M), [&](int begin, int end) {
    for (int m = begin; m < end; m++) unit_.rows->quantize(buffers_[op.x].row(m), view, m);
  });
}

void Engine::gate(int index, WorkCounter& work) {
  const Op& op = ops_[index];
  const Buffer& out = buffers_[op.out];
  const int rows = rows_of(out.wanted_only);
  const ActView view = out.block ? this->view(op.out, index) : ActView{};
  pool_.share(work, rows, piece(rows), [&](int begin, int end) {
    for (int m = begin; m < end; m++) {
      const float *gate = buffers_[op.x].row(m), *up = gate + out.width;
      if (out.block) unit_.rows->gate_quantize(gate, up, view, m);
      else unit_.rows->gate(gate, up, out.width, out.row(m));
    }
  });
}

void Engine::linear(int index, WorkCounter& prepare, WorkCounter& work) {
  const Op& op = ops_[index];
  const Buffer& y = buffers_[op.out];
  LinearOutput out{};
  out.y = y.row(0);
  out.stride = y.width;
  out.bias = op.vector.empty() ? nullptr : op.vector.data();
  if (op.residual >= 0) {
    out.residual = buffers_[op.residual].row(0);
    out.residual_stride = buffers_[op.residual].width;
  }
  out.plus_zero = op.wanted_only;
  if (op.policy != LinearPolicy::kExact) {
    float_linear(index, out, prepare, work);
    return;
  }
  if (weights_[op.weights[0]].dense) {
    dense_linear(index, out, prepare, work);
    return;
  }
  const ActView x = view(op.x, index);
  int tiles = 0;
  for (int weight : op.weights) tiles += weights_[weight].tiles();
  pool_.share(work, tiles, piece(tiles), [&](int begin, int end) {
    int first = 0;
    LinearOutput part = out;
    for (int weight : op.weights) {
      const PackedView& w = weights_[weight].quantized->view;
      const int low = std::max(begin - first, 0), high = std::min(end - first, w.tiles);
      if (low < high) unit_.linears->quantized_of(x.limit)(w, x, part, low, high);
      first += w.tiles;
      part.y += w.N;
      if (part.bias) part.bias += w.N;
      if (part.residual) part.residual += w.N;
    }
  });
}

void Engine::dense_linear(int index, const LinearOutput& out, WorkCounter& prepare, WorkCounter& work) {
  const Op& op = ops_[index];
  const Buffer& x = buffers_[op.x];
  const int rows = rows_of(x.wanted_only);
  std::vector<uint32_t>& flags = x.wanted_only ? wanted_non_finite_ : non_finite_;
  float *scaled = dense_rows_.as<float>(), *powers = dense_powers_.as<float>();
  const bool bfloat = weights_[op.weights[0]].dense->view.bfloat;
  pool_.share(prepare, rows, piece(rows), [&](int begin, int end) {
    for (int m = begin; m < end; m++) {
      if (!prepare_dense_row(x.row(m), x.width, bfloat, scaled + (size_t)m * x.width, powers + m)) record(flags[m], index);
    }
  });
  // The reference prepares its rows by itself.
  const float* input = unit_.linears == reference_linear_ops() ? x.row(0) : scaled;
  int tiles = 0;
  for (int weight : op.weights) tiles += weights_[weight].tiles();
  pool_.share(work, tiles, piece(tiles), [&](int begin, int end) {
    int first = 0;
    LinearOutput part = out;
    for (int weight : op.weights) {
      const DenseView& w = weights_[weight].dense->view;
      const int low = std::max(begin - first, 0), high = std::min(end - first, w.tiles);
      if (low < high) unit_.linears->dense(w, input, powers, rows, part, low, high);
      first += w.tiles;
      part.y += w.N;
      if (part.bias) part.bias += w.N;
      if (part.residual) part.residual += w.N;
    }
  });
}

void Engine::statistics(int index, WorkCounter& work, int thread) {
  const Buffer& logits = buffers_[ops_[index].x];
  pool_.share(work, step_.wanted_count, 1, [&](int m, int) {
    StatisticsArgs args{};
    const uint32_t bits = step_.statistics[m];
    args.normalizer = bits & kStatNormalizer;
    args.quantile = bits & kStatQuantile;
    args.top_k = bits & kStatTopK ? step_.top_k[m] : 0;
    args.inverse_temperature = step_.inverse_temperatures[m];
    args.u = step_.quantiles[m];
    args.edit_ids = step_.edit_ids + step_.edit_starts[m];
    args.edit_values = step_.edit_values + step_.edit_starts[m];
    args.num_edits = step_.edit_starts[m + 1] - step_.edit_starts[m];
    StatisticsResult result{};
    const int top = step_.top_k_starts[m];
    result.top_ids = step_.top_k_ids + top;
    result.top_logits = step_.top_k_logits + top;
    result.top_weights = step_.top_k_weights + top;
    unit_.rows->statistics(logits.row(m), logits.width, args, result, scratch_[thread].as<float>());
    step_.argmax_ids[m] = result.argmax_id;
    step_.max_logits[m] = result.max_logit;
    step_.normalizers[m] = args.normalizer ? result.normalizer : 0.0f;
    step_.quantile_ids[m] = args.quantile ? result.quantile_id : -1;
    if (!(std::fabs(result.max_logit) < 0x1p96f)) record(wanted_non_finite_[m], index);
  });
}

}  // namespace isobatch
