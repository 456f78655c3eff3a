#include "check.h"

#include <atomic>
#include <cmath>

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
  for (int k = 0; k < n; k++) {
    if (k % 16 == 0) factor = random.pick(kFactors);
    row[k] = random.uniform(-2, 2);
    if (random.once_in(40)) row[k] = row[k] * 3000;
    if (random.once_in(20)) row[k] = random.once_in(2) ? 1.0f : -0.5f;  // equal values and exact halves
    row[k] = row[k] * factor;
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
