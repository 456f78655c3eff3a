// Linear layer of many rows (prefill): 8x8 simdgroup matrices of half integers, accumulated in float. The products of a
// sub-block are integers below 2^24, so the matrix unit's own order does not matter; scales enter once a sub-block.
//
// A threadgroup of 4 simdgroups makes BM rows x 32 outputs; each simdgroup BM/2 x 16, that is MT x 2 matrices. Slices follow
// one another in the same simdgroup, with a running total beside the chain of the current slice.
// @use common weights

constant constexpr int kPad = 8;  // halves after each staged row, so that rows fall into different banks

// Stages the weights of one sub-block as halves: out (32 outputs, B + kPad). 128 threads: output t % 32, quarter t / 32.
template <int BITS, bool CENTRED, int B>
METAL_FUNC void stage_weights(const device uint4* w, int j, uint t, threadgroup half* out) {
  constexpr int UNIT = 128 / BITS, WORD = 32 / BITS;
  threadgroup half* row = out + (t % 32) * (B + kPad);
  for (int i = int(t / 32) * WORD; i < B; i += 4 * WORD) {
    const int k = j * B + i;
    const uint word = w[size_t(k / UNIT) * 32 + t % 32][(k % UNIT) / WORD];
    uint decoded[WORD / 2];
    UNROLL for (int pair = 0; pair < WORD / 2; pair++) decoded[pair] = as_type<uint>(decode_pair<BITS, CENTRED>(word, pair));
    if (BITS == 4) {
      *reinterpret_cast<threadgroup uint4*>(row + i) = uint4(decoded[0], decoded[1], decoded[WORD / 2 - 2], decoded[WORD / 2 - 1]);
    } else {
      *reinterpret_cast<threadgroup uint2*>(row + i) = uint2(decoded[0], decoded[1]);
    }
  }
}
// Stages BM rows of the activations of sub-block j; rows past M are zero.
template <int B, int BM>
METAL_FUNC void stage_activations(const device half* q, int row0, int M, size_t stride, int j, uint t, threadgroup half* out) {
  for (int i = int(t); i < BM * B / 8; i += 128) {
    const int row = i / (B / 8), part = i % (B / 8);
    uint4 v = uint4(0u, 0u, 0u, 0u);
    if (row0 + row < M) v = *reinterpret_cast<const device uint4*>(q + size_t(row0 + row) * stride + j * B + part * 8);
    *reinterpret_cast<threadgroup uint4*>(out + row * (B + kPad) + part * 8) = v;
  }
}

// @kernel gemm
// @inputs packed scales biases q d s bias residual sizes
// @outputs y
// sizes: K, N, tiles, M. Grid (128, tiles, ceil(M/BM)).
{
  constexpr int LD = B + kPad, MT = BM / 16;
  threadgroup uint4 xs4[BM * LD / 8];  // uint4: halves, written 16 bytes at a time
  threadgroup uint4 ws4[32 * LD / 8];
  threadgroup half* xs = reinterpret_cast<threadgroup half*>(xs4);
  threadgroup half* ws = reinterpret_cast<threadgroup half*>(ws4);
  const int K = sizes[0], N = sizes[1], M = sizes[3];
  const int NB = K / B, groups = K / G, units = (K * BITS + 127) / 128;
  const int stride = (K + A - 1) / A, sums = stride * (A / SB);
  const uint t = thread_index_in_threadgroup;
  const int lane = int(thread_index_in_simdgroup), sg = int(simdgroup_index_in_threadgroup);
  const int tile = int(threadgroup_position_in_grid.y), row0 = int(threadgroup_position_in_grid.z) * BM;
  const device uint4* w = reinterpret_cast<const device uint4*>(packed) + size_t(tile) * units * 32;
  const int m0 = (sg / 2) * (BM / 2), n0 = (sg % 2) * 16;
  // The lane's two elements of every 8x8 matrix: one row, two neighbouring columns.
  const int fm = lane / 16 * 4 + lane / 2 % 4, fn = lane / 8 % 2 * 4 + lane % 2 * 2;

  float total[MT][2][2], acc[MT][2][2];
  UNROLL for (int a = 0; a < MT; a++) {
    UNROLL for (int b = 0; b < 2; b++) {
      UNROLL for (int e = 0; e < 2; e++) total[a][b][e] = acc[a][b][e] = 0.0f;
    }
  }
  bool started = false;
  for (int slice = 0; slice < 8; slice++) {
    const int begin = slice_begin(slice, NB), end = slice_begin(slice + 1, NB);
    if (begin == end) continue;
    for (int j = begin; j < end; j++) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_weights<BITS, CENTRED, B>(w, j, t, ws);
      stage_activations<B, BM>(q, row0, M, size_t(stride) * A, j, t, xs);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_matrix<float, 8, 8> p[MT][2];
      UNROLL for (int a = 0; a < MT; a++) {
        UNROLL for (int b = 0; b < 2; b++) p[a][b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
      for (int k = 0; k < B; k += 8) {
        simdgroup_matrix<half, 8, 8> fx[MT], fw[2];
        UNROLL for (int a = 0; a < MT; a++) simdgroup_load(fx[a], xs + (m0 + 8 * a) * LD + k, LD);
        UNROLL for (int b = 0; b < 2; b++) simdgroup_load(fw[b], ws + (n0 + 8 * b) * LD + k, LD, ulong2(0, 0), true);
        UNROLL for (int a = 0; a < MT; a++) {
          UNROLL for (int b = 0; b < 2; b++) simdgroup_multiply_accumulate(p[a][b], fx[a], fw[b], p[a][b]);
        }
      }
      const size_t scale0 = (size_t(tile) * groups + j * B / G) * 32 + n0 + fn;
      float scale[2][2], offset[2][2];
      UNROLL for (int b = 0; b < 2; b++) {
        UNROLL for (int e = 0; e < 2; e++) {
          scale[b][e] = widen(scales[scale0 + 8 * b + e]);
          offset[b][e] = widen(biases[scale0 + 8 * b + e]);
        }
      }
      UNROLL for (int a = 0; a < MT; a++) {
        const size_t row = min(row0 + m0 + 8 * a + fm, M - 1);
        float sum = 0.0f;
        for (int i = 0; i < B / SB; i++) sum = sum + s[row * sums + j * (B / SB) + i];
        const float block = d[row * stride + j * B / A];
        UNROLL for (int b = 0; b < 2; b++) {
          UNROLL for (int e = 0; e < 2; e++) {
            const float v = fma(scale[b][e], p[a][b].thread_elements()[e], offset[b][e] * sum);
            acc[a][b][e] = fma(block, v, acc[a][b][e]);
          }
        }
      }
    }
    UNROLL for (int a = 0; a < MT; a++) {
      UNROLL for (int b = 0; b < 2; b++) {
        UNROLL for (int e = 0; e < 2; e++) {
          total[a][b][e] = started ? total[a][b][e] + acc[a][b][e] : acc[a][b][e];
          acc[a][b][e] = 0.0f;
        }
      }
    }
    started = true;
  }
  UNROLL for (int a = 0; a < MT; a++) {
    const int row = row0 + m0 + 8 * a + fm;
    UNROLL for (int b = 0; b < 2; b++) {
      UNROLL for (int e = 0; e < 2; e++) {
        const int n = tile * 32 + n0 + 8 * b + fn + e;
        if (row >= M || n >= N) continue;
        const size_t to = size_t(row) * N + n;
        y[to] = finish<HAS_BIAS, HAS_RESIDUAL, IS_LOGIT>(total[a][b][e], bias, residual, n, to);
      }
    }
  }
}
