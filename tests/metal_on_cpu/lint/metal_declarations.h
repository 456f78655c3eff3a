// Declarations only: Metal text parsed as C++ for OpenCL, whose address spaces clang checks. Nothing here runs.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define METAL_FUNC inline __attribute__((always_inline))
#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private
#define kernel
#define atomic_uint lint_atomic_uint  // OpenCL has types of these names
#define atomic_int lint_atomic_int
#define atomic_load_explicit lint_atomic_load
#define atomic_store_explicit lint_atomic_store
#define atomic_fetch_add_explicit lint_atomic_fetch_add
#define atomic_fetch_max_explicit lint_atomic_fetch_max
#define memory_order lint_memory_order
#define memory_order_relaxed lint_relaxed
#define MAXFLOAT 3.40282346638528859812e+38f
#define INFINITY (__builtin_inff())

typedef signed char int8_t;
typedef unsigned char uint8_t, uchar;
typedef short int16_t;
typedef unsigned short uint16_t, ushort;
typedef int int32_t;
typedef unsigned int uint32_t, uint;
typedef long int64_t;
typedef unsigned long uint64_t, ulong;
typedef __SIZE_TYPE__ size_t;
typedef half float16_t;
// No implicit conversion to bfloat exists.
struct bfloat {
  ushort bits;
  bfloat() = default;
  explicit bfloat(float);
  operator float() const;
  operator float() const device;
  operator float() const threadgroup;
};
typedef bfloat bfloat16_t;

namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <class To, class From> To as_type(From x) { return __builtin_bit_cast(To, x); }
template <class V, class... A> V lint_construct(A...);

#define LINT_1(name) float name(float); half name(half); template <class T, int N> vec<T, N> name(vec<T, N>);
#define LINT_2(name) float name(float, float); half name(half, half);
LINT_1(rint) LINT_1(fabs) LINT_1(floor) LINT_1(ceil)
namespace precise { LINT_1(exp) LINT_1(log) LINT_1(sqrt) LINT_1(rsqrt) LINT_1(sin) LINT_1(cos) }
namespace fast { LINT_1(exp) LINT_1(log) LINT_1(sqrt) LINT_1(rsqrt) LINT_1(sin) LINT_1(cos) }
#define LINT_ORDER(T) T min(T, T); T max(T, T); T clamp(T, T, T);
LINT_ORDER(float) LINT_ORDER(half) LINT_ORDER(int) LINT_ORDER(uint) LINT_ORDER(long) LINT_ORDER(ulong)
LINT_ORDER(short) LINT_ORDER(ushort)
float fma(float, float, float);
half fma(half, half, half);
int abs(int);

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
#define LINT_REDUCE(name) float simd_##name(float); half simd_##name(half); int simd_##name(int); uint simd_##name(uint);
LINT_REDUCE(sum) LINT_REDUCE(max) LINT_REDUCE(min) LINT_REDUCE(and) LINT_REDUCE(or) LINT_REDUCE(prefix_exclusive_sum)
#define LINT_SHUFFLE(name) float simd_##name(float, ushort); half simd_##name(half, ushort); int simd_##name(int, ushort); uint simd_##name(uint, ushort);
LINT_SHUFFLE(shuffle) LINT_SHUFFLE(shuffle_xor) LINT_SHUFFLE(shuffle_up) LINT_SHUFFLE(shuffle_down) LINT_SHUFFLE(broadcast)

template <class T, int C, int R> struct simdgroup_matrix {
  simdgroup_matrix();
  vec<T, 2>& thread_elements();
};
template <class T, int C, int R> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
#define LINT_MEMORY(SPACE)                                                                                                   \
  template <class T> void simdgroup_load(thread simdgroup_matrix<T, 8, 8>&, const SPACE T*, ulong, vec<ulong, 2> = 0, bool = false); \
  template <class T> void simdgroup_store(simdgroup_matrix<T, 8, 8>, SPACE T*, ulong, vec<ulong, 2> = 0, bool = false);
LINT_MEMORY(device) LINT_MEMORY(threadgroup)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>,
                                   simdgroup_matrix<C, 8, 8>);

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
using atomic_uint = atomic<uint>;
using atomic_int = atomic<int>;
#define LINT_ATOMIC(SPACE)                                                        \
  template <class T> T atomic_load_explicit(const SPACE atomic<T>*, memory_order); \
  template <class T> void atomic_store_explicit(SPACE atomic<T>*, T, memory_order); \
  template <class T> T atomic_fetch_add_explicit(SPACE atomic<T>*, T, memory_order); \
  template <class T> T atomic_fetch_max_explicit(SPACE atomic<T>*, T, memory_order);
LINT_ATOMIC(device) LINT_ATOMIC(threadgroup)
}  // namespace metal
using namespace metal;

#define LINT_VECTORS(T) typedef vec<T, 2> T##2; typedef vec<T, 3> T##3; typedef vec<T, 4> T##4;
LINT_VECTORS(short) LINT_VECTORS(ushort) LINT_VECTORS(int) LINT_VECTORS(uint) LINT_VECTORS(long) LINT_VECTORS(ulong)
LINT_VECTORS(float) LINT_VECTORS(half)
#define half2(...) (::metal::lint_construct<::metal::vec<half, 2>>(__VA_ARGS__))
#define half4(...) (::metal::lint_construct<::metal::vec<half, 4>>(__VA_ARGS__))
#define float2(...) (::metal::lint_construct<::metal::vec<float, 2>>(__VA_ARGS__))
#define float4(...) (::metal::lint_construct<::metal::vec<float, 4>>(__VA_ARGS__))
#define uint2(...) (::metal::lint_construct<::metal::vec<uint, 2>>(__VA_ARGS__))
#define uint4(...) (::metal::lint_construct<::metal::vec<uint, 4>>(__VA_ARGS__))
#define ulong2(...) (::metal::lint_construct<::metal::vec<ulong, 2>>(__VA_ARGS__))
