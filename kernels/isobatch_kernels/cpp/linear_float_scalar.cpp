// Float linear layers in portable C++.
#include "half.h"
#include "linear_float.h"
#define ISOBATCH_UNIT scalar
#include "simd_scalar.h"

namespace isobatch::scalar {
namespace {

constexpr int kRows = 4, kVectors = 2;
struct Codes { uint8_t bytes[W][4]; };

inline Codes load_codes(const uint8_t* at) {
  Codes codes;
  std::memcpy(codes.bytes, at, sizeof codes.bytes);
  return codes;
}
inline Vf nibble(const Codes& codes, int i) {
  Vf r;
  for (int n = 0; n < W; n++) r.v[n] = (float)(codes.bytes[n][i % 4] >> (i < 4 ? 0 : 4) & 15);
  return r;
}
inline Vf byte_value(const Codes& codes, int i) {
  Vf r;
  for (int n = 0; n < W; n++) r.v[n] = (float)codes.bytes[n][i];
  return r;
}
inline Vf load_bfloat(const uint16_t* p) {
  Vf r;
  for (int n = 0; n < W; n++) r.v[n] = bfloat_to_float(p[n]);
  return r;
}

}  // namespace
}  // namespace isobatch::scalar

#include "linear_float_impl.h"

namespace isobatch {
const FloatLinearOps* scalar_float_ops() {
  static constexpr FloatLinearOps table = scalar::float_ops_table();
  return &table;
}
}  // namespace isobatch
