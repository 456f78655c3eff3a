// Arithmetic functions. fma, rint, min, max and comparisons are exact; transcendentals are the host library's, and the
// fast:: ones differ from the precise:: ones in the last bits, so that nothing can lean on either.
#pragma once

extern "C" {
float expf(float); float exp2f(float); float exp10f(float); float logf(float); float log2f(float); float log10f(float);
float sinf(float); float cosf(float); float tanf(float); float asinf(float); float acosf(float); float atanf(float);
float sinhf(float); float coshf(float); float tanhf(float); float asinhf(float); float acoshf(float); float atanhf(float);
float atan2f(float, float); float powf(float, float); float fmodf(float, float);
float frexpf(float, int*); float ldexpf(float, int); float nextafterf(float, float);
}

namespace metal {
#define EMU_LIFT_1(name)                                                                     \
  template <class T, int N> METAL_FUNC vec<T, N> name(vec<T, N> x) {                         \
    vec<T, N> r; for (int i = 0; i < N; i++) r[i] = name((T)x[i]); return r; }
#define EMU_LIFT_2(name)                                                                     \
  template <class T, int N> METAL_FUNC vec<T, N> name(vec<T, N> x, vec<T, N> y) {            \
    vec<T, N> r; for (int i = 0; i < N; i++) r[i] = name((T)x[i], (T)y[i]); return r; }
#define EMU_FLOAT_1(name, value)                                                             \
  METAL_FUNC float name(float x) { return value; }                                           \
  METAL_FUNC half name(half h) { float x = (float)h; return (half)(value); }                 \
  EMU_LIFT_1(name)
#define EMU_FLOAT_2(name, value)                                                             \
  METAL_FUNC float name(float x, float y) { return value; }                                  \
  METAL_FUNC half name(half a, half b) { float x = (float)a, y = (float)b; return (half)(value); } \
  EMU_LIFT_2(name)

#define EMU_TRANSCENDENTALS(EXP)                                                             \
  EMU_FLOAT_1(exp, EXP) EMU_FLOAT_1(exp2, ::exp2f(x)) EMU_FLOAT_1(exp10, ::exp10f(x))        \
  EMU_FLOAT_1(log, ::logf(x)) EMU_FLOAT_1(log2, ::log2f(x)) EMU_FLOAT_1(log10, ::log10f(x))  \
  EMU_FLOAT_1(sin, ::sinf(x)) EMU_FLOAT_1(cos, ::cosf(x)) EMU_FLOAT_1(tan, ::tanf(x))        \
  EMU_FLOAT_1(asin, ::asinf(x)) EMU_FLOAT_1(acos, ::acosf(x)) EMU_FLOAT_1(atan, ::atanf(x))  \
  EMU_FLOAT_1(sinh, ::sinhf(x)) EMU_FLOAT_1(cosh, ::coshf(x)) EMU_FLOAT_1(tanh, ::tanhf(x))  \
  EMU_FLOAT_1(asinh, ::asinhf(x)) EMU_FLOAT_1(acosh, ::acoshf(x)) EMU_FLOAT_1(atanh, ::atanhf(x)) \
  EMU_FLOAT_1(sqrt, __builtin_sqrtf(x)) EMU_FLOAT_1(rsqrt, 1.0f / __builtin_sqrtf(x))        \
  EMU_FLOAT_2(atan2, ::atan2f(x, y)) EMU_FLOAT_2(pow, ::powf(x, y)) EMU_FLOAT_2(powr, ::powf(x, y)) \
  EMU_FLOAT_2(fmod, ::fmodf(x, y)) EMU_FLOAT_2(divide, x / y)
namespace precise { EMU_TRANSCENDENTALS(::expf(x)) }
namespace fast { EMU_TRANSCENDENTALS(::exp2f(x * M_LOG2E_F)) }
EMU_TRANSCENDENTALS(::expf(x))

EMU_FLOAT_1(ceil, __builtin_ceilf(x)) EMU_FLOAT_1(floor, __builtin_floorf(x)) EMU_FLOAT_1(trunc, __builtin_truncf(x))
EMU_FLOAT_1(rint, __builtin_rintf(x)) EMU_FLOAT_1(round, __builtin_roundf(x)) EMU_FLOAT_1(fabs, __builtin_fabsf(x))
EMU_FLOAT_1(fract, x - __builtin_floorf(x)) EMU_FLOAT_1(sign, (x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f))
EMU_FLOAT_2(fmin, __builtin_fminf(x, y)) EMU_FLOAT_2(fmax, __builtin_fmaxf(x, y))
EMU_FLOAT_2(copysign, __builtin_copysignf(x, y)) EMU_FLOAT_2(step, (y < x ? 0.0f : 1.0f))

METAL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
METAL_FUNC half fma(half a, half b, half c) { return (half)__builtin_fma((double)a, (double)b, (double)c); }
template <class T, int N> METAL_FUNC vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> r; for (int i = 0; i < N; i++) r[i] = fma((T)a[i], (T)b[i], (T)c[i]); return r; }
METAL_FUNC float ldexp(float x, int k) { return ::ldexpf(x, k); }
METAL_FUNC float frexp(float x, int& e) { return ::frexpf(x, &e); }

#define EMU_CLASSIFY(name)                                                                   \
  METAL_FUNC bool name(float x) { return __builtin_##name(x); }                              \
  METAL_FUNC bool name(half x) { return __builtin_##name((float)x); }
EMU_CLASSIFY(isnan) EMU_CLASSIFY(isinf) EMU_CLASSIFY(isfinite) EMU_CLASSIFY(signbit)

#define EMU_MIN_MAX(T)                                                                       \
  METAL_FUNC constexpr T min(T a, T b) { return b < a ? b : a; }                             \
  METAL_FUNC constexpr T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(char) EMU_MIN_MAX(signed char) EMU_MIN_MAX(uchar) EMU_MIN_MAX(short) EMU_MIN_MAX(ushort)
EMU_MIN_MAX(int) EMU_MIN_MAX(uint) EMU_MIN_MAX(long) EMU_MIN_MAX(ulong)
METAL_FUNC float min(float a, float b) { return __builtin_fminf(a, b); }
METAL_FUNC float max(float a, float b) { return __builtin_fmaxf(a, b); }
METAL_FUNC half min(half a, half b) { return (half)__builtin_fminf((float)a, (float)b); }
METAL_FUNC half max(half a, half b) { return (half)__builtin_fmaxf((float)a, (float)b); }
EMU_LIFT_2(min) EMU_LIFT_2(max)
#define EMU_ABS(T) METAL_FUNC T abs(T x) { return x < 0 ? (T)-x : x; }
EMU_ABS(signed char) EMU_ABS(short) EMU_ABS(int) EMU_ABS(long)
METAL_FUNC float abs(float x) { return __builtin_fabsf(x); }
METAL_FUNC half abs(half x) { return (half)__builtin_fabsf((float)x); }
METAL_FUNC uint abs(uint x) { return x; }
METAL_FUNC ulong abs(ulong x) { return x; }
EMU_LIFT_1(abs)
template <class T> METAL_FUNC T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
METAL_FUNC float saturate(float x) { return clamp(x, 0.0f, 1.0f); }
template <class T> METAL_FUNC T mix(T a, T b, T t) { return a + (b - a) * t; }
template <class T> METAL_FUNC T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  vec<T, N> r; for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i]; return r; }
template <class T, int N> METAL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
  T s = a[0] * b[0]; for (int i = 1; i < N; i++) s += a[i] * b[i]; return s; }
template <int N> METAL_FUNC bool all(vec<bool, N> v) { bool r = true; for (int i = 0; i < N; i++) r = r && v[i]; return r; }
template <int N> METAL_FUNC bool any(vec<bool, N> v) { bool r = false; for (int i = 0; i < N; i++) r = r || v[i]; return r; }
template <class T> METAL_FUNC T popcount(T x) { return (T)__builtin_popcountll((ulong)(make_unsigned_t<T>)x); }
METAL_FUNC uint clz(uint x) { return x ? (uint)__builtin_clz(x) : 32u; }
METAL_FUNC uint ctz(uint x) { return x ? (uint)__builtin_ctz(x) : 32u; }
METAL_FUNC uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
template <class T> METAL_FUNC T extract_bits(T x, uint offset, uint bits) { return (T)((x >> offset) & (((T)1 << bits) - 1)); }
#define EMU_EXACT_NAMES using metal::fabs; using metal::fmin; using metal::fmax; using metal::ceil; using metal::floor; \
  using metal::fma; using metal::rint; using metal::round; using metal::trunc; using metal::min; using metal::max; \
  using metal::abs; using metal::clamp;
namespace fast { EMU_EXACT_NAMES }
namespace precise { EMU_EXACT_NAMES }
}  // namespace metal
