// What one core of this machine can do at most, for bench_tensors.py: reading memory, and multiplying small integers.
//   limits MEGABYTES SECONDS  prints gigabytes read in a second, and billions of products of two bytes, summed, in a second
// Reading is a sum over a buffer, in order; multiplying is the widest dot product of the processor, on registers alone.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace {

volatile uint64_t sink;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The best rate of `body`, which does `work`, in `seconds`.
template <class F>
double best_rate(double work, double seconds, F body) {
  double best = 0;
  for (const double end = now() + seconds; now() < end;) {
    const double start = now();
    body();
    const double rate = work / (now() - start);
    if (rate > best) best = rate;
  }
  return best;
}

double read_rate(size_t bytes, double seconds) {
  std::vector<uint64_t> words(bytes / 8, 1);
  return best_rate((double)bytes, seconds, [&] {
    uint64_t sums[8] = {};
    for (size_t i = 0; i + 64 <= words.size(); i += 64) {
      for (int j = 0; j < 64; j++) sums[j & 7] += words[i + j];
    }
    for (const uint64_t sum : sums) sink = sink + sum;
  });
}

#if defined(__AVX512VNNI__)
using Vector = __m512i;
Vector same_bytes(int value) { return _mm512_set1_epi8((char)value); }
inline void multiply_add(Vector& sum, Vector a, Vector b) {
  sum = _mm512_dpbusd_epi32(sum, a, b);
  asm("" : "+v"(sum));
}
uint64_t any_of(Vector sum) { return (uint64_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(sum)); }
#elif defined(__AVX2__)
using Vector = __m256i;
Vector same_bytes(int value) { return _mm256_set1_epi8((char)value); }
inline void multiply_add(Vector& sum, Vector a, Vector b) {
  asm volatile("" : "+x"(a));  // or the product would be computed once
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
  asm("" : "+x"(sum));
}
uint64_t any_of(Vector sum) { return (uint64_t)_mm256_extract_epi32(sum, 0); }
#elif defined(__ARM_FEATURE_DOTPROD)
using Vector = int8x16_t;
Vector same_bytes(int value) { return vdupq_n_s8((int8_t)value); }
inline void multiply_add(Vector& sum, Vector a, Vector b) {
  sum = vreinterpretq_s8_s32(vdotq_s32(vreinterpretq_s32_s8(sum), a, b));
  asm("" : "+w"(sum));
}
uint64_t any_of(Vector sum) { return (uint64_t)vaddvq_s32(vreinterpretq_s32_s8(sum)); }
#else
using Vector = uint64_t;  // no such instruction: the rate says nothing, and bench_tensors.py leaves it out
#endif

double multiply_rate(double seconds) {
#if defined(__AVX512VNNI__) || defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
  constexpr int kRounds = 100000;
  return best_rate((double)sizeof(Vector) * 8 * kRounds, seconds, [] {
    const Vector a = same_bytes((int)(sink & 3)), b = same_bytes(3);
    // Eight sums by name: an array of them would live in memory.
    Vector s0 = a, s1 = a, s2 = a, s3 = a, s4 = a, s5 = a, s6 = a, s7 = a;
    for (int i = 0; i < kRounds; i++) {
      multiply_add(s0, a, b), multiply_add(s1, a, b), multiply_add(s2, a, b), multiply_add(s3, a, b);
      multiply_add(s4, a, b), multiply_add(s5, a, b), multiply_add(s6, a, b), multiply_add(s7, a, b);
    }
    for (const Vector sum : {s0, s1, s2, s3, s4, s5, s6, s7}) sink = sink + any_of(sum);
  });
#else
  return 0 * seconds;
#endif
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const double seconds = std::atof(argv[2]);
  const double read = read_rate((size_t)(std::atof(argv[1]) * 1e6), seconds);
  std::printf("%.2f %.1f\n", read / 1e9, multiply_rate(seconds) / 1e9);
}
