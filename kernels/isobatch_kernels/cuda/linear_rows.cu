// Linear layers for up to 32 rows at a time: a block's eight warps are the eight slices of K, each streaming its part of NT
// tiles of 16 outputs through a ring of asynchronous copies, also across the block's groups of tiles.
// @use weights

// @kernel linear_rows
// @inputs w q ds bias residual
// @outputs y
// w (tiles, words of a tile); q (M, K) fp16; ds (K/B, rows of ds, 2): d and s; bias (N) and residual (M, N), of stride 0
// where absent; y (M, N). Template: SB, B, ST, NT, MT, STAGES, LOGIT. Blocks (groups of tiles or fewer, ceil(M/(8*MT))).
{
  using R = Record<SB, B, ST>;
  constexpr int kRecord = NT * R::kWords, kStride = NT * 16 + 4;
  extern __shared__ uint4 shared[];
  unsigned* ring = reinterpret_cast<unsigned*>(shared) + (threadIdx.x >> 5) * STAGES * kRecord;
  float* sums = reinterpret_cast<float*>(shared) + kSlices * STAGES * kRecord;
  const int M = q_shape[0], K = q_shape[1], N = bias_shape[0], tiles = w_shape[0], padded = ds_shape[1];
  const int NB = K / B, groups = (tiles + NT - 1) / NT, m0 = blockIdx.y * MT * 8;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int begin = x1_slice_begin(warp, NB), end = x1_slice_begin(warp + 1, NB);
  const float* biases = bias_strides[0] ? bias : nullptr;
  const float* residuals = residual_strides[1] ? residual : nullptr;

  int next_group = blockIdx.x, next = begin;
  auto request = [&](int stage) {
    if (next_group < groups && begin < end) {
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        const int tile = min(next_group * NT + nt, tiles - 1);
        const unsigned* from = w + ((size_t)tile * NB + next) * R::kWords;
        unsigned* to = ring + stage * kRecord + nt * R::kWords;
#pragma unroll
        for (int c = 0; c < R::kWords / 4; c += 32) {
          if (c + lane < R::kWords / 4) x1_copy16(to + 4 * (c + lane), from + 4 * (c + lane));
        }
      }
      if (++next == end) {
        next = begin;
        next_group += gridDim.x;
      }
    }
    x1_commit();
  };
  for (int stage = 0; stage < STAGES - 1; stage++) request(stage);

  const __half* rows[MT];
  bool present[MT];
#pragma unroll
  for (int mt = 0; mt < MT; mt++) {
    present[mt] = m0 + mt * 8 + g < M;
    rows[mt] = reinterpret_cast<const __half*>(q) + (size_t)(m0 + mt * 8 + g) * K + t * (B / 4);
  }
  int stage = 0;
  for (int group = blockIdx.x; group < groups; group += gridDim.x) {
    float acc[NT][MT][4];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
      for (int mt = 0; mt < MT; mt++) acc[nt][mt][0] = acc[nt][mt][1] = acc[nt][mt][2] = acc[nt][mt][3] = 0.0f;
    }
    for (int j = begin; j < end; j++) {
      alignas(16) unsigned b[MT][B / 8];
      float4 v[MT];
#pragma unroll
      for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int i = 0; i < B / 8; i++) b[mt][i] = 0;
        if (present[mt]) load_words<B / 8>(reinterpret_cast<const unsigned*>(rows[mt] + j * B), b[mt]);
        v[mt] = *reinterpret_cast<const float4*>(ds + ((size_t)j * padded + m0 + mt * 8 + 2 * t) * 2);
      }
      x1_wait<STAGES - 2>();
      __syncwarp();
      request(stage == 0 ? STAGES - 1 : stage - 1);
      accumulate<SB, B, ST, NT, MT>(ring + stage * kRecord, lane, b, v, acc);
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
    for (int i = threadIdx.x; i < MT * 8 * NT * 16; i += blockDim.x) {
      const int m = i / (NT * 16), n = i % (NT * 16), out = group * NT * 16 + n;
      if (m0 + m >= M || out >= N) continue;
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
      y[at] = finish_output(total, biases ? biases + out : nullptr, residuals ? residuals + at : nullptr, LOGIT);
    }
    __syncthreads();
  }
}
