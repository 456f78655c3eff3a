// Repacks weights once, at load, into the layouts of weights.cu and dense.cu.
// @use weights

// @kernel pack_quantized
// @constants SB B ST BITS
// packed (N, row_words): MLX's bit stream along K; scales, biases (N, K/group) in the type of ST, their floors taken, 8-bit
// integers re-centred. Outputs past N are zero. Blocks (K/B, tiles) of 288, at least the words of a record.
X1_KERNEL __launch_bounds__(288) pack_quantized(const unsigned* packed, const void* scales, const void* biases, unsigned* out,
                                                int N, int K, int group, int row_words) {
  using R = Record<SB, B, ST>;
  const int j = blockIdx.x, tile = blockIdx.y, groups = K / group, at_group = j * B / group;
  unsigned* record = out + ((size_t)tile * (K / B) + j) * R::kWords;
  for (int w = threadIdx.x; w < R::kWords; w += blockDim.x) {
    unsigned word = 0;
    if (w < R::kQuantWords) {
      const int lane = w / R::kPiece % 32, i = w / (32 * R::kPiece) * R::kPiece + w % R::kPiece, mma = SB == 4 ? i : i / 2;
      for (int half = 0; half < 2; half++) {
        if (SB == 8 && half != i % 2) continue;
        const int n = tile * 16 + lane / 4 + 8 * half;
        for (int e = 0; e < 4; e++) {
          const int k = j * B + lane % 4 * (B / 4) + 4 * mma + e, bit = k * BITS % 32;
          const unsigned* from = packed + (size_t)n * row_words + (size_t)k * BITS / 32;
          unsigned value = 0;
          if (n < N) {
            value = from[0] >> bit;
            if (bit + BITS > 32) value |= from[1] << (32 - bit);
            value &= (1u << BITS) - 1u;
          }
          if (SB == 4) {
            word |= value << (4 * ((e & 1) * 4 + (e >> 1) + 2 * half));
          } else {
            word |= (n >= N ? 128u : BITS == 8 ? value : value + 128u) << (8 * e);
          }
        }
      }
    } else {
      const int p = w - R::kQuantWords, pair = ST == 2 ? p / 2 : p, n = tile * 16 + pair / 2 + 8 * (pair % 2);
      const size_t at = (size_t)n * groups + at_group;
      if (n < N && ST == 2) {
        word = reinterpret_cast<const unsigned*>(p % 2 ? biases : scales)[at];
      } else if (n < N) {
        word = reinterpret_cast<const fp16*>(scales)[at] | (unsigned)reinterpret_cast<const fp16*>(biases)[at] << 16;
      }
    }
    record[w] = word;
  }
}

// @kernel pack_dense
// rows (N, K) to out (tiles, K, 32), zero past N. Blocks (ceil(32*K/256), tiles) of 256.
X1_KERNEL __launch_bounds__(256) pack_dense(const fp16* rows, fp16* out, int N, int K) {
  const int i = blockIdx.x * 256 + threadIdx.x, k = i / 32, n = blockIdx.y * 32 + i % 32;
  if (k < K) out[(size_t)blockIdx.y * K * 32 + i] = n < N ? rows[(size_t)n * K + k] : (fp16)0;
}
