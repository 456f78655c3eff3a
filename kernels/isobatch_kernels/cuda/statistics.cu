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
  logit = -INFINITY;
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
// @inputs logits edit_starts edit_ids edit_values
// @outputs done
// Adds the edits of each row in order, in place. Blocks (L) of 32.
{
  if (threadIdx.x != 0) return;
  const int row = blockIdx.x;
  float* at = const_cast<float*>(logits) + (size_t)row * logits_shape[1];
  for (int e = edit_starts[row]; e < edit_starts[row + 1]; e++) {
    at[edit_ids[e]] = x1_add(at[edit_ids[e]], x1_flush(edit_values[e], kInputFloor));
  }
  done[row] = 1;
}

// @kernel chunk_maxima
// @inputs logits edited
// @outputs maxima ids
// Largest logit of every chunk and its lowest id; `edited` orders this after the edits. Blocks (chunks, L) of 256.
{
  __shared__ float logit_of[8];
  __shared__ int id_of[8];
  const int V = logits_shape[1], begin = blockIdx.x * kStatisticsChunk, end = min(begin + kStatisticsChunk, V);
  const float* x = logits + (size_t)blockIdx.y * V;
  float logit = -INFINITY;
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
// @inputs logits maxima ids inverse_temperatures
// @outputs sums
// sum256 of the weights of every chunk. Blocks (chunks, L) of 256.
{
  __shared__ float chains[256];
  const int V = logits_shape[1], begin = blockIdx.x * kStatisticsChunk, end = min(begin + kStatisticsChunk, V);
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
// @inputs logits maxima ids sums inverse_temperatures quantiles
// @outputs answers
// answers (L, 4): argmax id, bits of the largest logit, bits of the normaliser, id at the quantile. sums has stride 0 where
// only the argmax is wanted. Blocks (L) of 256.
{
  __shared__ float weights[kStatisticsChunk];
  __shared__ float target_of, before_of;
  __shared__ int chunk_of;
  const int V = logits_shape[1], row = blockIdx.x, chunks = maxima_shape[1], t = threadIdx.x;
  const float* x = logits + (size_t)row * V;
  float largest;
  int best;
  best_of_row(maxima + (size_t)row * chunks, ids + (size_t)row * chunks, chunks, largest, best);
  if (t == 0) {
    answers[row * 4] = best;
    answers[row * 4 + 1] = __float_as_int(largest);
  }
  if (sums_strides[1] == 0) return;
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
      chunk_of = i;
    }
    __syncthreads();
    if (passed || chunk_of >= 0) break;
    __syncthreads();
  }
}

// @kernel collect
// @inputs flags answers after
// @outputs results
// One array for the host: the flags of T tokens, then the answers; `after` orders it behind the step. Blocks (1) of 256.
{
  const int T = flags_shape[0], count = answers_strides[1] ? answers_shape[0] * 4 : 0;
  for (int i = threadIdx.x; i < T; i += 256) results[i] = (int)flags[i];
  for (int i = threadIdx.x; i < count; i += 256) results[T + i] = answers[i];
}

// @kernel begin_step
// @inputs count
// @outputs flags
// No row is non-finite yet; count has as many elements as there are flags. Blocks (ceil(n/256)) of 256.
{
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < count_shape[0]) flags[i] = 0xffffffffu;
}
