// The interpreter of a Program: one call computes a step on all threads.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kv_pool.h"
#include "linear_float.h"
#include "row_ops.h"
#include "step.h"
#include "thread_pool.h"
#include "weights.h"

namespace isobatch {

// Kernel tables of one instruction set.
struct Unit {
  const RowOps* rows = nullptr;
  const LinearOps* linears = nullptr;
  const FloatLinearOps* floats = nullptr;
  bool available() const { return rows && linears; }
};
// "reference", "scalar", "avx2", "vnni", "amx" or "neon"; not available where this processor or this build lacks it.
Unit find_unit(const std::string& name);

struct EngineConfig {
  int hidden_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size, context_length;
  float attention_scale;
  int rotary_dim;
  bool rope_interleaved;
  int num_blocks, block_size, max_rows, max_tokens, num_threads;
  std::string unit;
  int activation_limit = kActivationMax;  // the largest block integer
};

enum class OpKind { kNothing, kEmbed, kNormQuantize, kQuantize, kLinear, kRopeWriteKV, kPagedAttention, kGateQuantize, kRowStatistics };

struct Op {
  OpKind kind = OpKind::kNothing;
  int x = -1, out = -1, residual = -1;  // buffers
  std::vector<int> weights;             // of a linear layer or an embedding
  std::vector<float> vector;            // norm weight, or bias of a linear layer
  float epsilon = 0;
  int layer = 0, window = 0;
  bool wanted_only = false;
  LinearPolicy policy = LinearPolicy::kExact;  // of a linear layer
  int threshold_rows = 0;                      // of the policy kThreshold: most rows that take the GEMV
};

// Tokens of one row whose attention is computed together.
struct AttentionTile {
  int token, count;
};

// A per-token buffer: fp32 rows, or quantised activations in blocks.
struct Buffer {
  int width = 0, block = 0;
  bool half_sums = false;
  bool wanted_only = false;  // rows are wanted positions
  AlignedBuffer values, d, s, s_low, s_high;

  float* row(int m) const { return values.as<float>() + (size_t)m * width; }
  void ensure(int rows, int panel);  // `panel`: rows of a panel of quantised activations
};

class Engine {
 public:
  Engine(const EngineConfig& config, std::vector<float> rope_table);

  // Building, in program order. Indexes are those of the order of calls.
  int add_buffer(int width, int block, bool half_sums);
  int add_quantized(const std::vector<QuantizedSource>& sources, int b);
  int add_dense(const std::vector<DenseSource>& sources);
  void add_op(Op op);

  struct Times {
    int64_t forward_ns = 0, statistics_ns = 0;
  };
  // Throws std::invalid_argument for a malformed step, before anything is written.
  Times run(const StepArrays& step);
  // Logits of the last step, (wanted, vocab_size); null when the program makes none.
  const float* logits() const { return logits_ < 0 ? nullptr : buffers_[logits_].values.as<float>(); }

  // Clears blocks before anybody can see them: the next step does it, on all its threads.
  void zero_blocks(const int32_t* blocks, int count);
  void read_block(int block, uint16_t* out);
  void write_block(int block, const uint16_t* in);
  // Steps of up to `rows` rows (and more than the entry before) have panels of at most `most` rows; others the default.
  // A matter of speed alone. `most` 0 is the default too. Throws std::invalid_argument unless rows ascend and
  // `most` is at most kMaxPanelRows.
  struct PanelLimit {
    int rows, most;
  };
  void set_panel_limits(std::vector<PanelLimit> limits);
  int panel_for(int rows) const;
  void set_flush_subnormals(bool flush) { flush_subnormals_ = flush; }
  int threads() const { return pool_.size(); }
  const EngineConfig& config() const { return config_; }

 private:
  struct Weight {
    std::unique_ptr<QuantizedWeight> quantized;
    std::unique_ptr<DenseMatrix> dense;
    int outputs() const { return quantized ? quantized->view.N : dense->view.N; }
    int inputs() const { return quantized ? quantized->view.K : dense->view.K; }
    int tiles() const { return quantized ? quantized->view.tiles : dense->view.tiles; }
  };

  void check_op(const Op& op) const;
  void check_linear(const Op& op) const;
  void prepare_step(const StepArrays& step);
  void finish_step(const StepArrays& step);
  void zero_shared();
  void zero_now();
  void run_thread(int thread);
  void run_op(int index, int thread);
  void embed(const Op& op, WorkCounter& work);
  void norm(int index, WorkCounter& work);
  void quantize(int index, WorkCounter& work);
  void gate(int index, WorkCounter& work);
  void linear(int index, WorkCounter& prepare, WorkCounter& work);
  void dense_linear(int index, const LinearOutput& out, WorkCounter& prepare, WorkCounter& work);
  void prepare_float_rows(const StepArrays& step);
  static bool takes_gemv(const Op& op, int rows);
  void float_linear(int index, const LinearOutput& out, WorkCounter& prepare, WorkCounter& work);
  void rope_write_kv(int index, WorkCounter& work);
  void attention(const Op& op, WorkCounter& work, WorkCounter& merge, int thread);
  void attention_by_chunks(const Op& op, WorkCounter& work, WorkCounter& merge, float* scratch);
  AttentionArgs attention_args(const Op& op, int token, int kv_head) const;
  void tile_attention();
  void statistics(int index, WorkCounter& work, int thread);
  ActView view(int buffer, int op_index) const;
  int rows_of(bool wanted_only) const { return wanted_only ? step_.wanted_count : step_.tokens; }
  int piece(int total) const;

  EngineConfig config_;
  Unit unit_;
  ThreadPool pool_;
  StepChecker checker_;
  KvPool kv_;
  std::vector<float> rope_table_;
  Arena arena_;
  std::vector<Buffer> buffers_;
  std::vector<Weight> weights_;
  std::vector<Op> ops_;
  int logits_ = -1;
  bool flush_subnormals_ = false;
  std::vector<PanelLimit> panel_limits_;
  std::mutex running_;
  std::vector<int32_t> to_zero_;  // blocks that are still to be cleared
  WorkCounter zeroing_;

  // State of the step in progress.
  StepArrays step_;
  Times times_;
  int64_t statistics_start_ = 0;
  std::unique_ptr<WorkCounter[]> counters_;  // two for each op
  std::vector<int32_t> token_rows_;          // by token: its row
  std::vector<uint32_t> non_finite_, wanted_non_finite_;
  AlignedBuffer dense_rows_, dense_powers_;
  AlignedBuffer float_rows_, float_sums_;
  AlignedBuffer partials_;
  std::vector<uint8_t> present_;
  std::vector<AttentionTile> attention_tiles_;
  int attention_piece_ = 1;
  int max_chunks_ = 0;
  bool by_chunks_ = false;
  std::vector<AlignedBuffer> scratch_;       // by thread
};

}  // namespace isobatch
