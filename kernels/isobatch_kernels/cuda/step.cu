// The ends of a step: what the host sends, and what it reads.
// @use common

// @kernel begin_step
// Copies the host's numbers; the first T are token ids, and where the T from `sources` on are not -1 they are indexes of the
// tokens that the step before chose. No row is non-finite yet. Blocks (ceil(max(count, num_flags)/256)) of 256.
X1_KERNEL __launch_bounds__(256) begin_step(const int* from, const int* chosen, int* numbers, unsigned* flags, int count,
                                            int num_flags, int T, int sources) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  x1_let_next_begin();
  if (i < count) {
    const int source = sources && i < T ? from[sources + i] : -1;
    numbers[i] = source >= 0 ? chosen[source] : from[i];
  }
  if (i < num_flags) flags[i] = 0xffffffffu;
}

// @kernel collect
// Results to the host's memory. Blocks (ceil(count/256)) of 256.
X1_KERNEL __launch_bounds__(256) collect(const int* results, int* to, int count) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  x1_after_previous();
  if (i < count) to[i] = results[i];
}
