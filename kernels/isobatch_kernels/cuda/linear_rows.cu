// Linear layers for few rows: a block's eight warps are the eight slices of K, each streaming its part of NT tiles of 16
// outputs, and the rows' integers with it, through a ring of asynchronous copies.
// @use weights

// @kernel linear_rows
// @constants SB B ST NT MT HELD DEEP STAGES LOGIT
// w (tiles, words of a tile); q (M, K); ds (K/B, padded, 2): d and s; bias (N) and residual (M, stride) null where absent;
// y (M, stride). NT: tiles of outputs of a block; MT: its tiles of 8 rows; HELD: room for rows, at least min(M, 8*MT);
// DEEP: sub-blocks of a stage. // Blocks (ceil(M/(8*MT)), ceil(tiles/NT)) of 256.
X1_KERNEL __launch_bounds__(256) linear_rows(const unsigned* w, const fp16* q, const float* ds, const float* bias,
                                             const float* residual, float* y, int M, int K, int N, int stride, int padded) {
  using R = Record<SB, B, ST>;
  constexpr int kRecord = NT * R::kWords, kStride = NT * 16 + 4;
  constexpr int kRowWords = B == 64 ? 36 : B / 2;  // no bank conflicts
  constexpr int kSubBlock = kRecord + 16 * MT + HELD * kRowWords, kStage = DEEP * kSubBlock;
  X1_DYNAMIC_SHARED;
  const int NB = K / B, m0 = blockIdx.x * MT * 8, held = min(M - m0, MT * 8), tile0 = blockIdx.y * NT, tiles = (N + 15) / 16;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int begin = x1_slice_begin(warp, NB), end = x1_slice_begin(warp + 1, NB);
  unsigned* ring = reinterpret_cast<unsigned*>(shared) + warp * STAGES * kStage;
  float* sums = reinterpret_cast<float*>(shared) + kSlices * STAGES * kStage;
  const size_t tile_words = (size_t)NB * R::kWords;
  const unsigned* records = w + tile0 * tile_words;
  const int last_tile = tiles - 1 - tile0;

  // A stage: DEEP sub-blocks, each with its records, then (d, s) of the rows, then the rows.
  auto request_weights = [&](int j, int stage) {
#pragma unroll
    for (int u = 0; u < DEEP; u++) {
      if (j + u >= end) return;
      unsigned* to = ring + stage * kStage + u * kSubBlock;
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        const unsigned* from = records + (nt < last_tile ? nt : last_tile) * tile_words + (size_t)(j + u) * R::kWords;
#pragma unroll
        for (int c = 0; c < R::kWords / 4; c += 32) {
          if (c + lane < R::kWords / 4) x1_copy16(to + nt * R::kWords + 4 * (c + lane), from + 4 * (c + lane));
        }
      }
    }
  };
  auto request_rows = [&](int j, int stage) {
#pragma unroll
    for (int u = 0; u < DEEP; u++) {
      if (j + u >= end) break;
      unsigned* to = ring + stage * kStage + u * kSubBlock + kRecord;
      if (lane < 4 * MT && m0 + 2 * lane < padded) {
        x1_copy16(to + 4 * lane, ds + ((size_t)(j + u) * padded + m0 + 2 * lane) * 2);
      }
      to += 16 * MT;
      constexpr int kPieces = B / 8;  // of 16 bytes in a row
      const fp16* from = q + (size_t)m0 * K + (j + u) * B;
      for (int c = lane; c < held * kPieces; c += 32) {
        x1_copy16(to + c / kPieces * kRowWords + c % kPieces * 4, from + (size_t)(c / kPieces) * K + c % kPieces * 8);
      }
    }
    x1_commit();
  };
  // Weights are the same in every step, so the ring is filled with them while the previous launch still runs.
  x1_let_next_begin();
  for (int stage = 0; stage < STAGES - 1; stage++) request_weights(begin + DEEP * stage, stage);
  x1_after_previous();
  for (int stage = 0; stage < STAGES - 1; stage++) request_rows(begin + DEEP * stage, stage);

  float acc[NT][MT][4];
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
#pragma unroll
    for (int mt = 0; mt < MT; mt++) acc[nt][mt][0] = acc[nt][mt][1] = acc[nt][mt][2] = acc[nt][mt][3] = 0.0f;
  }
  int stage = 0;
  for (int j = begin; j < end; j += DEEP) {
    x1_wait<STAGES - 2>();
    __syncwarp();
    const int free = stage == 0 ? STAGES - 1 : stage - 1;
    request_weights(j + DEEP * (STAGES - 1), free);
    request_rows(j + DEEP * (STAGES - 1), free);
    // The integers of all sub-blocks first, so that one does not wait for another; then the tails in order.
    const unsigned* at = ring + stage * kStage;
    float p[DEEP][NT][MT][4];
#pragma unroll
    for (int u = 0; u < DEEP; u++) {
      const unsigned* rows = at + u * kSubBlock + kRecord + 16 * MT + t * (B / 8);
      alignas(16) unsigned b[MT][B / 8];
#pragma unroll
      for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int i = 0; i < B / 8; i++) b[mt][i] = 0;
        if (mt * 8 + g < held) load_words<B / 8>(rows + (mt * 8 + g) * kRowWords, b[mt]);
      }
      multiply<SB, B, ST, NT, MT>(at + u * kSubBlock, lane, b, p[u]);
    }
#pragma unroll
    for (int u = 0; u < DEEP; u++) {
      if (j + u >= end) break;
      float4 v[MT];
#pragma unroll
      for (int mt = 0; mt < MT; mt++) {
        v[mt] = *reinterpret_cast<const float4*>(at + u * kSubBlock + kRecord + mt * 16 + 4 * t);
      }
      add_tail<SB, B, ST, NT, MT>(at + u * kSubBlock, lane, p[u], v, acc);
    }
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
    const size_t at = (size_t)(m0 + m) * stride + out;
    y[at] = finish_output(total, bias ? bias + out : nullptr, residual ? residual + at : nullptr, LOGIT);
  }
}
