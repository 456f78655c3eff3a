// Compiler builtins that MLX's bfloat headers call. They stand for precise functions here.
#pragma once

#define EMU_BUILTIN_1(name) METAL_FUNC float __metal_##name(float x, int) { return metal::precise::name(x); }
EMU_BUILTIN_1(acos) EMU_BUILTIN_1(acosh) EMU_BUILTIN_1(asin) EMU_BUILTIN_1(asinh) EMU_BUILTIN_1(atan) EMU_BUILTIN_1(atanh)
EMU_BUILTIN_1(ceil) EMU_BUILTIN_1(cos) EMU_BUILTIN_1(cosh) EMU_BUILTIN_1(exp10) EMU_BUILTIN_1(exp2) EMU_BUILTIN_1(fabs)
EMU_BUILTIN_1(floor) EMU_BUILTIN_1(log) EMU_BUILTIN_1(log10) EMU_BUILTIN_1(log2) EMU_BUILTIN_1(rint) EMU_BUILTIN_1(round)
EMU_BUILTIN_1(rsqrt) EMU_BUILTIN_1(sin) EMU_BUILTIN_1(sinh) EMU_BUILTIN_1(sqrt) EMU_BUILTIN_1(tan) EMU_BUILTIN_1(tanh)
EMU_BUILTIN_1(trunc)
#define EMU_BUILTIN_2(name) METAL_FUNC float __metal_##name(float x, float y, int) { return metal::precise::name(x, y); }
EMU_BUILTIN_2(atan2) EMU_BUILTIN_2(divide) EMU_BUILTIN_2(fmod) EMU_BUILTIN_2(pow) EMU_BUILTIN_2(powr) EMU_BUILTIN_2(fmax)
EMU_BUILTIN_2(fmin)
METAL_FUNC float __metal_exp(float x, int fast) { return fast ? metal::fast::exp(x) : metal::precise::exp(x); }
METAL_FUNC float __metal_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
METAL_FUNC float __metal_fract(float x, int) { return metal::fract(x); }
METAL_FUNC float __metal_cospi(float x, int) { return ::cosf(x * M_PI_F); }
METAL_FUNC float __metal_sinpi(float x, int) { return ::sinf(x * M_PI_F); }
METAL_FUNC float __metal_tanpi(float x, int) { return ::tanf(x * M_PI_F); }
METAL_FUNC float __metal_fmax3(float a, float b, float c, int) { return metal::max(metal::max(a, b), c); }
METAL_FUNC float __metal_fmin3(float a, float b, float c, int) { return metal::min(metal::min(a, b), c); }
METAL_FUNC float __metal_fmedian3(float a, float b, float c, int) {
  return metal::max(metal::min(a, b), metal::min(metal::max(a, b), c)); }
METAL_FUNC float __metal_frexp(float x, int* e) { return ::frexpf(x, e); }
METAL_FUNC float __metal_ldexp(float x, int k, int) { return ::ldexpf(x, k); }
METAL_FUNC float __metal_nextafter(float x, float y) { return ::nextafterf(x, y); }
METAL_FUNC float __metal_sincos(float x, float& c, int) { c = ::cosf(x); return ::sinf(x); }
METAL_FUNC float __metal_modf(float x, float* whole, int) { *whole = __builtin_truncf(x); return x - *whole; }
METAL_FUNC int __metal_ilogb(float x) { return __builtin_ilogbf(x); }
METAL_FUNC float __metal_copysign(float x, float y) { return __builtin_copysignf(x, y); }
METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return 32; }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) { return (ushort)metal::emu_lane(); }
#define EMU_BUILTIN_SHUFFLE(name) \
  template <class T> METAL_FUNC T __metal_simd_##name(T x, ushort n) { return metal::simd_##name(x, n); }
EMU_BUILTIN_SHUFFLE(broadcast) EMU_BUILTIN_SHUFFLE(shuffle) EMU_BUILTIN_SHUFFLE(shuffle_down) EMU_BUILTIN_SHUFFLE(shuffle_up)
EMU_BUILTIN_SHUFFLE(shuffle_rotate_down) EMU_BUILTIN_SHUFFLE(shuffle_rotate_up) EMU_BUILTIN_SHUFFLE(shuffle_xor)
template <class T> METAL_FUNC T __metal_simd_shuffle_and_fill_down(T x, T fill, ushort n, ushort) {
  return metal::simd_shuffle_and_fill_down(x, fill, n); }
template <class T> METAL_FUNC T __metal_simd_shuffle_and_fill_up(T x, T fill, ushort n, ushort) {
  return metal::simd_shuffle_and_fill_up(x, fill, n); }
#define EMU_BUILTIN_REDUCE(name) METAL_FUNC float __metal_simd_##name(float x) { return metal::simd_##name(x); }
EMU_BUILTIN_REDUCE(max) EMU_BUILTIN_REDUCE(min) EMU_BUILTIN_REDUCE(product) EMU_BUILTIN_REDUCE(sum)
EMU_BUILTIN_REDUCE(prefix_exclusive_product) EMU_BUILTIN_REDUCE(prefix_exclusive_sum)
EMU_BUILTIN_REDUCE(prefix_inclusive_product) EMU_BUILTIN_REDUCE(prefix_inclusive_sum)
METAL_FUNC float __metal_simd_xor(float x) { return x; }
