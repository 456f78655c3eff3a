// One step's arrays (shapes: step.py) and the check of every index in them.
#pragma once
#include <cstdint>
#include <vector>

namespace isobatch {

// Bits of step.Stat that the engine computes; the others only read logits.
enum StatBit : uint32_t { kStatTopK = 2, kStatNormalizer = 4, kStatQuantile = 8 };

struct StepArrays {
  int32_t tokens = 0, rows = 0, wanted_count = 0, max_blocks = 0, edit_count = 0;
  const int32_t* token_ids = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* row_starts = nullptr;
  const int32_t* block_tables = nullptr;
  const int32_t* wanted = nullptr;
  const uint32_t* statistics = nullptr;
  const int32_t* top_k = nullptr;
  const float* inverse_temperatures = nullptr;
  const float* quantiles = nullptr;
  const int32_t* edit_starts = nullptr;
  const int32_t* edit_ids = nullptr;
  const float* edit_values = nullptr;
  // Results, caller's memory.
  int32_t* argmax_ids = nullptr;
  float* max_logits = nullptr;
  float* normalizers = nullptr;
  int32_t* quantile_ids = nullptr;
  const int32_t* top_k_starts = nullptr;
  int32_t* top_k_ids = nullptr;
  float* top_k_logits = nullptr;
  float* top_k_weights = nullptr;
  int32_t* non_finite_ops = nullptr;
};

struct StepLimits {
  int max_tokens, max_rows, vocab_size, context_length, num_blocks, block_size;
};

// Throws std::invalid_argument for the first thing that does not fit: a wrong index must never reach a kernel. Also
// refuses a block that one row writes while another, or another place of the same table, can see it.
class StepChecker {
 public:
  explicit StepChecker(const StepLimits& limits);
  void check(const StepArrays& step);

 private:
  void check_row(const StepArrays& step, int row) const;
  void check_writes(const StepArrays& step);
  void check_wanted(const StepArrays& step) const;

  StepLimits limits_;
  std::vector<int64_t> writer_;  // by block: the table entry that writes it in this step, else -1
  std::vector<int32_t> written_;
};

}  // namespace isobatch
