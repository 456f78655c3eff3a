// Linear layers for few rows: a block's eight warps are the eight slices of K, each streaming its part of NT tiles of 16
// outputs, and the rows' integers with it, through a ring of asynchronous copies.
// @use weights

// @kernel linear_rows
// @inputs w q ds bias residual
// @outputs y
// w (tiles, words of a tile); q (M, K) fp16; ds (K/B, rows of ds, 2): d and s; bias (N) and residual (M, N), of stride 0
// where absent; y (M, N). Template: SB, B, ST, NT, MT (tiles of 8 rows), HELD (room for rows, at
// least min(M, 8*MT)), STAGES, LOGIT. Blocks (ceil(M/(8*MT)), ceil(tiles/NT)).
{
  using R = Record<SB, B, ST>;
  constexpr int kRecord = NT * R::kWords, kStride = NT * 16 + 4;
  constexpr int kRowWords = B == 64 ? 36 : B / 2;  // no bank conflicts
  constexpr int kStage = kRecord + 16 * MT + HELD * kRowWords;
  extern __shared__ uint4 shared[];
  const int M = q_shape[0], K = q_shape[1], N = bias_shape[0], tiles = w_shape[0], padded = ds_shape[1];
  const int NB = K / B, m0 = blockIdx.x * MT * 8, held = min(M - m0, MT * 8), tile0 = blockIdx.y * NT;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int begin = x1_slice_begin(warp, NB), end = x1_slice_begin(warp + 1, NB);
  unsigned* ring = reinterpret_cast<unsigned*>(shared) + warp * STAGES * kStage;
  float* sums = reinterpret_cast<float*>(shared) + kSlices * STAGES * kStage;

  // A stage: records, then (d, s) of the rows, then the rows.
  auto request = [&](int j, int stage) {
    if (j < end) {
      unsigned* to = ring + stage * kStage;
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        const unsigned* from = w + ((size_t)min(tile0 + nt, tiles - 1) * NB + j) * R::kWords;
#pragma unroll
        for (int c = 0; c < R::kWords / 4; c += 32) {
          if (c + lane < R::kWords / 4) x1_copy16(to + nt * R::kWords + 4 * (c + lane), from + 4 * (c + lane));
        }
      }
      to += kRecord;
      if (lane < 4 * MT && m0 + 2 * lane < padded) {
        x1_copy16(to + 4 * lane, ds + ((size_t)j * padded + m0 + 2 * lane) * 2);
      }
      to += 16 * MT;
      constexpr int kPieces = B / 8;  // of 16 bytes in a row
      const __half* from = reinterpret_cast<const __half*>(q) + (size_t)m0 * K + j * B;
      for (int c = lane; c < held * kPieces; c += 32) {
        x1_copy16(to + c / kPieces * kRowWords + c % kPieces * 4, from + (size_t)(c / kPieces) * K + c % kPieces * 8);
      }
    }
    x1_commit();
  };
  for (int stage = 0; stage < STAGES - 1; stage++) request(begin + stage, stage);

  float acc[NT][MT][4];
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
#pragma unroll
    for (int mt = 0; mt < MT; mt++) acc[nt][mt][0] = acc[nt][mt][1] = acc[nt][mt][2] = acc[nt][mt][3] = 0.0f;
  }
  int stage = 0;
  for (int j = begin; j < end; j++) {
    x1_wait<STAGES - 2>();
    __syncwarp();
    request(j + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    const unsigned* at = ring + stage * kStage;
    const unsigned* rows = at + kRecord + 16 * MT + t * (B / 8);
    alignas(16) unsigned b[MT][B / 8];
    float4 v[MT];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
      for (int i = 0; i < B / 8; i++) b[mt][i] = 0;
      if (mt * 8 + g < held) load_words<B / 8>(rows + (mt * 8 + g) * kRowWords, b[mt]);
      v[mt] = *reinterpret_cast<const float4*>(at + kRecord + mt * 16 + 4 * t);
    }
    accumulate<SB, B, ST, NT, MT>(at, lane, b, v, acc);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }

  float* mine = sums + warp * MT * 8 * kStride;
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
      float* at = mine + (mt * 8 + 2 * t) * kStride + nt * 16 + g;
      at[0] = acc[nt][mt][0];
      at[kStride] = acc[nt][mt][1];
      at[8] = acc[nt][mt][2];
      at[kStride + 8] = acc[nt][mt][3];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < held * NT * 16; i += blockDim.x) {
    const int m = i / (NT * 16), n = i % (NT * 16), out = tile0 * 16 + n;
    if (out >= N) continue;
    float total = 0.0f;
    bool first = true;
#pragma unroll
    for (int slice = 0; slice < kSlices; slice++) {
      if (x1_slice_begin(slice, NB) == x1_slice_begin(slice + 1, NB)) continue;
      const float part = sums[(slice * MT * 8 + m) * kStride + n];
      total = first ? part : x1_add(total, part);
      first = false;
    }
    const size_t at = (size_t)(m0 + m) * N + out;
    y[at] = finish_output(total, bias_strides[0] ? bias + out : nullptr, residual_strides[1] ? residual + at : nullptr, LOGIT);
  }
}
