// Scalar and vector types, address spaces as words without meaning, and a few limits.
#pragma once

#define __METAL__ 1
#define __METAL_VERSION__ 320
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0
#define __METAL_MAYBE_FAST_MATH__ 0
#define METAL_FUNC inline __attribute__((always_inline))

using size_t = decltype(sizeof(0));
using ptrdiff_t = decltype((char*)nullptr - (char*)nullptr);
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = uchar;
using uint16_t = ushort;
using uint32_t = uint;
using uint64_t = ulong;
using half = _Float16;
using bfloat = __bf16;

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// Packed vectors: storage without alignment.
template <class T, int N>
struct packed_vec {
  T items[N];
  packed_vec() = default;
  packed_vec(vec<T, N> v) { for (int i = 0; i < N; i++) items[i] = v[i]; }
  operator vec<T, N>() const { vec<T, N> v; for (int i = 0; i < N; i++) v[i] = items[i]; return v; }
  T& operator[](int i) { return items[i]; }
  const T& operator[](int i) const { return items[i]; }
};
}  // namespace metal

#define EMU_VECTOR_NAMES(T)                                  \
  using T##2 = metal::vec<T, 2>;                             \
  using T##3 = metal::vec<T, 3>;                             \
  using T##4 = metal::vec<T, 4>;                             \
  using packed_##T##2 = metal::packed_vec<T, 2>;             \
  using packed_##T##3 = metal::packed_vec<T, 3>;             \
  using packed_##T##4 = metal::packed_vec<T, 4>;
EMU_VECTOR_NAMES(char) EMU_VECTOR_NAMES(uchar) EMU_VECTOR_NAMES(short) EMU_VECTOR_NAMES(ushort)
EMU_VECTOR_NAMES(int) EMU_VECTOR_NAMES(uint) EMU_VECTOR_NAMES(long) EMU_VECTOR_NAMES(ulong)
EMU_VECTOR_NAMES(float) EMU_VECTOR_NAMES(half) EMU_VECTOR_NAMES(bfloat) EMU_VECTOR_NAMES(bool)
#undef EMU_VECTOR_NAMES

// Address spaces. Declarations of threadgroup variables are rewritten before the compiler sees them; what is left of
// the word qualifies pointers.
#define device
#define thread
#define threadgroup
#define constant const
#define kernel

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define MAXFLOAT 3.40282346638528859812e+38f
#define FLT_MAX 3.40282346638528859812e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-07f
#define HALF_MAX ((half)65504.0f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_SQRT2_F 1.41421356237309504880f
#define M_1_PI_F 0.31830988618379067154f
