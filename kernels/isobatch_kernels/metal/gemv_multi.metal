// Linear layer of a few rows (2 to about 24): each weight is loaded and decoded once for all V rows of a tile.
//
// Same shape as gemv: 8 simdgroups for the 8 slices of K, a lane for each of 32 outputs, V accumulators a lane. x is read
// at addresses that are the same for all lanes. Slots a weight: 2.5 to decode, then V(1 + 3/b).
// V: rows of a threadgroup; rows past M repeat the last one and are not written.
// @use common weights

// The integer dot products of sub-block j of V rows with one output's weights, exact in float. x: where rows begin in q.
template <int BITS, bool CENTRED, int B, int V>
METAL_FUNC void dot_rows(const device uint4* w, const device half* q, thread const size_t* x, int j, thread float* p) {
  constexpr int UNIT = 128 / BITS, WORD = 32 / BITS, STEP = B < UNIT ? B : UNIT;
  UNROLL for (int v = 0; v < V; v++) p[v] = 0.0f;
  UNROLL for (int part = 0; part < B; part += STEP) {
    const int k = j * B + part;
    const uint4 unit = w[size_t(k / UNIT) * 32];
    UNROLL for (int i = 0; i < STEP / WORD; i++) {
      const uint word = unit[(k % UNIT) / WORD + i];
      half2 decoded[WORD / 2];
      UNROLL for (int pair = 0; pair < WORD / 2; pair++) decoded[pair] = decode_pair<BITS, CENTRED>(word, pair);
      UNROLL for (int v = 0; v < V; v++) {
        half2 a[WORD / 2];
        load_word_of_activations<BITS>(q + x[v] + k + i * WORD, a);
        UNROLL for (int pair = 0; pair < WORD / 2; pair++) {
          p[v] = fma(float(a[pair].x), float(decoded[pair].x), p[v]);
          p[v] = fma(float(a[pair].y), float(decoded[pair].y), p[v]);
        }
      }
    }
  }
}

// The end of a sub-block: t = fma(scale, p, bias*s), acc = fma(d, t, acc) for V rows.
template <int V>
METAL_FUNC void add_block(thread float* acc, thread const float* p, thread const float* sums, thread const float* blocks,
                          float scale, float offset) {
  UNROLL for (int v = 0; v < V; v++) {
    const float t = fma(scale, p[v], offset * sums[v]);
    acc[v] = fma(blocks[v], t, acc[v]);
  }
}

// @kernel gemv_multi
// @inputs packed scales biases q d s bias residual sizes
// @outputs y
// sizes: K, N, tiles, M. Grid (256, tiles, ceil(M/V)).
{
  constexpr int STEP = V < 8 ? V : 8;  // rows that meet in threadgroup memory at a time
  threadgroup float parts[8 * STEP * 32];
  const int K = sizes[0], N = sizes[1], M = sizes[3];
  const int NB = K / B, groups = K / G, units = (K * BITS + 127) / 128;
  const int stride = (K + A - 1) / A, sums = stride * (A / SB);
  const int lane = int(thread_index_in_simdgroup), slice = int(simdgroup_index_in_threadgroup);
  const int tile = int(threadgroup_position_in_grid.y), row0 = int(threadgroup_position_in_grid.z) * V;
  const device uint4* w = reinterpret_cast<const device uint4*>(packed) + size_t(tile) * units * 32 + lane;
  const size_t scale0 = size_t(tile) * groups * 32 + lane;
  size_t x[V];
  float acc[V];
  UNROLL for (int v = 0; v < V; v++) {
    x[v] = size_t(min(row0 + v, M - 1)) * stride * A;
    acc[v] = 0.0f;
  }
  for (int j = slice_begin(slice, NB); j < slice_begin(slice + 1, NB); j++) {
    float p[V];
    dot_rows<BITS, CENTRED, B, V>(w, q, x, j, p);
    const size_t at = scale0 + size_t(j * B / G) * 32;
    float sum[V], block[V];
    UNROLL for (int v = 0; v < V; v++) {
      const size_t row = min(row0 + v, M - 1);
      sum[v] = 0.0f;
      UNROLL for (int i = 0; i < B / SB; i++) sum[v] = sum[v] + s[row * sums + j * (B / SB) + i];
      block[v] = d[row * stride + j * B / A];
    }
    add_block<V>(acc, p, sum, block, widen(scales[at]), widen(biases[at]));
  }
  UNROLL for (int base = 0; base < V; base += STEP) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int i = 0; i < STEP; i++) if (base + i < V) parts[(slice * STEP + i) * 32 + lane] = acc[base + i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int at = int(thread_index_in_threadgroup); at < STEP * 32; at += 256) {
      const int row = row0 + base + at / 32, n = tile * 32 + at % 32;
      if (base + at / 32 >= V || row >= M || n >= N) continue;
      const int first = slice_of_first_block(NB);
      float total = parts[first * STEP * 32 + at];
      for (int i = first + 1; i < 8; i++) {
        if (slice_begin(i, NB) < slice_begin(i + 1, NB)) total = total + parts[i * STEP * 32 + at];
      }
      const size_t to = size_t(row) * N + n;
      y[to] = finish<HAS_BIAS, HAS_RESIDUAL, IS_LOGIT>(total, bias, residual, n, to);
    }
  }
}
