// Quantised weights as repacked at load (metal_weights.py), and their decoding to half integers.
//
// Outputs are cut in tiles of 32, a lane for each. A lane reads its weights 16 bytes at a time, and the 16 bytes of the 32
// lanes are neighbours:
//   packed  uint4 (tiles, K/UNIT, 32)   UNIT = 32 weights of 4 bits, or 16 of 8 bits
//   scales  (tiles, K/G, 32)            biases likewise; both zero past N
// In a word of 4-bit weights the nibbles lie as 0 2 4 6 1 3 5 7 (lowest first), in one of 8-bit weights the bytes as
// 0 2 1 3: a shift and a mask then give two neighbouring weights in the two halves of the word.
// @use common

// Two weights to half integers: 1024 + w is a half whose low bits are w, so no conversion is needed. An and, an or, a
// subtraction of two: with the shift, 2.5 slots a weight.
template <int BITS, bool CENTRED>
METAL_FUNC half2 decode_pair(uint word, int pair) {
  const uint mask = BITS == 4 ? 0x000f000fu : 0x00ff00ffu;
  const half offset = CENTRED ? half(1152.0f) : half(1024.0f);
  return as_type<half2>(((word >> (BITS * pair)) & mask) | 0x64006400u) - half2(offset, offset);
}
// Activations that meet the weights of one word: 8 or 4 halves in one load, the same for every lane of the simdgroup.
template <int BITS>
METAL_FUNC void load_word_of_activations(const device half* x, thread half2* pairs) {
  if (BITS == 4) {
    const uint4 v = *reinterpret_cast<const device uint4*>(x);
    UNROLL for (int i = 0; i < 4; i++) pairs[i] = as_type<half2>(v[i]);
  } else {
    const uint2 v = *reinterpret_cast<const device uint2*>(x);
    UNROLL for (int i = 0; i < 2; i++) pairs[i] = as_type<half2>(v[i]);
  }
}
