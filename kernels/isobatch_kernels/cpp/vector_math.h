// The non-linear pieces of docs/numerics.md section 4 on vectors. Included only through row_ops_unit.h.
#pragma once

namespace isobatch::ISOBATCH_UNIT {
namespace {

inline Vf vector_recip(Vf a) {
  const Vf one = set(1.0f);
  Vf y = recip_seed(a);
  for (int i = 0; i < 3; i++) y = fma(y, fnma(a, y, one), y);
  return y;
}

inline Vf vector_exp(Vf x) {
  Vf n = round(mul(x, set(kLog2e)));
  Vf r = fnma(n, set(kLn2Low), fnma(n, set(kLn2High), x));
  Vf p = set(kExpCoefficients[0]);
  for (int i = 1; i < 8; i++) p = fma(p, r, set(kExpCoefficients[i]));
  return where_ge(x, set(kExpCut), add_exponent(p, n));
}

inline Vf vector_silu_mul(Vf gate, Vf up) {
  const Vf floor = set(kInputFloor);
  gate = zero_below(gate, floor);
  up = zero_below(up, floor);
  Vf z = min(max(negate(gate), set(-100.0f)), set(60.0f));
  return mul(mul(gate, vector_recip(add(set(1.0f), vector_exp(z)))), up);
}

// The tree of sum256 over 256 chains held in vectors; overwrites them.
inline float sum_chains(Vf (&chains)[256 / W]) {
  for (int w = 128 / W; w > 0; w /= 2)
    for (int i = 0; i < w; i++) chains[i] = add(chains[i], chains[i + w]);
  return sum_lanes(chains[0]);
}

}  // namespace
}  // namespace isobatch::ISOBATCH_UNIT
