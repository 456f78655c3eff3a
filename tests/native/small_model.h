// A small random model in an engine, and steps of it.
#pragma once
#include <memory>
#include <vector>

#include "check.h"
#include "engine.h"

namespace isobatch::testing {

struct ModelShape {
  bool dense;       // 16-bit matrices instead of quantised ones
  int group;        // of quantised weights
  int block;        // of activations
  int num_blocks;
};

constexpr int kVocabulary = 200, kContext = 640, kLayers = 2, kMostTokens = 320, kMostRows = 8;

// The same model for the same shape, whatever the unit and the threads.
std::unique_ptr<Engine> make_engine(const ModelShape& shape, const char* unit, int threads);

// One step with its own arrays. Rows are (blocks, first position, number of tokens); every statistic is asked for at the
// last token of each row and, with `more_wanted`, at its first too.
struct Row {
  std::vector<int32_t> blocks;
  int start, tokens;
};
struct Step {
  StepArrays arrays;
  std::vector<int32_t> token_ids, positions, row_starts, block_tables, wanted, top_k, edit_starts, edit_ids, argmax_ids,
      quantile_ids, top_k_starts, top_k_ids, non_finite_ops;
  std::vector<uint32_t> statistics;
  std::vector<float> inverse_temperatures, quantiles, edit_values, max_logits, normalizers, top_k_logits, top_k_weights;

  Step(Random& random, const std::vector<Row>& rows, bool more_wanted);
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  // Sizes and clears the results and points the arrays at the vectors, after a test has changed one.
  void connect();
  bool results_equal(const Step& other) const;
};

}  // namespace isobatch::testing
