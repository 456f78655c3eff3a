#include "check.h"

#include <atomic>
#include <cmath>

#include "contract.h"

namespace isobatch::testing {
namespace {

constexpr int kMostMessages = 20;
std::atomic<int> done{0}, failed{0};

}  // namespace

void expect(bool holds, const std::string& what) {
  done++;
  if (!holds && failed++ < kMostMessages) std::printf("FAILED %s\n", what.c_str());
}
int checks_done() { return done; }
int checks_failed() { return failed; }

const std::vector<float>& exp_edges() {
  static const std::vector<float> edges = [] {
    std::vector<float> found{kExpCut, std::nextafter(kExpCut, 0.0f), std::nextafter(kExpCut, -100.0f)};
    for (int n = -57; n < 57; n++) {
      const float half = (float)n + 0.5f;
      float x = half / kLog2e;
      for (int i = 0; i < 3; i++) x = std::nextafter(x, -100.0f);
      for (int i = 0; i < 7; i++, x = std::nextafter(x, 100.0f)) {
        if (x * kLog2e == half) found.push_back(x);
      }
    }
    return found;
  }();
  return edges;
}

std::vector<float> random_values(Random& random, int n, float size) {
  std::vector<float> values(n);
  for (float& v : values) v = random.uniform(-size, size);
  return values;
}

std::vector<float> random_row(Random& random, int n) {
  static const float kFactors[] = {1,       1,         1,        1,        0.0f,      -0.0f,     0x1p-40f,
                                   0x1p-39f, 0x1p-41f, 0x1p-60f, 0x1p-64f, 0x1p-100f, 0x1p-127f, 0x1p80f};
  std::vector<float> row(n);
  float factor = 1;
  bool ties = false;
  for (int k = 0; k < n; k++) {
    if (k % 64 == 0) ties = random.once_in(4);
    if (ties) {  // halfway between two integers of a block whose largest value is 1
      row[k] = k % 32 == 0 ? 1.0f : ((float)random.below(2047) + 0.5f) / 2047.0f;
      if (random.once_in(2)) row[k] = -row[k];
      continue;
    }
    if (k % 16 == 0) factor = random.pick(kFactors);
    row[k] = random.uniform(-2, 2);
    if (random.once_in(40)) row[k] = row[k] * 3000;
    if (random.once_in(20)) row[k] = random.once_in(2) ? 1.0f : -0.5f;  // equal values and exact halves
    row[k] = row[k] * factor;
    if (random.once_in(8)) row[k] = random.pick(exp_edges());
  }
  return row;
}

uint16_t random_half(Random& random) {
  const uint32_t word = (uint32_t)random.next();
  const uint32_t sign = word & 0x8000u, mantissa = word >> 16 & 0x3ffu;
  if (random.once_in(8)) return (uint16_t)(sign | mantissa);                                  // zero or subnormal
  if (random.once_in(50)) return (uint16_t)(sign | 30u << 10 | mantissa);                     // the largest exponent
  return (uint16_t)(sign | (10u + random.below(7)) << 10 | mantissa);
}

void spoil(Random& random, std::vector<float>& row) {
  static const float kBad[] = {NAN, INFINITY, -INFINITY, 0x1p96f, -0x1p127f};
  row[random.below((int)row.size())] = random.pick(kBad);
}

}  // namespace isobatch::testing
