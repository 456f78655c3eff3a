// Weights at load: MLX's packed layout becomes the records of linear.h, with the floors and re-centring of numerics.md.
#pragma once
#include <memory>
#include <vector>
#include "aligned.h"
#include "linear.h"
#include "reference.h"
#include "thread_pool.h"

namespace isobatch {

// One quantised matrix as stored by MLX: a little-endian bit stream along K in each row.
struct QuantizedSource {
  int N, K, bits, group;
  const uint32_t* packed;  // (N, K*bits/32)
  bool half;               // scales and biases are fp16, else fp32
  const void* scales;      // (N, K/group)
  const void* biases;      // the same, or null for +0
};

// Throws std::invalid_argument where bits or group size are none of the contract's.
void check_format(int bits, int group);

struct DenseSource {
  int N, K;
  bool bfloat;
  const uint16_t* values;  // (N, K)
};

struct QuantizedWeight {
  PackedView view{};
  std::unique_ptr<reference::Weights> plain;
};

struct DenseMatrix {
  DenseView view{};
  std::vector<float> plain;
};

// Joins the sources along N (they must agree on everything but N) and repacks them in sub-blocks of b inputs, in memory of
// the arena. keep_plain: makes the reference's copy instead of records. Throws std::invalid_argument for what cannot be.
std::unique_ptr<QuantizedWeight> pack_quantized(const std::vector<QuantizedSource>& sources, int b, bool keep_plain,
                                                Arena& arena, ThreadPool& pool);
std::unique_ptr<DenseMatrix> pack_dense(const std::vector<DenseSource>& sources, bool keep_plain, Arena& arena);

// x = row `id` of the matrix, as an embedding (numerics.md section 1).
void embed_quantized(const PackedView& w, int id, float* x);
void embed_dense(const DenseView& w, int id, float* x);

}  // namespace isobatch
