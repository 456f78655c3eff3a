#include "greedy.h"

namespace isobatch {
namespace {

struct Live {
  GreedyRow* row;
  const int32_t* table;
  int position;  // of its next token
  double product = 1.0;
};

// One pass's inputs and results.
struct Pass {
  std::vector<int32_t> token_ids, positions, row_starts{0}, tables, wanted, zeros, argmax_ids, quantile_ids, non_finite_ops;
  std::vector<uint32_t> statistics;
  std::vector<float> ones, quantiles, max_logits, normalizers;

  void add_row(const std::vector<int32_t>& tokens, const int32_t* table, int max_blocks, int position, bool is_wanted) {
    for (int32_t token : tokens) {
      token_ids.push_back(token);
      positions.push_back(position++);
    }
    row_starts.push_back((int32_t)token_ids.size());
    tables.insert(tables.end(), table, table + max_blocks);
    if (is_wanted) wanted.push_back((int32_t)token_ids.size() - 1);
  }

  StepArrays arrays(int max_blocks) {
    const size_t count = wanted.size();
    statistics.assign(count, kStatNormalizer);
    zeros.assign(count + 1, 0);
    ones.assign(count, 1.0f);
    quantiles.assign(count, 0.0f);
    argmax_ids.resize(count);
    quantile_ids.resize(count);
    max_logits.resize(count);
    normalizers.resize(count);
    non_finite_ops.resize(row_starts.size() - 1);
    StepArrays s;
    s.tokens = (int32_t)token_ids.size();
    s.rows = (int32_t)row_starts.size() - 1;
    s.wanted_count = (int32_t)count;
    s.max_blocks = max_blocks;
    s.token_ids = token_ids.data();
    s.positions = positions.data();
    s.row_starts = row_starts.data();
    s.block_tables = tables.data();
    s.wanted = wanted.data();
    s.statistics = statistics.data();
    s.top_k = s.edit_starts = s.top_k_starts = zeros.data();
    s.inverse_temperatures = ones.data();
    s.quantiles = quantiles.data();
    s.argmax_ids = argmax_ids.data();
    s.max_logits = max_logits.data();
    s.normalizers = normalizers.data();
    s.quantile_ids = quantile_ids.data();
    s.non_finite_ops = non_finite_ops.data();
    return s;
  }
};

}  // namespace

GreedyTimes draft_greedily(Engine& engine, std::vector<GreedyRow>& rows, const int32_t* block_tables, int max_blocks, int num_ids) {
  GreedyTimes times;
  std::vector<Live> live, next;
  Pass pass;
  for (size_t i = 0; i < rows.size(); i++) {
    GreedyRow& row = rows[i];
    const int32_t* table = block_tables + i * max_blocks;
    pass.add_row(row.token_ids, table, max_blocks, row.start_position, row.max_drafts > 0);
    live.push_back({&row, table, row.start_position + (int)row.token_ids.size()});
  }
  while (!live.empty()) {
    const Engine::Times took = engine.run(pass.arrays(max_blocks));
    times.nanoseconds += took.forward_ns + took.statistics_ns;
    times.passes++;
    next.clear();
    size_t index = 0;  // among the wanted positions
    for (size_t i = 0; i < live.size(); i++) {
      GreedyRow& row = *live[i].row;
      const size_t own = row.max_drafts > 0 ? index++ : 0;
      row.is_finite = pass.non_finite_ops[i] < 0;
      row.num_passes += row.is_finite;
      if (!row.is_finite || row.max_drafts <= 0 || pass.argmax_ids[own] >= num_ids) continue;
      const double confidence = 1.0 / (double)pass.normalizers[own];
      row.drafts.push_back(pass.argmax_ids[own]);
      row.confidences.push_back(confidence);
      live[i].product *= confidence;
      const bool wants_more = (int)row.drafts.size() < row.max_drafts && live[i].product >= (double)row.min_confidence;
      if (wants_more) next.push_back(live[i]);
    }
    live.swap(next);
    pass = Pass();
    for (Live& each : live) pass.add_row({each.row->drafts.back()}, each.table, max_blocks, each.position++, true);
  }
  return times;
}

}  // namespace isobatch
