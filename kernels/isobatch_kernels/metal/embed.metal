// Embedding rows (numerics.md section 1): x = fma(scale, float(q), bias), from the same repacked weights as linear layers.
// @use common weights

// @kernel embed
// @inputs packed scales biases ids sizes
// @outputs x
// sizes: K. Grid (ceil(K/256)*256, T, 1).
{
  constexpr int UNIT = 128 / BITS, WORD = 32 / BITS;
  const int K = sizes[0], units = (K * BITS + 127) / 128, groups = K / G;
  const int k = int(thread_position_in_grid.x);
  const size_t token = threadgroup_position_in_grid.y;
  if (k >= K) return;
  const size_t tile = ids[token] / 32, lane = ids[token] % 32;
  const size_t at = (tile * units + k / UNIT) * 32 + lane;
  const uint word = reinterpret_cast<const device uint4*>(packed)[at][(k % UNIT) / WORD];
  const half2 pair = decode_pair<BITS, CENTRED>(word, (k % WORD) / 2);
  const size_t group = (tile * groups + k / G) * 32 + lane;
  x[token * K + k] = fma(widen(scales[group]), float(k % 2 == 0 ? pair.x : pair.y), widen(biases[group]));
}

// @kernel embed_dense
// @inputs values ids sizes
// @outputs x
// values: (N, K) half, or bfloat16 bits. sizes: K. Grid as above.
{
  const int K = sizes[0];
  const int k = int(thread_position_in_grid.x);
  const size_t token = threadgroup_position_in_grid.y;
  if (k < K) x[token * K + k] = widen(values[size_t(ids[token]) * K + k]);
}
