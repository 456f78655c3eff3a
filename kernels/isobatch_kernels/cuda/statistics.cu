// Statistics of rows of logits (numerics.md section 5). Ids are cut in chunks of 1,024.
// @use common

// Larger logit, then lower id.
__device__ __forceinline__ void keep_better(float& logit, int& id, float other, int other_id) {
  const bool better = other > logit || (other == logit && other_id < id);
  logit = better ? other : logit;
  id = better ? other_id : id;
}
__device__ __forceinline__ void best_of_warp(float& logit, int& id) {
#pragma unroll
  for (int w = 16; w > 0; w /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, logit, w);
    const int other_id = __shfl_xor_sync(kAllLanes, id, w);
    keep_better(logit, id, other, other_id);
  }
}
// The best of a row from the best of its chunks, in every thread of a block of 256.
__device__ __forceinline__ void best_of_row(const float* maxima, const int* ids, int chunks, float& logit, int& id) {
  __shared__ float logit_of[8];
  __shared__ int id_of[8];
  logit = kMinusInfinity;
  id = 0x7fffffff;
  for (int i = threadIdx.x; i < chunks; i += 256) keep_better(logit, id, maxima[i], ids[i]);
  best_of_warp(logit, id);
  if ((threadIdx.x & 31) == 0) {
    logit_of[threadIdx.x >> 5] = logit;
    id_of[threadIdx.x >> 5] = id;
  }
  __syncthreads();
  for (int i = 0; i < 8; i++) keep_better(logit, id, logit_of[i], id_of[i]);
}
__device__ __forceinline__ float weight_of(float logit, float largest, float inverse_temperature) {
  return x1_exp(x1_mul(x1_add(logit, -largest), inverse_temperature));
}

// @kernel apply_edits
// Adds the edits of each row in order, in place. Blocks (L) of 32.
X1_KERNEL apply_edits(float* logits, const int* edit_starts, const int* edit_ids, const float* edit_values, int V) {
  x1_let_next_begin();
  x1_after_previous();
  if (threadIdx.x != 0) return;
  const int row = blockIdx.x;
  float* at = logits + (size_t)row * V;
  for (int e = edit_starts[row]; e < edit_starts[row + 1]; e++) {
    at[edit_ids[e]] = x1_add(at[edit_ids[e]], x1_flush(edit_values[e], kInputFloor));
  }
}

// @kernel chunk_maxima
// Largest logit of every chunk and its lowest id. Blocks (chunks, L) of 256.
X1_KERNEL __launch_bounds__(256) chunk_maxima(const float* logits, float* maxima, int* ids, int V) {
  __shared__ float logit_of[8];
  __shared__ int id_of[8];
  x1_let_next_begin();
  x1_after_previous();
  const int begin = blockIdx.x * kStatisticsChunk, end = min(begin + kStatisticsChunk, V);
  const float* x = logits + (size_t)blockIdx.y * V;
  float logit = kMinusInfinity;
  int id = 0x7fffffff;
  for (int i = begin + threadIdx.x; i < end; i += 256) keep_better(logit, id, x[i], i);
  best_of_warp(logit, id);
  if ((threadIdx.x & 31) == 0) {
    logit_of[threadIdx.x >> 5] = logit;
    id_of[threadIdx.x >> 5] = id;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < 8; i++) keep_better(logit, id, logit_of[i], id_of[i]);
  maxima[blockIdx.y * gridDim.x + blockIdx.x] = logit;
  ids[blockIdx.y * gridDim.x + blockIdx.x] = id == 0x7fffffff ? begin : id;
}

// @kernel chunk_sums
// sum256 of the weights of every chunk. Blocks (chunks, L) of 256.
X1_KERNEL __launch_bounds__(256) chunk_sums(const float* logits, const float* maxima, const int* ids,
                                            const float* inverse_temperatures, float* sums, int V) {
  __shared__ float chains[256];
  x1_let_next_begin();
  x1_after_previous();
  const int begin = blockIdx.x * kStatisticsChunk, end = min(begin + kStatisticsChunk, V);
  const int chunks = gridDim.x, row = blockIdx.y;
  const float* x = logits + (size_t)row * V;
  float largest;
  int id;
  best_of_row(maxima + row * chunks, ids + row * chunks, chunks, largest, id);
  float chain = 0.0f;
  for (int i = begin + threadIdx.x; i < end; i += 256) {
    chain = x1_add(chain, weight_of(x[i], largest, inverse_temperatures[row]));
  }
  chains[threadIdx.x] = chain;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = chains[threadIdx.x + 32 * i];
  const float sum = x1_tree256(v);
  if (threadIdx.x == 0) sums[row * chunks + blockIdx.x] = sum;
}

// @kernel finish_statistics
// answers (L, 4): argmax id, bits of the largest logit, bits of the normaliser, id at the quantile. sums is null where only the
// argmax is wanted. tokens (L): the id at the quantile where by_quantile says so, else the argmax. Blocks (L) of 256.
X1_KERNEL __launch_bounds__(256) finish_statistics(const float* logits, const float* maxima, const int* ids, const float* sums,
                                                   const float* inverse_temperatures, const float* quantiles,
                                                   const int* by_quantile, int* answers, int* tokens, int V, int chunks) {
  __shared__ float weights[kStatisticsChunk];
  __shared__ float target_of, before_of;
  __shared__ int chunk_of;
  x1_let_next_begin();
  x1_after_previous();
  const int row = blockIdx.x, t = threadIdx.x;
  const float* x = logits + (size_t)row * V;
  float largest;
  int best;
  best_of_row(maxima + (size_t)row * chunks, ids + (size_t)row * chunks, chunks, largest, best);
  if (t == 0) {
    answers[row * 4] = best;
    answers[row * 4 + 1] = __float_as_int(largest);
    tokens[row] = best;
  }
  if (!sums) return;
  const float inverse_temperature = inverse_temperatures[row];
  const float* sum = sums + (size_t)row * chunks;
  if (t == 0) {
    float z = sum[0];
#pragma unroll 8
    for (int i = 1; i < chunks; i++) z = x1_add(z, sum[i]);
    answers[row * 4 + 2] = __float_as_int(z);
    const float target = x1_mul(quantiles[row], z);
    float before = 0.0f, running = sum[0];
    int chunk = 0;
    while (chunk < chunks && !(running > target)) {
      chunk++;
      before = running;
      if (chunk < chunks) running = x1_add(running, sum[chunk]);
    }
    target_of = target;
    before_of = before;
    chunk_of = chunk;
  }
  __syncthreads();
  int chunk = chunk_of;
  const bool passed = chunk < chunks;
  for (chunk = passed ? chunk : chunks - 1; chunk >= 0; chunk--) {
    const int begin = chunk * kStatisticsChunk, n = min(kStatisticsChunk, V - begin);
    for (int i = t; i < n; i += 256) weights[i] = weight_of(x[begin + i], largest, inverse_temperature);
    __syncthreads();
    if (t == 0) {
      int i = n;
      if (passed) {
        float b = before_of;
        for (i = 0; i < n; i++) {
          b = x1_add(b, weights[i]);
          if (b > target_of) break;
        }
      }
      if (i == n) {
        for (i = n - 1; i >= 0 && !(weights[i] > 0.0f);) i--;
      }
      answers[row * 4 + 3] = i >= 0 ? begin + i : begin;
      if (by_quantile[row]) tokens[row] = answers[row * 4 + 3];
      chunk_of = i;
    }
    __syncthreads();
    if (passed || chunk_of >= 0) break;
    __syncthreads();
  }
}
