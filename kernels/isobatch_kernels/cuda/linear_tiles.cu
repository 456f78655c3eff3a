// Linear layers for many rows: tiles of 128 outputs by 32*RP rows, everything staged in shared memory; slices of K follow
// each other in one block. A warp has WT tiles of 16 outputs by 32 rows: the more, the fewer times rows are read.
// @use weights

// @kernel linear_tiles
// @constants SB B ST WT RP STAGES LOGIT
// As linear_rows. Blocks (ceil(M/(32*RP)), ceil(tiles/8)) of 32*RP*8/WT threads, 512 of which a multiprocessor must be able to
// have: 128 registers for each.
X1_KERNEL __launch_bounds__(256 / WT * RP, 512 / (256 / WT * RP)) linear_tiles(const unsigned* w, const fp16* q, const float* ds, const float* bias,
                                                      const float* residual, float* y, int M, int K, int N, int stride,
                                                      int padded) {
  using R = Record<SB, B, ST>;
  constexpr int kRows = 32 * RP, kRowWords = B == 64 ? 36 : B / 2;  // no bank conflicts
  constexpr int kWeights = 8 * R::kWords, kActivations = kRows * kRowWords, kStage = kWeights + kActivations + kRows * 2;
  X1_DYNAMIC_SHARED;
  unsigned* ring = reinterpret_cast<unsigned*>(shared);
  const int NB = K / B, m0 = blockIdx.x * kRows, tile0 = blockIdx.y * 8, tiles = (N + 15) / 16;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tile_part = warp % (8 / WT) * WT, row_part = warp / (8 / WT) * 32;
  x1_let_next_begin();
  x1_after_previous();

  // What a thread copies of every stage: pieces of 16 bytes of weights and of rows, and the pairs of two rows. Where they come
  // from, in bytes from the block's first on, changes from one stage to the next by the same step for all.
  constexpr int kThreads = 256 / WT * RP, kPieces = B / 8;  // pieces of a row
  constexpr int kOfWeights = (kWeights / 4 + kThreads - 1) / kThreads, kOfRows = (kRows * kPieces + kThreads - 1) / kThreads;
  static_assert(kThreads % kPieces == 0, "a thread's pieces of rows are as many rows apart");
  unsigned own_weights[kOfWeights], own_rows[kOfRows];
#pragma unroll
  for (int i = 0; i < kOfWeights; i++) {
    const int c = threadIdx.x + i * kThreads, tile = c / (R::kWords / 4), part = c % (R::kWords / 4);
    own_weights[i] = (min(tile0 + tile, tiles - 1) - tile0) * NB * (R::kWords * 4) + part * 16;
  }
#pragma unroll
  for (int i = 0; i < kOfRows; i++) {
    const int c = threadIdx.x + i * kThreads, m = c / kPieces, part = c % kPieces;
    own_rows[i] = (min(m0 + m, M - 1) - m0) * K * 2 + part * 16;
  }
  const unsigned own_pairs = min(m0 + 2 * (int)threadIdx.x, padded - 2) * 8;
  const unsigned to_weights = x1_shared_address(ring) + threadIdx.x * 16;
  const unsigned to_rows = x1_shared_address(ring + kWeights) + (threadIdx.x / kPieces * kRowWords + threadIdx.x % kPieces * 4) * 4;
  const char* weights = reinterpret_cast<const char*>(w + (size_t)tile0 * NB * R::kWords);
  const char* some = reinterpret_cast<const char*>(q + (size_t)m0 * K);
  const char* some_pairs = reinterpret_cast<const char*>(ds);
  auto request = [&](int j, int stage) {
    if (j < NB) {
      const unsigned to = stage * kStage * 4;
#pragma unroll
      for (int i = 0; i < kOfWeights; i++) {
        if (threadIdx.x + i * kThreads < kWeights / 4) x1_copy16(to_weights + to + i * kThreads * 16, weights + own_weights[i]);
      }
#pragma unroll
      for (int i = 0; i < kOfRows; i++) {
        if (threadIdx.x + i * kThreads >= kRows * kPieces) continue;
        x1_copy16(to_rows + to + i * (kThreads / kPieces * kRowWords * 4), some + own_rows[i]);
      }
      if (threadIdx.x < kRows / 2) x1_copy16(to_weights + to + (kWeights + kActivations) * 4, some_pairs + own_pairs);
      weights += R::kWords * 4;
      some += B * 2;
      some_pairs += (size_t)padded * 8;
    }
    x1_commit();
  };
  for (int stage = 0; stage < STAGES - 1; stage++) request(stage, stage);

  // Sums over slices, each thread's own: it has no registers left for them.
  float4* totals = reinterpret_cast<float4*>(shared) + STAGES * kStage / 4 + threadIdx.x;
  float acc[WT][4][4];
#pragma unroll
  for (int i = 0; i < 16 * WT; i++) acc[i / 16][i / 4 % 4][i % 4] = 0.0f;
  int slice = 0, slice_end = x1_slice_begin(1, NB), stage = 0;
  bool first = true;
  for (int j = 0; j < NB; j++) {
    x1_wait<STAGES - 2>();
    __syncthreads();
    request(j + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    const unsigned* at = ring + stage * kStage;
    const unsigned* rows = at + kWeights + (row_part + g) * kRowWords + t * (B / 8);
    const float* pairs = reinterpret_cast<const float*>(at + kWeights + kActivations) + (row_part + 2 * t) * 2;
    alignas(16) unsigned b[4][B / 8];
    float4 v[4];
#pragma unroll
    for (int mt = 0; mt < 4; mt++) {
      load_words<B / 8>(rows + mt * 8 * kRowWords, b[mt]);
      v[mt] = *reinterpret_cast<const float4*>(pairs + mt * 16);
    }
#pragma unroll
    for (int nt = 0; nt < WT; nt++) {
      const unsigned* record = at + (tile_part + nt) * R::kWords;
      float p[1][4][4];
      multiply<SB, B, ST, 1, 4>(record, lane, b, p);
      add_tail<SB, B, ST, 1, 4>(record, lane, p, v, reinterpret_cast<float(&)[1][4][4]>(acc[nt]));
    }
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    while (slice_end <= j) slice_end = x1_slice_begin(++slice + 1, NB);
    if (j + 1 == slice_end) {
#pragma unroll
      for (int i = 0; i < 4 * WT; i++) {
        float(&c)[4] = acc[i / 4][i % 4];
        float4 sum = make_float4(c[0], c[1], c[2], c[3]);
        if (!first) {
          const float4 v = totals[i * blockDim.x];
          sum = make_float4(x1_add(v.x, c[0]), x1_add(v.y, c[1]), x1_add(v.z, c[2]), x1_add(v.w, c[3]));
        }
        totals[i * blockDim.x] = sum;
        c[0] = c[1] = c[2] = c[3] = 0.0f;
      }
      first = false;
    }
  }
#pragma unroll
  for (int i = 0; i < 4 * WT; i++) {
    const float4 v = totals[i * blockDim.x];
    const float parts[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int m = m0 + row_part + i % 4 * 8 + 2 * t + (e & 1), n = (tile0 + tile_part + i / 4) * 16 + g + (e & 2) * 4;
      if (m >= M || n >= N) continue;
      const size_t at = (size_t)m * stride + n;
      y[at] = finish_output(parts[e], bias ? bias + n : nullptr, residual ? residual + at : nullptr, LOGIT);
    }
  }
}
