// Linear layer of one row: decode steps with one sequence (numerics.md section 3).
//
// A threadgroup of 8 simdgroups makes 32*R outputs; simdgroup i takes slice i of K, so every chain has one owner, and
// the slices meet in threadgroup memory in ascending order. A lane owns R outputs, 32 apart, which share the loads of x.
// Slots a weight: 2.5 to decode, 1 to multiply, 3/b at the end of a sub-block.
// BITS: 4 or 8. CENTRED: 8-bit weights with 128 taken off. B: sub-block, G: group, A: activation block, SB: block of sums.
// @use common weights

// The integer dot products of sub-block j with the weights of R tiles, exact in float. w: the lane's place in each tile.
template <int BITS, bool CENTRED, int B, int R>
METAL_FUNC void dot_outputs(const device uint4* packed, thread const size_t* w, const device half* x, int j, thread float* p) {
  constexpr int UNIT = 128 / BITS, WORD = 32 / BITS, STEP = B < UNIT ? B : UNIT;
  UNROLL for (int r = 0; r < R; r++) p[r] = 0.0f;
  UNROLL for (int part = 0; part < B; part += STEP) {
    const int k = j * B + part;
    uint4 unit[R];
    UNROLL for (int r = 0; r < R; r++) unit[r] = packed[w[r] + size_t(k / UNIT) * 32];
    UNROLL for (int i = 0; i < STEP / WORD; i++) {
      half2 a[WORD / 2];
      load_word_of_activations<BITS>(x + k + i * WORD, a);
      UNROLL for (int r = 0; r < R; r++) {
        const uint word = unit[r][(k % UNIT) / WORD + i];
        UNROLL for (int pair = 0; pair < WORD / 2; pair++) {
          const half2 q = decode_pair<BITS, CENTRED>(word, pair);
          p[r] = fma(float(a[pair].x), float(q.x), p[r]);
          p[r] = fma(float(a[pair].y), float(q.y), p[r]);
        }
      }
    }
  }
}

// @kernel gemv
// @inputs packed scales biases q d s bias residual sizes
// @outputs y
// sizes: K, N, tiles. Grid (256, ceil(tiles/R), 1).
{
  threadgroup float parts[8 * R * 32];
  const int K = sizes[0], N = sizes[1], tiles = sizes[2];
  const int NB = K / B, groups = K / G, units = (K * BITS + 127) / 128;
  const int lane = int(thread_index_in_simdgroup), slice = int(simdgroup_index_in_threadgroup);
  const int tile0 = int(threadgroup_position_in_grid.y) * R;
  const device uint4* units_of_tiles = reinterpret_cast<const device uint4*>(packed);
  size_t w[R], scale0[R];
  for (int r = 0; r < R; r++) {
    const size_t tile = min(tile0 + r, tiles - 1);
    w[r] = tile * units * 32 + lane;
    scale0[r] = tile * groups * 32 + lane;
  }
  float acc[R];
  for (int r = 0; r < R; r++) acc[r] = 0.0f;
  for (int j = slice_begin(slice, NB); j < slice_begin(slice + 1, NB); j++) {
    float p[R];
    dot_outputs<BITS, CENTRED, B, R>(units_of_tiles, w, q, j, p);
    float sum = 0.0f;
    for (int i = 0; i < B / SB; i++) sum = sum + s[j * (B / SB) + i];
    const float scale_of_block = d[j * B / A];
    UNROLL for (int r = 0; r < R; r++) {
      const size_t at = scale0[r] + size_t(j * B / G) * 32;
      const float t = fma(widen(scales[at]), p[r], widen(biases[at]) * sum);
      acc[r] = fma(scale_of_block, t, acc[r]);
    }
  }
  for (int r = 0; r < R; r++) parts[(slice * R + r) * 32 + lane] = acc[r];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int at = int(thread_index_in_threadgroup); at < R * 32; at += 256) {
    const int n = tile0 * 32 + at;
    const int first = slice_of_first_block(NB);
    float total = parts[first * R * 32 + at];
    for (int i = first + 1; i < 8; i++) {
      if (slice_begin(i, NB) < slice_begin(i + 1, NB)) total = total + parts[i * R * 32 + at];
    }
    if (n < N) y[n] = finish<HAS_BIAS, HAS_RESIDUAL, IS_LOGIT>(total, bias, residual, n, size_t(n));
  }
}
