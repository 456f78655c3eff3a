// Linear layers for many rows: tiles of 128 outputs by 32*MT rows, everything staged in shared memory; slices of K follow
// each other in one block. Eight warps: two halves of the outputs by four parts of the rows.
// @use weights

// @kernel linear_tiles
// @inputs w q ds bias residual
// @outputs y
// As linear_rows. Template: SB, B, ST, MT, STAGES, LOGIT. Blocks (ceil(M/(32*MT)), ceil(tiles/8)).
{
  using R = Record<SB, B, ST>;
  constexpr int kRows = 32 * MT, kRowWords = B == 64 ? 36 : B / 2;  // no bank conflicts
  constexpr int kWeights = 8 * R::kWords, kActivations = kRows * kRowWords, kStage = kWeights + kActivations + kRows * 2;
  extern __shared__ uint4 shared[];
  unsigned* ring = reinterpret_cast<unsigned*>(shared);
  const int M = q_shape[0], K = q_shape[1], N = bias_shape[0], tiles = w_shape[0], padded = ds_shape[1];
  const int NB = K / B, m0 = blockIdx.x * kRows, tile0 = blockIdx.y * 8;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tile_part = (warp & 1) * 4, row_part = (warp >> 1) * 8 * MT;
  const float* biases = bias_strides[0] ? bias : nullptr;
  const float* residuals = residual_strides[1] ? residual : nullptr;

  auto request = [&](int j, int stage) {
    if (j < NB) {
      unsigned* to = ring + stage * kStage;
      for (int c = threadIdx.x; c < kWeights / 4; c += blockDim.x) {
        const int tile = c / (R::kWords / 4), part = c % (R::kWords / 4);
        x1_copy16(to + 4 * c, w + ((size_t)min(tile0 + tile, tiles - 1) * NB + j) * R::kWords + 4 * part);
      }
      constexpr int kPieces = B / 8;  // of 16 bytes in a row
      for (int c = threadIdx.x; c < kRows * kPieces; c += blockDim.x) {
        const int m = c / kPieces, part = c % kPieces;
        const __half* from = reinterpret_cast<const __half*>(q) + (size_t)min(m0 + m, M - 1) * K + j * B + part * 8;
        x1_copy16(to + kWeights + m * kRowWords + part * 4, from);
      }
      for (int c = threadIdx.x; c < kRows / 2; c += blockDim.x) {
        const int m = min(m0 + 2 * c, padded - 2);
        x1_copy16(to + kWeights + kActivations + 4 * c, ds + ((size_t)j * padded + m) * 2);
      }
    }
    x1_commit();
  };
  for (int stage = 0; stage < STAGES - 1; stage++) request(stage, stage);

  float acc[4][MT][4], total[4][MT][4];
#pragma unroll
  for (int nt = 0; nt < 4; nt++) {
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
      for (int i = 0; i < 4; i++) acc[nt][mt][i] = 0.0f;
    }
  }
  int slice = 0, slice_end = x1_slice_begin(1, NB), stage = 0;
  bool first = true;
  for (int j = 0; j < NB; j++) {
    x1_wait<STAGES - 2>();
    __syncthreads();
    request(j + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    const unsigned* weights = ring + stage * kStage + tile_part * R::kWords;
    const unsigned* rows = ring + stage * kStage + kWeights + row_part * kRowWords;
    const float* pairs = reinterpret_cast<const float*>(ring + stage * kStage + kWeights + kActivations) + row_part * 2;
    alignas(16) unsigned b[MT][B / 8];
    float4 v[MT];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
      load_words<B / 8>(rows + (mt * 8 + g) * kRowWords + t * (B / 8), b[mt]);
      v[mt] = *reinterpret_cast<const float4*>(pairs + (mt * 8 + 2 * t) * 2);
    }
    accumulate<SB, B, ST, 4, MT>(weights, lane, b, v, acc);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    while (slice_end <= j) slice_end = x1_slice_begin(++slice + 1, NB);
    if (j + 1 == slice_end) {
#pragma unroll
      for (int nt = 0; nt < 4; nt++) {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            total[nt][mt][i] = first ? acc[nt][mt][i] : x1_add(total[nt][mt][i], acc[nt][mt][i]);
            acc[nt][mt][i] = 0.0f;
          }
        }
      }
      first = false;
    }
  }
#pragma unroll
  for (int nt = 0; nt < 4; nt++) {
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int m = m0 + row_part + mt * 8 + 2 * t + (i & 1), n = (tile0 + tile_part + nt) * 16 + g + (i & 2) * 4;
        if (m >= M || n >= N) continue;
        const size_t at = (size_t)m * N + n;
        y[at] = finish_output(total[nt][mt][i], biases ? biases + n : nullptr, residuals ? residuals + at : nullptr, LOGIT);
      }
    }
  }
}
