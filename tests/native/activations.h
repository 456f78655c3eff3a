// Buffers of an activation view, each exactly as large as the contract says, so that a sanitizer sees every step outside.
#pragma once
#include <cstring>
#include <vector>

#include "contract.h"
#include "views.h"

namespace isobatch::testing {

struct Activations {
  ActView view{};
  std::vector<uint8_t> q;
  std::vector<float> d, s, s_low, s_high;
  std::vector<uint32_t> non_finite;

  // Everything holds garbage but `non_finite`.
  Activations(int K, int A, int M, int P, ActFormat format, bool half_sums, int limit = kActivationMax) : non_finite(M, 0) {
    view.K = K;
    view.A = A;
    view.NB = (K + A - 1) / A;
    view.M = M;
    view.P = P;
    view.limit = limit;
    view.format = format;
    view.half_sums = half_sums;
    view.op_index = 6;
    const size_t blocks = (size_t)(M + P - 1) / P * P * view.NB;
    q.assign(blocks * 2 * A, 0xab);
    for (std::vector<float>* floats : {&d, &s, &s_low, &s_high}) floats->assign(blocks, -3.25f);
    view.q = q.data();
    view.d = d.data();
    view.s = s.data();
    view.s_low = s_low.data();
    view.s_high = s_high.data();
    view.non_finite = non_finite.data();
  }
  Activations(const Activations&) = delete;
  Activations& operator=(const Activations&) = delete;

  bool equals(const Activations& other) const {
    return q == other.q && d == other.d && s == other.s && s_low == other.s_low && s_high == other.s_high &&
           non_finite == other.non_finite;
  }

  // Rewrites row m, given as plain int16, in the view's format.
  void encode_row(int m) {
    const int A = view.A;
    for (int g = 0; g < view.NB; g++) {
      uint8_t* block = view.q + view.block_index(m, g) * 2 * A;
      std::vector<int16_t> plain(A);
      std::memcpy(plain.data(), block, 2 * (size_t)A);
      for (int k = 0; k < A; k++) {
        constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // where an element goes inside its 8
        if (view.format == ActFormat::kInt16Shuffled) {
          std::memcpy(block + 2 * (k / 8 * 8 + kOrder[k % 8]), &plain[k], 2);
        } else if (view.format == ActFormat::kHalves) {
          const int high = plain[k] >= 0 ? plain[k] / 16 : -((15 - plain[k]) / 16);
          block[k] = (uint8_t)high;
          block[A + k] = (uint8_t)(plain[k] - 16 * high);
        } else if (view.format == ActFormat::kBytes) {
          block[k] = (uint8_t)plain[k];
          block[A + k] = 0xab;  // nobody's
        }
      }
    }
  }
};

}  // namespace isobatch::testing
