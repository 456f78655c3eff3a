// The engine's float linear layers: which kernel the rows of a step get, and how it is cut for the threads.
#include <algorithm>

#include "engine.h"

namespace isobatch {

void Engine::prepare_float_rows(const StepArrays& step) {
  int width = 0;
  for (const Op& op : ops_) {
    if (op.policy != LinearPolicy::kExact) width = std::max(width, buffers_[op.x].width);
  }
  if (width == 0) return;
  const size_t rows = (size_t)step.tokens + kFloatPanel;
  float_rows_.ensure(rows * width * sizeof(float));
  float_sums_.ensure(rows * (width / kSumInputs + 1) * sizeof(float));
}

bool Engine::takes_gemv(const Op& op, int rows) {
  return op.policy == LinearPolicy::kGemv || (op.policy == LinearPolicy::kThreshold && rows <= op.threshold_rows);
}

void Engine::float_linear(int index, const LinearOutput& out, WorkCounter& prepare, WorkCounter& work) {
  const Op& op = ops_[index];
  const Buffer& x = buffers_[op.x];
  const FloatLinearOps& ops = *unit_.floats;
  std::vector<uint32_t>& flags = x.wanted_only ? wanted_non_finite_ : non_finite_;
  const bool gemv = takes_gemv(op, rows_of(x.wanted_only)), quantized = weights_[op.weights[0]].quantized != nullptr;
  FloatRows rows{};
  rows.K = x.width;
  rows.M = rows_of(x.wanted_only);
  rows.P = gemv ? 1 : float_panel_rows(rows.M, ops.panel_rows);
  rows.x = float_rows_.as<float>();
  rows.sums = gemv && quantized ? float_sums_.as<float>() : nullptr;
  pool_.share(prepare, rows.M, piece(rows.M), [&](int begin, int end) {
    for (int m = begin; m < end; m++) {
      if (!ops.prepare(x.row(m), rows, m) && flags[m] == 0) flags[m] = 1 + (uint32_t)index;
    }
  });
  int tiles = 0;
  for (int weight : op.weights) tiles += weights_[weight].tiles();
  pool_.share(work, tiles, piece(tiles), [&](int begin, int end) {
    int first = 0;
    LinearOutput part = out;
    for (int weight : op.weights) {
      const Weight& w = weights_[weight];
      const int low = std::max(begin - first, 0), high = std::min(end - first, w.tiles());
      if (low < high && quantized) (gemv ? ops.gemv : ops.gemm)(w.quantized->view, rows, part, low, high);
      else if (low < high) (gemv ? ops.dense_gemv : ops.dense_gemm)(w.dense->view, rows, part, low, high);
      first += w.tiles();
      part.y += w.outputs();
      if (part.bias) part.bias += w.outputs();
      if (part.residual) part.residual += w.outputs();
    }
  });
}

}  // namespace isobatch
