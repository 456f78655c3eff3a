#include "step.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace isobatch {
namespace {

void require(bool condition, const char* rule, int64_t got) {
  if (!condition) throw std::invalid_argument(std::string("[step] ") + rule + ", got " + std::to_string(got));
}

}  // namespace

StepChecker::StepChecker(const StepLimits& limits) : limits_(limits), writer_(limits.num_blocks, -1) {}

void StepChecker::check(const StepArrays& step) {
  require(step.tokens >= 1 && step.tokens <= limits_.max_tokens, "tokens must be 1 to max_num_batched_tokens", step.tokens);
  require(step.rows >= 1 && step.rows <= limits_.max_rows, "token rows must be 1 to max_num_seqs", step.rows);
  require(step.row_starts[0] == 0, "query_start_loc must begin with 0", step.row_starts[0]);
  for (int row = 0; row < step.rows; row++) {
    require(step.row_starts[row + 1] > step.row_starts[row], "query_start_loc must ascend", step.row_starts[row + 1]);
  }
  require(step.row_starts[step.rows] == step.tokens, "query_start_loc must end with the number of tokens",
          step.row_starts[step.rows]);
  for (int i = 0; i < step.tokens; i++) {
    require(step.token_ids[i] >= 0 && step.token_ids[i] < limits_.vocab_size, "token ids must lie in the vocabulary",
            step.token_ids[i]);
  }
  for (int row = 0; row < step.rows; row++) check_row(step, row);
  check_writes(step);
  check_wanted(step);
}

void StepChecker::check_row(const StepArrays& step, int row) const {
  const int begin = step.row_starts[row], end = step.row_starts[row + 1];
  require(step.positions[begin] >= 0, "positions must not be negative", step.positions[begin]);
  for (int i = begin; i < end; i++) {
    require(step.positions[i] < limits_.context_length, "positions must lie in the context", step.positions[i]);
    require(i == begin || step.positions[i] == step.positions[i - 1] + 1, "positions of a row must be consecutive",
            step.positions[i]);
  }
  const int blocks = step.positions[end - 1] / limits_.block_size + 1;
  require(blocks <= step.max_blocks, "block_tables must hold the blocks of every position", step.max_blocks);
  const int32_t* table = step.block_tables + (int64_t)row * step.max_blocks;
  for (int i = 0; i < blocks; i++) {
    require(table[i] >= 0 && table[i] < limits_.num_blocks, "block ids must lie in the pool", table[i]);
  }
}

void StepChecker::check_writes(const StepArrays& step) {
  int conflict = -1;
  written_.clear();
  for (int row = 0; row < step.rows; row++) {
    const int32_t* table = step.block_tables + (int64_t)row * step.max_blocks;
    const int first = step.positions[step.row_starts[row]] / limits_.block_size;
    const int last = step.positions[step.row_starts[row + 1] - 1] / limits_.block_size;
    for (int i = first; i <= last; i++) {
      int64_t& writer = writer_[table[i]];
      if (writer >= 0) conflict = table[i];
      writer = (int64_t)row * step.max_blocks + i;
      written_.push_back(table[i]);
    }
  }
  for (int row = 0; row < step.rows; row++) {
    const int32_t* table = step.block_tables + (int64_t)row * step.max_blocks;
    const int blocks = step.positions[step.row_starts[row + 1] - 1] / limits_.block_size + 1;
    for (int i = 0; i < blocks; i++) {
      const int64_t writer = writer_[table[i]];
      if (writer >= 0 && writer != (int64_t)row * step.max_blocks + i) conflict = table[i];
    }
  }
  for (int32_t block : written_) writer_[block] = -1;
  require(conflict < 0, "a written block must belong to one row alone", conflict);
}

void StepChecker::check_wanted(const StepArrays& step) const {
  for (int i = 0; i < step.wanted_count; i++) {
    require(step.wanted[i] >= 0 && step.wanted[i] < step.tokens, "wanted positions must be indexes of tokens", step.wanted[i]);
    require(i == 0 || step.wanted[i] > step.wanted[i - 1], "wanted positions must ascend", step.wanted[i]);
    const bool top = step.statistics[i] & kStatTopK;
    require(!top || (step.top_k[i] >= 1 && step.top_k[i] <= limits_.vocab_size), "top_k must be 1 to the vocabulary size",
            step.top_k[i]);
    require(std::isfinite(step.inverse_temperatures[i]) && step.inverse_temperatures[i] >= 0,
            "inverse temperatures must be finite and not negative; index of the value", i);
    require(step.quantiles[i] >= 0 && step.quantiles[i] < 1, "quantiles must be at least 0 and below 1; index of the value", i);
    require(step.edit_starts[i + 1] >= step.edit_starts[i], "edit_starts must not descend", step.edit_starts[i + 1]);
  }
  require(step.edit_starts[0] == 0, "edit_starts must begin with 0", step.edit_starts[0]);
  require(step.edit_starts[step.wanted_count] == step.edit_count, "edit_starts must end with the number of edits",
          step.edit_starts[step.wanted_count]);
  for (int i = 0; i < step.edit_count; i++) {
    require(step.edit_ids[i] >= 0 && step.edit_ids[i] < limits_.vocab_size, "edited ids must lie in the vocabulary",
            step.edit_ids[i]);
    require(std::isfinite(step.edit_values[i]), "edit values must be finite; index of the value", i);
  }
}

}  // namespace isobatch
