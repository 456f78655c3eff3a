// The K largest logits of a row by (logit descending, id ascending), as a set: the host puts its K entries in order.
// Four passes find the K-th largest key, eight bits at a time; then threads copy what lies above it, and the lowest ids of
// those that equal it.
// @use statistics

// Unsigned integers in the order of floats (there is no negative zero among logits).
__device__ __forceinline__ unsigned ordered_key(float x) {
  const unsigned u = __float_as_uint(x);
  return (u & 0x80000000u) ? ~u : u | 0x80000000u;
}

// @kernel top_k
// counts (L): K of each row, 0 for none, at most V; the outputs are (L, stride). Blocks (L) of 1,024.
X1_KERNEL __launch_bounds__(1024) top_k(const float* logits, const float* maxima, const float* inverse_temperatures,
                                        const int* counts, int* ids, float* top_logits, float* top_weights, int V, int chunks,
                                        int stride) {
  __shared__ unsigned histogram[256];
  __shared__ unsigned state[2];  // prefix of the key, how many are still wanted
  __shared__ unsigned above_of[1024];
  __shared__ unsigned equal_of[1024];
  __shared__ float largest_of;
  x1_let_next_begin();
  x1_after_previous();
  const int t = threadIdx.x, row = blockIdx.x, wanted = counts[row];
  const float* x = logits + (size_t)row * V;
  if (wanted <= 0) return;
  if (t < 32) {
    float largest = kMinusInfinity;
    for (int i = t; i < chunks; i += 32) largest = fmaxf(largest, maxima[(size_t)row * chunks + i]);
    largest = x1_warp_max(largest);
    if (t == 0) {
      largest_of = largest;
      state[0] = 0u;
      state[1] = (unsigned)wanted;
    }
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (t < 256) histogram[t] = 0u;
    __syncthreads();
    const unsigned prefix = state[0], mask = shift == 24 ? 0u : 0xffffffffu << (shift + 8);
#pragma unroll 4
    for (int i = t; i < V; i += 1024) {
      const unsigned key = ordered_key(x[i]);
      if ((key & mask) == prefix) atomicAdd(&histogram[(key >> shift) & 255u], 1u);
    }
    __syncthreads();
    if (t == 0) {
      unsigned left = state[1];
      int digit = 255;
      for (; digit > 0; digit--) {
        if (histogram[digit] >= left) break;
        left -= histogram[digit];
      }
      state[0] = prefix | ((unsigned)digit << shift);
      state[1] = left;
    }
    __syncthreads();
  }
  // Each thread takes neighbouring ids, so that places follow from counts in the order of threads.
  const unsigned bound = state[0], wanted_equal = state[1];
  const int part = (V + 1023) / 1024, begin = min(t * part, V), end = min(begin + part, V);
  unsigned above = 0, equal = 0;
  for (int i = begin; i < end; i++) {
    const unsigned key = ordered_key(x[i]);
    above += key > bound ? 1u : 0u;
    equal += key == bound ? 1u : 0u;
  }
  above_of[t] = above;
  equal_of[t] = equal;
  __syncthreads();
  for (int w = 1; w < 1024; w *= 2) {
    const unsigned a = t >= w ? above_of[t - w] : 0u, e = t >= w ? equal_of[t - w] : 0u;
    __syncthreads();
    above_of[t] += a;
    equal_of[t] += e;
    __syncthreads();
  }
  unsigned place_above = above_of[t] - above, place_equal = equal_of[t] - equal;
  const unsigned all_above = (unsigned)wanted - wanted_equal;
  if (above == 0 && (equal == 0 || place_equal >= wanted_equal)) return;
  for (int i = begin; i < end; i++) {
    const unsigned key = ordered_key(x[i]);
    if (key < bound || (key == bound && place_equal >= wanted_equal)) continue;
    const unsigned place = key > bound ? place_above++ : all_above + place_equal++;
    const size_t to = (size_t)row * stride + place;
    ids[to] = i;
    top_logits[to] = x[i];
    top_weights[to] = weight_of(x[i], largest_of, inverse_temperatures[row]);
  }
}
