// Embedding rows (numerics.md section 1).
// @use weights

// @kernel embed
// @inputs w ids width
// @outputs y
// w as in linear_rows; ids (T); width has K elements; y (T, K). Template: SB, B, ST. Blocks (ceil(K/256), T) of 256.
{
  using R = Record<SB, B, ST>;
  const int K = width_shape[0], k = blockIdx.x * 256 + threadIdx.x;
  const size_t row = blockIdx.y;
  if (k >= K) return;
  const int id = ids[row], g = id & 7, h = id >> 3 & 1, j = k / B, inner = k % B;
  const int lane = g * 4 + inner / (B / 4), i = inner % (B / 4) / 4, e = inner % 4;
  const uint32_t* record = w + ((size_t)(id >> 4) * (K / B) + j) * R::kWords;
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
// @inputs w ids
// @outputs y
// w (N, K) fp16 or bf16, widened exactly. Blocks (ceil(K/256), T) of 256.
{
  const int K = w_shape[1], k = blockIdx.x * 256 + threadIdx.x;
  const size_t row = blockIdx.y;
  if (k < K) y[row * K + k] = (float)w[(size_t)ids[row] * K + k];
}
