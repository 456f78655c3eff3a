// The K largest logits of a row by (logit descending, id ascending), as a set: the host puts its K entries in order.
// Four passes find the K-th largest key, eight bits at a time; then threads copy what lies above it, and the lowest ids of
// those that equal it.
// @use common statistics

// Unsigned integers in the order of floats (there is no negative zero among logits).
METAL_FUNC uint ordered_key(float x) {
  const uint u = as_type<uint>(x);
  return (u & 0x80000000u) ? ~u : u | 0x80000000u;
}

// @kernel top_k
// @inputs logits largest inverse_temperatures counts sizes
// @outputs ids top_logits top_weights
// counts (L): K of each row, 0 for none. Outputs (L, stride). sizes: V, stride. Grid (256, L, 1).
{
  threadgroup atomic_uint histogram[256];
  threadgroup uint state[2];  // prefix of the key, how many are still wanted
  threadgroup uint above_of[256];
  threadgroup uint equal_of[256];
  const int V = sizes[0], stride = sizes[1], t = int(thread_index_in_threadgroup);
  const size_t row = threadgroup_position_in_grid.y;
  const device float* x = logits + row * V;
  const int wanted = min(counts[row], V);
  if (wanted <= 0) return;
  if (t == 0) {
    state[0] = 0u;
    state[1] = uint(wanted);
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    atomic_store_explicit(&histogram[t], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint prefix = state[0], mask = shift == 24 ? 0u : 0xffffffffu << (shift + 8);
    for (int i = t; i < V; i += 256) {
      const uint key = ordered_key(x[i]);
      if ((key & mask) == prefix) atomic_fetch_add_explicit(&histogram[(key >> shift) & 255u], 1u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t == 0) {
      uint left = state[1];
      int digit = 255;
      for (; digit > 0; digit--) {
        const uint here = atomic_load_explicit(&histogram[digit], memory_order_relaxed);
        if (here >= left) break;
        left -= here;
      }
      state[0] = prefix | (uint(digit) << shift);
      state[1] = left;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  // Each thread takes neighbouring ids, so that places follow from counts in the order of threads.
  const uint bound = state[0], wanted_equal = state[1];
  const int part = (V + 255) / 256, begin = min(t * part, V), end = min(begin + part, V);
  uint above = 0, equal = 0;
  for (int i = begin; i < end; i++) {
    const uint key = ordered_key(x[i]);
    above += key > bound ? 1u : 0u;
    equal += key == bound ? 1u : 0u;
  }
  above_of[t] = above;
  equal_of[t] = equal;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint place_above = 0, place_equal = 0;
  for (int i = 0; i < t; i++) {
    place_above += above_of[i];
    place_equal += equal_of[i];
  }
  const uint all_above = uint(wanted) - wanted_equal;
  for (int i = begin; i < end; i++) {
    const uint key = ordered_key(x[i]);
    if (key < bound || (key == bound && place_equal >= wanted_equal)) continue;
    const uint place = key > bound ? place_above++ : all_above + place_equal++;
    const size_t to = row * stride + place;
    ids[to] = i;
    top_logits[to] = x[i];
    top_weights[to] = weight_of(x[i], largest[row], inverse_temperatures[row]);
  }
}
