// Linear layer of a few rows (2 to about 24): each weight is loaded and decoded once for all V rows of a tile.
//
// Same shape as gemv: 8 simdgroups for the 8 slices of K; a lane owns R outputs, 32 apart, and V accumulators for each. x is
// read at addresses that are the same for all lanes, and R outputs share what was read. Slots a weight: 2.5 to decode, then
// V(1 + 3/b); loads of x: V/(8R) of 16 bytes.
// V: rows of a threadgroup; rows past M repeat the last one and are not written.
// @use common weights

// The integer dot products of sub-block j of V rows with the weights of R outputs, exact in float: p[r * V + v]. w: the
// lane's places in packed; x: where rows begin in q.
template <int BITS, bool CENTRED, int B, int V, int R>
METAL_FUNC void dot_rows(const device uint4* packed, thread const size_t* w, const device half* q, thread const size_t* x,
                         int j, thread float* p) {
  constexpr int UNIT = 128 / BITS, WORD = 32 / BITS, STEP = B < UNIT ? B : UNIT;
  UNROLL for (int i = 0; i < R * V; i++) p[i] = 0.0f;
  UNROLL for (int part = 0; part < B; part += STEP) {
    const int k = j * B + part;
    uint4 unit[R];
    UNROLL for (int r = 0; r < R; r++) unit[r] = packed[w[r] + size_t(k / UNIT) * 32];
    UNROLL for (int i = 0; i < STEP / WORD; i++) {
      half2 decoded[R][WORD / 2];
      UNROLL for (int r = 0; r < R; r++) {
        const uint word = unit[r][(k % UNIT) / WORD + i];
        UNROLL for (int pair = 0; pair < WORD / 2; pair++) decoded[r][pair] = decode_pair<BITS, CENTRED>(word, pair);
      }
      UNROLL for (int v = 0; v < V; v++) {
        half2 a[WORD / 2];
        load_word_of_activations<BITS>(q + x[v] + k + i * WORD, a);
        UNROLL for (int r = 0; r < R; r++) {
          UNROLL for (int pair = 0; pair < WORD / 2; pair++) {
            p[r * V + v] = fma(float(a[pair].x), float(decoded[r][pair].x), p[r * V + v]);
            p[r * V + v] = fma(float(a[pair].y), float(decoded[r][pair].y), p[r * V + v]);
          }
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
// sizes: K, N, tiles, M. Grid (256, ceil(tiles/R), ceil(M/V)).
{
  constexpr int OWN = R * V, STEP = OWN < 8 ? OWN : 8;  // outputs that meet in threadgroup memory at a time
  threadgroup float parts[8 * STEP * 32];
  const int K = sizes[0], N = sizes[1], tiles = sizes[2], M = sizes[3];
  const int NB = K / B, groups = K / G, units = (K * BITS + 127) / 128;
  const int stride = (K + A - 1) / A, sums = stride * (A / SB);
  const int lane = int(thread_index_in_simdgroup), slice = int(simdgroup_index_in_threadgroup);
  const int tile0 = int(threadgroup_position_in_grid.y) * R, row0 = int(threadgroup_position_in_grid.z) * V;
  const device uint4* units_of_tiles = reinterpret_cast<const device uint4*>(packed);
  size_t w[R], scale0[R], x[V];
  UNROLL for (int r = 0; r < R; r++) {
    const size_t tile = min(tile0 + r, tiles - 1);
    w[r] = tile * units * 32 + lane;
    scale0[r] = tile * groups * 32 + lane;
  }
  UNROLL for (int v = 0; v < V; v++) x[v] = size_t(min(row0 + v, M - 1)) * stride * A;
  float acc[OWN];
  UNROLL for (int i = 0; i < OWN; i++) acc[i] = 0.0f;
  for (int j = slice_begin(slice, NB); j < slice_begin(slice + 1, NB); j++) {
    float p[OWN];
    dot_rows<BITS, CENTRED, B, V, R>(units_of_tiles, w, q, x, j, p);
    float sum[V], block[V];
    UNROLL for (int v = 0; v < V; v++) {
      const size_t row = min(row0 + v, M - 1);
      sum[v] = 0.0f;
      UNROLL for (int i = 0; i < B / SB; i++) sum[v] = sum[v] + s[row * sums + j * (B / SB) + i];
      block[v] = d[row * stride + j * B / A];
    }
    UNROLL for (int r = 0; r < R; r++) {
      const size_t at = scale0[r] + size_t(j * B / G) * 32;
      add_block<V>(acc + r * V, p + r * V, sum, block, widen(scales[at]), widen(biases[at]));
    }
  }
  UNROLL for (int base = 0; base < OWN; base += STEP) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int i = 0; i < STEP; i++) if (base + i < OWN) parts[(slice * STEP + i) * 32 + lane] = acc[base + i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int at = int(thread_index_in_threadgroup); at < STEP * 32; at += 256) {
      const int own = base + at / 32, row = row0 + own % V, n = (tile0 + own / V) * 32 + at % 32;
      if (own >= OWN || row >= M || n >= N) continue;
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
