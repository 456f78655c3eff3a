// Statistics of rows of logits (numerics.md section 5). Ids are cut in chunks of 1,024.
// @use common

// Larger logit, then lower id.
METAL_FUNC void keep_better(thread float& logit, thread int& id, float other, int other_id) {
  const bool better = other > logit || (other == logit && other_id < id);
  logit = better ? other : logit;
  id = better ? other_id : id;
}
METAL_FUNC void best_of_simdgroup(thread float& logit, thread int& id) {
  for (ushort w = 16; w > 0; w /= 2) {
    const float other = simd_shuffle_xor(logit, w);
    const int other_id = simd_shuffle_xor(id, w);
    keep_better(logit, id, other, other_id);
  }
}
METAL_FUNC float weight_of(float logit, float largest, float inverse_temperature) {
  return x1_exp((logit - largest) * inverse_temperature);
}

// @kernel apply_edits
// @inputs logits edit_starts edit_ids edit_values sizes
// @outputs edited
// Values are added in order. sizes: V. Grid (ceil(V/256)*256, L, 1).
{
  const int V = sizes[0], id = int(thread_position_in_grid.x);
  const size_t row = threadgroup_position_in_grid.y;
  if (id >= V) return;
  float logit = logits[row * V + id];
  for (int e = edit_starts[row]; e < edit_starts[row + 1]; e++) {
    if (edit_ids[e] == id) logit = logit + flush_below(edit_values[e], kInputFloorBits);
  }
  edited[row * V + id] = logit;
}

// @kernel chunk_maxima
// @inputs logits sizes
// @outputs maxima ids
// Largest logit of every chunk and its lowest id. sizes: V, chunks. Grid (256, chunks, L).
{
  threadgroup float logit_of[8];
  threadgroup int id_of[8];
  const int V = sizes[0], chunks = sizes[1];
  const size_t row = threadgroup_position_in_grid.z;
  const int begin = int(threadgroup_position_in_grid.y) * kStatisticsChunk, end = min(begin + kStatisticsChunk, V);
  float logit = -MAXFLOAT;
  int id = V;
  for (int i = begin + int(thread_index_in_threadgroup); i < end; i += 256) keep_better(logit, id, logits[row * V + i], i);
  best_of_simdgroup(logit, id);
  if (thread_index_in_simdgroup == 0) {
    logit_of[simdgroup_index_in_threadgroup] = logit;
    id_of[simdgroup_index_in_threadgroup] = id;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index_in_threadgroup != 0) return;
  for (int i = 1; i < 8; i++) keep_better(logit, id, logit_of[i], id_of[i]);
  maxima[row * chunks + threadgroup_position_in_grid.y] = logit;
  ids[row * chunks + threadgroup_position_in_grid.y] = id;
}

// @kernel row_maximum
// @inputs maxima ids sizes
// @outputs largest argmax
// sizes: V, chunks. Grid (32, L, 1).
{
  const int V = sizes[0], chunks = sizes[1];
  const size_t row = threadgroup_position_in_grid.y;
  float logit = -MAXFLOAT;
  int id = V;
  for (int i = int(thread_index_in_simdgroup); i < chunks; i += 32) {
    keep_better(logit, id, maxima[row * chunks + i], ids[row * chunks + i]);
  }
  best_of_simdgroup(logit, id);
  if (thread_index_in_simdgroup == 0) {
    largest[row] = logit;
    argmax[row] = id;
  }
}

// @kernel chunk_sums
// @inputs logits largest inverse_temperatures sizes
// @outputs sums
// sum256 of the weights of every chunk. sizes: V, chunks. Grid (256, chunks, L).
{
  threadgroup float chains[256];
  const int V = sizes[0], chunks = sizes[1];
  const size_t row = threadgroup_position_in_grid.z;
  const int begin = int(threadgroup_position_in_grid.y) * kStatisticsChunk, end = min(begin + kStatisticsChunk, V);
  float chain = 0.0f;
  for (int i = begin + int(thread_index_in_threadgroup); i < end; i += 256) {
    chain = chain + weight_of(logits[row * V + i], largest[row], inverse_temperatures[row]);
  }
  chains[thread_index_in_threadgroup] = chain;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup_index_in_threadgroup != 0) return;
  const float sum = sum256_tree(chains, thread_index_in_simdgroup);
  if (thread_index_in_simdgroup == 0) sums[row * chunks + threadgroup_position_in_grid.y] = sum;
}

// @kernel quantile
// @inputs logits largest inverse_temperatures sums quantiles sizes
// @outputs normalizers quantile_ids
// Running sums over chunks, then over the ids of the chunk that passes the target. sizes: V, chunks. Grid (256, L, 1).
{
  threadgroup float weights[1024];
  threadgroup float bounds[2];  // target, running sum before the chunk
  threadgroup int found[1];
  const int V = sizes[0], chunks = sizes[1], t = int(thread_index_in_threadgroup);
  const size_t row = threadgroup_position_in_grid.y;
  const float m = largest[row], inverse_temperature = inverse_temperatures[row];
  const device float* sum = sums + row * chunks;
  if (t == 0) {
    float z = sum[0];
    for (int i = 1; i < chunks; i++) z = z + sum[i];
    normalizers[row] = z;
    const float target = quantiles[row] * z;
    float before = 0.0f, running = sum[0];
    int chunk = 0;
    while (chunk < chunks && !(running > target)) {
      chunk++;
      before = running;
      if (chunk < chunks) running = running + sum[chunk];
    }
    bounds[0] = target;
    bounds[1] = before;
    found[0] = chunk;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int chunk = found[0], begin = min(chunk, chunks - 1) * kStatisticsChunk, end = min(begin + kStatisticsChunk, V);
  for (int i = begin + t; i < end; i += 256) weights[i - begin] = weight_of(logits[row * V + i], m, inverse_temperature);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t != 0) return;
  int id = -1;
  if (chunk < chunks) {
    float b = bounds[1];
    for (int i = begin; i < end && id < 0; i++) {
      b = b + weights[i - begin];
      if (b > bounds[0]) id = i;
    }
  }
  for (int i = end - 1; i >= begin && id < 0; i--) id = weights[i - begin] > 0.0f ? i : -1;
  for (int i = begin - 1; i >= 0 && id < 0; i--) id = weight_of(logits[row * V + i], m, inverse_temperature) > 0.0f ? i : -1;
  quantile_ids[row] = max(id, 0);
}
