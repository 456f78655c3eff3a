// Packed weights: records of 16 outputs by one sub-block of B inputs, [tile][sub-block][record], so that a slice of a tile
// is one run of memory. A record holds the integers in the order of the tensor core's first operand, then the affine pairs.
//
// Lane (g, t) = (lane / 4, lane % 4) of MMA i has outputs g and g + 8 and inputs t*(B/4) + 4*i + e, e = 0..3.
// 4-bit storage: one word for an MMA, nibbles e0: 0 (output g) and 2 (output g+8), e1: 4 and 6, e2: 1 and 3, e3: 5 and 7.
//   A nibble n in the low bits of an fp16 is the subnormal n*2^-24, and four bits higher 16*n*2^-24. Activations with e >= 2
//   are stored as q/16, so every product is q*n*2^-24: integers need no conversion, and 2^24 goes into the scale, exactly.
// 8-bit storage: two words for an MMA, bytes e0..e3 of output g, then of output g+8; a byte is the integer + 128.
// Affine pairs: 16-bit (scale, bias) of outputs g and g+8 side by side, or the same in fp32.
// @use common

template <int SB, int B, int ST>
struct Record {
  static constexpr int kMmas = B / 16;
  static constexpr int kLaneWords = SB == 4 ? kMmas : 2 * kMmas;
  static constexpr int kPiece = kLaneWords < 4 ? kLaneWords : 4;  // words that a lane loads at once
  static constexpr int kQuantWords = 32 * kLaneWords;
  static constexpr int kWords = kQuantWords + (ST == 2 ? 32 : 16);
  static constexpr float kScale = SB == 4 ? 0x1p24f : 1.0f;
  static __device__ __forceinline__ int word(int lane, int i) { return (i / kPiece * 32 + lane) * kPiece + i % kPiece; }
};

struct Affine {
  float scale, bias;
};
// ST: 0 fp16, 1 bf16, 2 fp32.
template <int ST>
__device__ __forceinline__ Affine unpack_affine(unsigned word) {
  if (ST == 0) return {x1_half_float((fp16)(word & 0xffffu)), x1_half_float((fp16)(word >> 16))};
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
// Pairs of outputs g and g + 8.
template <int ST>
__device__ __forceinline__ void load_affine(const unsigned* pairs, int g, Affine& low, Affine& high) {
  if (ST == 2) {
    const float4 v = reinterpret_cast<const float4*>(pairs)[g];
    low = {v.x, v.y};
    high = {v.z, v.w};
  } else {
    const uint2 v = reinterpret_cast<const uint2*>(pairs)[g];
    low = unpack_affine<ST>(v.x);
    high = unpack_affine<ST>(v.y);
  }
}

// First operand of MMA i from a lane's words.
template <int SB>
__device__ __forceinline__ void expand(const unsigned* words, int i, unsigned (&a)[4]) {
  if (SB == 4) {
    const unsigned w = words[i], v = w >> 8;
    a[0] = w & 0x000f000fu;
    a[1] = v & 0x000f000fu;
    a[2] = w & 0x00f000f0u;
    a[3] = v & 0x00f000f0u;
  } else {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      // 0x64bb is 1024 + bb; 1152 = 1024 + 128. The upper half counts 16 times.
      const unsigned w = words[2 * i + h];
      const unsigned low = __byte_perm(w, 0x64646464u, 0x4140), high = __byte_perm(w, 0x64646464u, 0x4342);
      a[h] = x1_sub_halves(low, 0x64806480u);
      a[2 + h] = x1_fma_halves(high, 0x4c004c00u, 0xf480f480u);
    }
  }
}

// N words from shared or global memory in pieces of 16 bytes, or as large as N allows.
template <int N>
__device__ __forceinline__ void load_words(const unsigned* from, unsigned* to) {
  if (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  } else if (N == 2) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
  } else {
    to[0] = from[0];
  }
}

// One sub-block's exact integers p on the tensor core, for NT tiles of outputs by MT tiles of 8 rows. b: second operands of a
// lane.
template <int SB, int B, int ST, int NT, int MT>
__device__ __forceinline__ void multiply(const unsigned* records, int lane, const unsigned (&b)[MT][B / 8],
                                         float (&p)[NT][MT][4]) {
  using R = Record<SB, B, ST>;
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    const unsigned* record = records + nt * R::kWords;
    alignas(16) unsigned words[R::kLaneWords];
#pragma unroll
    for (int i = 0; i < R::kLaneWords; i += R::kPiece) load_words<R::kPiece>(record + R::word(lane, i), words + i);
#pragma unroll
    for (int mt = 0; mt < MT; mt++) p[nt][mt][0] = p[nt][mt][1] = p[nt][mt][2] = p[nt][mt][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < R::kMmas; i++) {
      unsigned a[4];
      expand<SB>(words, i, a);
#pragma unroll
      for (int mt = 0; mt < MT; mt++) mma16816(p[nt][mt], a, b[mt][2 * i], b[mt][2 * i + 1]);
    }
  }
}

// The fp32 tail of a sub-block. ds: (d, s) of rows 2t and 2t+1 of each tile.
template <int SB, int B, int ST, int NT, int MT>
__device__ __forceinline__ void add_tail(const unsigned* records, int lane, const float (&p)[NT][MT][4],
                                         const float4 (&ds)[MT], float (&acc)[NT][MT][4]) {
  using R = Record<SB, B, ST>;
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    Affine low, high;
    load_affine<ST>(records + nt * R::kWords + R::kQuantWords, lane >> 2, low, high);
    low.scale = x1_mul(low.scale, R::kScale);
    high.scale = x1_mul(high.scale, R::kScale);
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
      const float4 v = ds[mt];
      float(&c)[4] = acc[nt][mt];
      c[0] = x1_fma(v.x, x1_fma(low.scale, p[nt][mt][0], x1_mul(low.bias, v.y)), c[0]);
      c[1] = x1_fma(v.z, x1_fma(low.scale, p[nt][mt][1], x1_mul(low.bias, v.w)), c[1]);
      c[2] = x1_fma(v.x, x1_fma(high.scale, p[nt][mt][2], x1_mul(high.bias, v.y)), c[2]);
      c[3] = x1_fma(v.z, x1_fma(high.scale, p[nt][mt][3], x1_mul(high.bias, v.w)), c[3]);
    }
  }
}

// The epilogue of one output: bias vector and residual where there are any, and no negative zero among logits.
__device__ __forceinline__ float finish_output(float total, bool has_bias, float bias, bool has_residual, float residual,
                                               bool logit) {
  if (has_bias) total = x1_add(total, bias);
  if (has_residual) total = x1_add(total, residual);
  return logit ? x1_add(total, 0.0f) : total;
}
__device__ __forceinline__ float finish_output(float total, const float* bias, const float* residual, bool logit) {
  return finish_output(total, bias, bias ? *bias : 0.0f, residual, residual ? *residual : 0.0f, logit);
}
