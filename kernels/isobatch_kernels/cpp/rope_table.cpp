#include "rope_table.h"

#include <vector>

#include "contract.h"

// Every machine must build the same table, so only + - * / in fp64 and std::fma are used, each correctly rounded.
// Frequencies are made once in pairs of doubles (about 100 bits), in turns (units of 2*pi), so that the fraction of a turn
// at position one million is still exact to 1e-16. Sources: error-free sums and products of Knuth and Dekker; Taylor and
// atanh series.

namespace isobatch {
namespace {

struct Pair { double hi, lo; };  // an unevaluated sum, |lo| at most half an ulp of hi

Pair quick_sum(double a, double b) { double s = a + b; return {s, b - (s - a)}; }  // |a| >= |b|
Pair sum(double a, double b) {
  double s = a + b, t = s - a;
  return {s, (a - (s - t)) + (b - t)};
}
Pair product(double a, double b) { double p = a * b; return {p, std::fma(a, b, -p)}; }

Pair add(Pair a, Pair b) {
  Pair s = sum(a.hi, b.hi), t = sum(a.lo, b.lo);
  s = quick_sum(s.hi, s.lo + t.hi);
  return quick_sum(s.hi, s.lo + t.lo);
}
Pair mul(Pair a, Pair b) {
  Pair p = product(a.hi, b.hi);
  return quick_sum(p.hi, p.lo + (a.hi * b.lo + a.lo * b.hi));
}
Pair div(Pair a, Pair b) {
  double q1 = a.hi / b.hi;
  Pair r = add(a, mul({-q1, 0.0}, b));
  double q2 = r.hi / b.hi;
  r = add(r, mul({-q2, 0.0}, b));
  return add(quick_sum(q1, q2), {r.hi / b.hi, 0.0});
}
Pair number(double x) { return {x, 0.0}; }

constexpr Pair kLn2Pair = {0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56};
constexpr Pair kInverseTwoPi = {0x1.45f306dc9c883p-3, -0x1.6b01ec5417056p-57};
constexpr double kTwoPiHigh = 0x1.921fb54442d18p+2, kTwoPiLow = 0x1.1a62633145c07p-52;

double power_of_two(int n) {  // n in -1022..1023
  uint64_t bits = (uint64_t)(n + 1023) << 52;
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
}

// Nearest integer, ties to even, of |x| < 2^51.
double nearest(double x) { return (x + 0x1.8p52) - 0x1.8p52; }

// log2 of a positive normal number: exponent plus 2*atanh(z)/ln 2 with z = (m-1)/(m+1), |z| <= 0.172.
Pair log2_pair(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  int exponent = (int)(bits >> 52) - 1023;
  double m = x * power_of_two(-exponent);
  if (m > 0x1.6a09e667f3bcdp+0) {
    m = m * 0.5;
    exponent++;
  }
  const Pair z = div(sum(m, -1.0), sum(m, 1.0)), square = mul(z, z);
  Pair series = number(0.0);
  for (int n = 45; n >= 1; n -= 2) series = add(mul(series, square), div(number(1.0), number(n)));
  const Pair ln = mul(number(2.0), mul(z, series));
  return add(number(exponent), div(ln, kLn2Pair));
}

// 2^x for |x| <= 1000.
Pair exp2_pair(Pair x) {
  const double whole = nearest(x.hi);
  const Pair r = mul(add(x, number(-whole)), kLn2Pair);
  Pair series = number(1.0);
  for (int n = 28; n >= 1; n--) series = add(number(1.0), div(mul(series, r), number(n)));
  const double scale = power_of_two((int)whole);
  return {series.hi * scale, series.lo * scale};
}

// A frequency in turns a position, cut so that high * position and middle * position are exact for positions below 2^24.
struct Frequency { double high, middle, low; };

double leading_bits(double x) {  // the leading 26 bits of x
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  bits &= ~(uint64_t)0x7ffffff;
  std::memcpy(&x, &bits, 8);
  return x;
}

Frequency frequency(int i, int rotary_dim, double base, const float* factors, double position_scale) {
  const Pair exponent = div(mul(log2_pair(base), number(-2.0 * i)), number(rotary_dim));
  Pair f = exp2_pair(exponent);
  if (factors) f = div(f, number(factors[i]));
  f = mul(mul(f, number(position_scale)), kInverseTwoPi);
  const double high = leading_bits(f.hi), rest = f.hi - high, middle = leading_bits(rest);
  return {high, middle, (rest - middle) + f.lo};
}

// Taylor polynomials for |a| <= pi/4, lowest term first; the error is below 1e-19.
double sine(double a) {
  const double x = a * a;
  double p = 0.0;
  for (int n = 19; n >= 3; n -= 2) p = (p + 1.0) * x / -(double)(n * (n - 1));
  return a + a * p;
}
double cosine(double a) {
  const double x = a * a;
  double p = 0.0;
  for (int n = 18; n >= 4; n -= 2) p = (p + 1.0) * x / -(double)(n * (n - 1));
  return 1.0 - (p + 1.0) * (x * 0.5);
}

void cos_sin(const Frequency& f, int position, double& c, double& s) {
  const double high = f.high * position, middle = f.middle * position;
  double turn = (high - nearest(high)) + (middle - nearest(middle)) + f.low * position;
  turn = turn - nearest(turn);
  const double quarter = nearest(4.0 * turn);
  const double r = turn - 0.25 * quarter;
  const double a = r * kTwoPiHigh + r * kTwoPiLow;
  const double ca = cosine(a), sa = sine(a);
  switch ((int)quarter & 3) {
    case 0: c = ca; s = sa; break;
    case 1: c = -sa; s = ca; break;
    case 2: c = -ca; s = -sa; break;
    default: c = sa; s = -ca; break;
  }
}

std::vector<Frequency> frequencies(int rotary_dim, double base, const float* factors, double position_scale) {
  std::vector<Frequency> list;
  for (int i = 0; i < rotary_dim / 2; i++) list.push_back(frequency(i, rotary_dim, base, factors, position_scale));
  return list;
}

float table_entry(double x) { return flush_below((float)x, kRopeTableFloor); }

}  // namespace

void build_rope_rows(double* rows, int first, int count, int rotary_dim, double base, const float* factors, double position_scale) {
  const std::vector<Frequency> list = frequencies(rotary_dim, base, factors, position_scale);
  for (int position = first; position < first + count; position++) {
    for (const Frequency& f : list) {
      cos_sin(f, position, rows[0], rows[1]);
      rows += 2;
    }
  }
}

void build_rope_table(float* table, int positions, int rotary_dim, double base, const float* factors, double position_scale) {
  const std::vector<Frequency> list = frequencies(rotary_dim, base, factors, position_scale);
  for (int position = 0; position < positions; position++) {
    for (const Frequency& f : list) {
      double c, s;
      cos_sin(f, position, c, s);
      table[0] = table_entry(c);
      table[1] = table_entry(s);
      table += 2;
    }
  }
}

}  // namespace isobatch
