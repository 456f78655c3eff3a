// The definition of class X1 in scalar code, on plain arrays; written to be read beside docs/numerics.md. Slow on purpose.
#pragma once
#include <cstdint>
#include <vector>
#include "views.h"

namespace isobatch::reference {

// Activations of one row: q (K), d (ceil(K/A)); false when the row is non-finite. `limit` is the largest integer.
bool quantize(const float* x, int K, int A, int limit, int16_t* q, float* d);

// Plain weights: q (N, K) as the contract's integers (8-bit already re-centred), scales and biases (N, K/G), floors applied.
struct Weights {
  int N = 0, K = 0, G = 0;
  std::vector<int16_t> q;
  std::vector<float> scales, biases;
};
// y (N) for one row of quantised activations; epilogue vectors may be null.
void linear(const Weights& w, int A, const int16_t* q, const float* d, const float* bias, const float* residual, float* y);
// Dense: w (N, K) widened to fp32, weight type 0 = fp16, 1 = bf16 (what x is rounded to).
bool dense_linear(const float* w, int N, int K, int type, const float* x, const float* bias, const float* residual, float* y);
void embed(const Weights& w, int id, float* x);
float sum256(const float* v, int n);
void rms_norm(const float* x, const float* w, float eps, int K, float* y);
void silu_mul(const float* gate, const float* up, int K, float* y);
void rope(float* x, int num_heads, int head_dim, const RopeArgs& rope, int position);
uint16_t to_f16(float x);   // round to nearest even, saturated
float from_f16(uint16_t h);
// keys, values: fp32 values of the fp16 cache, (num_keys, head_dim); visible keys are first_visible..num_keys-1.
void attention(const float* q, const float* keys, const float* values, int num_keys, int first_visible, int head_dim, float* out);
void statistics(float* logits, int V, const StatisticsArgs& args, StatisticsResult& result);

}  // namespace isobatch::reference
