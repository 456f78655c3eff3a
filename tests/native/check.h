// What the native tests share: reporting, random inputs, comparison of bits. No framework, so that it runs on any machine
// and emulator that has a C++ library.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace isobatch::testing {

// Counts and prints; the program ends with an error when any check failed.
void expect(bool holds, const std::string& what);
int checks_done();
int checks_failed();

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// The same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int below(int n) { return (int)(next() % (uint64_t)n); }
  bool once_in(int n) { return below(n) == 0; }
  float uniform(float low, float high) { return low + (high - low) * ((float)(next() >> 40) * 0x1p-24f); }
  template <class T, size_t N>
  const T& pick(const T (&values)[N]) { return values[below((int)N)]; }
  template <class T>
  const T& pick(const std::vector<T>& values) { return values[below((int)values.size())]; }

 private:
  uint64_t state_;
};

// Arguments of exp at its cut, and halfway between two integers of its range reduction.
const std::vector<float>& exp_edges();

// Activations: outliers, zeros of both signs, runs near every floor, subnormal numbers, values halfway between two
// integers where quantisation or exp rounds; all finite.
std::vector<float> random_row(Random& random, int n);
std::vector<float> random_values(Random& random, int n, float size);
// fp16 bits: mostly around one, some subnormal, some large, never NaN or infinite.
uint16_t random_half(Random& random);
// Turns one element into NaN, an infinity or a number past the limit.
void spoil(Random& random, std::vector<float>& row);

// Groups of tests, each in its own file.
void test_quantize();
void test_rope();
void test_attention();
void test_statistics();
void test_linear();
void test_dense();
void test_float();
void test_pool();
void test_engine();
void test_wrong_steps();

}  // namespace isobatch::testing
