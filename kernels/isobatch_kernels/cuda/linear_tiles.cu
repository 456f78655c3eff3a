// Linear layers for many rows: tiles of 128 outputs by 128 rows, everything staged in shared memory; slices of K follow
// each other in one block. Sixteen warps: four parts of the outputs by four parts of the rows, or, for RP = 2, eight warps
// and 64 rows.
// @use weights

// One sub-block for 32 outputs by 32 rows. Operands come from shared memory as they are needed, to save registers.
template <int SB, int B, int ST, int ROW_WORDS>
__device__ __forceinline__ void accumulate_tile(const unsigned* records, const unsigned* rows, const float* pairs, int lane,
                                                float (&acc)[2][4][4]) {
  using R = Record<SB, B, ST>;
  const int g = lane >> 2, t = lane & 3;
  alignas(16) unsigned words[2][R::kLaneWords];
#pragma unroll
  for (int nt = 0; nt < 2; nt++) {
#pragma unroll
    for (int i = 0; i < R::kLaneWords; i += R::kPiece) {
      load_words<R::kPiece>(records + nt * R::kWords + R::word(lane, i), words[nt] + i);
    }
  }
  float p[2][4][4];
#pragma unroll
  for (int nt = 0; nt < 2; nt++) {
#pragma unroll
    for (int mt = 0; mt < 4; mt++) p[nt][mt][0] = p[nt][mt][1] = p[nt][mt][2] = p[nt][mt][3] = 0.0f;
  }
  constexpr int kStep = B == 64 ? 2 : 1;  // MMAs under one load of the rows
#pragma unroll
  for (int i = 0; i < R::kMmas; i += kStep) {
    alignas(16) unsigned b[4][2 * kStep];
#pragma unroll
    for (int mt = 0; mt < 4; mt++) {
      load_words<2 * kStep>(rows + (mt * 8 + g) * ROW_WORDS + t * (B / 8) + 2 * i, b[mt]);
    }
#pragma unroll
    for (int s = 0; s < kStep; s++) {
#pragma unroll
      for (int nt = 0; nt < 2; nt++) {
        unsigned a[4];
        expand<SB>(words[nt], i + s, a);
#pragma unroll
        for (int mt = 0; mt < 4; mt++) mma16816(p[nt][mt], a, b[mt][2 * s], b[mt][2 * s + 1]);
      }
    }
  }
#pragma unroll
  for (int nt = 0; nt < 2; nt++) {
    Affine low, high;
    load_affine<ST>(records + nt * R::kWords + R::kQuantWords, g, low, high);
    low.scale = x1_mul(low.scale, R::kScale);
    high.scale = x1_mul(high.scale, R::kScale);
#pragma unroll
    for (int mt = 0; mt < 4; mt++) {
      const float4 v = *reinterpret_cast<const float4*>(pairs + (mt * 8 + 2 * t) * 2);
      float(&c)[4] = acc[nt][mt];
      c[0] = x1_fma(v.x, x1_fma(low.scale, p[nt][mt][0], x1_mul(low.bias, v.y)), c[0]);
      c[1] = x1_fma(v.z, x1_fma(low.scale, p[nt][mt][1], x1_mul(low.bias, v.w)), c[1]);
      c[2] = x1_fma(v.x, x1_fma(high.scale, p[nt][mt][2], x1_mul(high.bias, v.y)), c[2]);
      c[3] = x1_fma(v.z, x1_fma(high.scale, p[nt][mt][3], x1_mul(high.bias, v.w)), c[3]);
    }
  }
}

// MLX writes the kernel's signature; this is the way to tell the compiler that registers must suffice for 512 threads.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(512, 1)

// @kernel linear_tiles
// @inputs w q ds bias residual
// @outputs y
// As linear_rows. Template: SB, B, ST, RP (parts of the rows, 4 or 2), STAGES, LOGIT. Blocks (ceil(M/(32*RP)),
// ceil(tiles/8)) of 128*RP threads.
{
  using R = Record<SB, B, ST>;
  constexpr int kRows = 32 * RP, kRowWords = B == 64 ? 36 : B / 2;  // no bank conflicts
  constexpr int kWeights = 8 * R::kWords, kActivations = kRows * kRowWords, kStage = kWeights + kActivations + kRows * 2;
  extern __shared__ uint4 shared[];
  unsigned* ring = reinterpret_cast<unsigned*>(shared);
  const int M = q_shape[0], K = q_shape[1], N = bias_shape[0], tiles = w_shape[0], padded = ds_shape[1];
  const int NB = K / B, m0 = blockIdx.x * kRows, tile0 = blockIdx.y * 8;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tile_part = (warp & 3) * 2, row_part = (warp >> 2) * 32;
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

  // Sums over slices, each thread's own: it has no registers left for them.
  float4* totals = reinterpret_cast<float4*>(shared) + STAGES * kStage / 4 + threadIdx.x;
  float acc[2][4][4];
#pragma unroll
  for (int i = 0; i < 32; i++) acc[i / 16][i / 4 % 4][i % 4] = 0.0f;
  int slice = 0, slice_end = x1_slice_begin(1, NB), stage = 0;
  bool first = true;
  for (int j = 0; j < NB; j++) {
    x1_wait<STAGES - 2>();
    __syncthreads();
    request(j + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    const unsigned* at = ring + stage * kStage;
    accumulate_tile<SB, B, ST, kRowWords>(
        at + tile_part * R::kWords, at + kWeights + row_part * kRowWords,
        reinterpret_cast<const float*>(at + kWeights + kActivations) + row_part * 2, lane, acc);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    while (slice_end <= j) slice_end = x1_slice_begin(++slice + 1, NB);
    if (j + 1 == slice_end) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
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
  for (int i = 0; i < 8; i++) {
    const float4 v = totals[i * blockDim.x];
    const float parts[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int m = m0 + row_part + i % 4 * 8 + 2 * t + (e & 1), n = (tile0 + tile_part + i / 4) * 16 + g + (e & 2) * 4;
      if (m >= M || n >= N) continue;
      const size_t at = (size_t)m * N + n;
      y[at] = finish_output(parts[e], biases ? biases + n : nullptr, residuals ? residuals + at : nullptr, LOGIT);
    }
  }
}
