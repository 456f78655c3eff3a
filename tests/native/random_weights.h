// Random matrices in the layout that weights are stored in.
#pragma once
#include <cstring>
#include <vector>

#include "check.h"
#include "weights.h"

namespace isobatch::testing {

struct RandomWeight {
  std::vector<uint32_t> packed;
  std::vector<uint16_t> half_scales, half_biases;
  std::vector<float> scales, biases;
  QuantizedSource source{};

  RandomWeight(Random& random, int N, int K, int bits, int group, bool half, bool with_biases) {
    const size_t groups = (size_t)N * (K / group);
    packed.resize((size_t)N * K * bits / 32);
    for (uint32_t& word : packed) word = random.once_in(9) ? (random.once_in(2) ? 0xffffffffu : 0) : (uint32_t)random.next();
    for (size_t i = 0; i < groups; i++) {
      // Both signs, some below the floor, some subnormal halves.
      half_scales.push_back((uint16_t)((random.next() & 0x8000u) | (random.once_in(12) ? random.below(40) : 0x1000 + random.below(0x1000))));
      half_biases.push_back((uint16_t)((random.next() & 0x8000u) | (random.once_in(12) ? random.below(40) : 0x2000 + random.below(0x1000))));
      scales.push_back(random.once_in(12) ? 0x1p-25f : random.uniform(-0.02f, 0.02f));
      biases.push_back(random.once_in(12) ? -0x1p-26f : random.uniform(-0.2f, 0.2f));
    }
    source = {N, K, bits, group, packed.data(), half, nullptr, nullptr};
    source.scales = half ? (const void*)half_scales.data() : scales.data();
    if (with_biases) source.biases = half ? (const void*)half_biases.data() : biases.data();
  }
  RandomWeight(const RandomWeight&) = delete;
  RandomWeight& operator=(const RandomWeight&) = delete;
};

inline std::vector<uint16_t> random_dense(Random& random, int N, int K, bool bfloat) {
  std::vector<uint16_t> values((size_t)N * K);
  for (uint16_t& v : values) {
    v = random_half(random);
    if (bfloat) v = (uint16_t)((v & 0x8000u) | (random.once_in(20) ? random.below(200) : 0x3d00 + random.below(0x300)));
  }
  return values;
}

}  // namespace isobatch::testing
