// Greedy passes of a draft model: each row's best token is its next one, with nothing between two passes but this.
#pragma once
#include "engine.h"

namespace isobatch {

// See greedy.py.
struct GreedyRow {
  std::vector<int32_t> token_ids;
  int32_t start_position = 0, max_drafts = 0;
  float min_confidence = 0;
  // Results.
  std::vector<int32_t> drafts;
  std::vector<double> confidences;
  int num_passes = 0;
  bool is_finite = true;
};

struct GreedyTimes {
  int64_t nanoseconds = 0;
  int passes = 0;
};

// `block_tables` has `max_blocks` entries for each row. Throws std::invalid_argument for a malformed step.
GreedyTimes draft_greedily(Engine& engine, std::vector<GreedyRow>& rows, const int32_t* block_tables, int max_blocks, int num_ids);

}  // namespace isobatch
