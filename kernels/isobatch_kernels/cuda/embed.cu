// Embedding rows (numerics.md section 1).
// @use weights

// @kernel embed
// @constants SB B ST
// w as in linear_rows; ids (T); y (T, K). Blocks (ceil(K/256), T) of 256.
X1_KERNEL __launch_bounds__(256) embed(const unsigned* w, const int* ids, float* y, int K) {
  using R = Record<SB, B, ST>;
  const int k = blockIdx.x * 256 + threadIdx.x;
  const size_t row = blockIdx.y;
  x1_let_next_begin();
  x1_after_previous();
  if (k >= K) return;
  const int id = ids[row], g = id & 7, h = id >> 3 & 1, j = k / B, inner = k % B;
  const int lane = g * 4 + inner / (B / 4), i = inner % (B / 4) / 4, e = inner % 4;
  const unsigned* record = w + ((size_t)(id >> 4) * (K / B) + j) * R::kWords;
  int integer;
  if (SB == 4) {
    const int nibble = (e & 1) * 4 + (e >> 1) + 2 * h;
    integer = record[R::word(lane, i)] >> (4 * nibble) & 15;
  } else {
    integer = (int)(record[R::word(lane, 2 * i + h)] >> (8 * e) & 255) - 128;
  }
  Affine low, high;
  load_affine<ST>(record + R::kQuantWords, g, low, high);
  const Affine a = h ? high : low;
  y[row * K + k] = x1_fma(a.scale, (float)integer, a.bias);
}

// @kernel embed_dense
// @constants BFLOAT
// w (tiles, K, 32) as in dense, widened exactly. Blocks (ceil(K/256), T) of 256.
X1_KERNEL __launch_bounds__(256) embed_dense(const fp16* w, const int* ids, float* y, int K) {
  const int k = blockIdx.x * 256 + threadIdx.x;
  const size_t row = blockIdx.y;
  x1_let_next_begin();
  x1_after_previous();
  if (k >= K) return;
  const int id = ids[row];
  const fp16 value = w[((size_t)(id / 32) * K + k) * 32 + id % 32];
  y[row * K + k] = BFLOAT ? x1_bfloat_float(value) : x1_half_float(value);
}
