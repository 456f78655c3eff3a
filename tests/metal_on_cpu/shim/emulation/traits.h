// The part of <metal_type_traits> and <metal_limits> that kernels use.
#pragma once

namespace metal {
template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class T> using remove_cv_t = __remove_cv(T);
template <class T> struct remove_cv { using type = __remove_cv(T); };
template <class T> using remove_const_t = __remove_const(T);
template <class T> using remove_reference_t = __remove_reference_t(T);
template <class T> using remove_addrspace_t = T;
template <class T> using decay_t = __decay(T);
template <class A, class B> constexpr bool is_same_v = __is_same(A, B);
template <class A, class B> struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B> constexpr bool is_convertible_v = __is_convertible(A, B);
template <class A, class B> struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class T> constexpr bool is_integral_v = __is_integral(T);
template <class T> struct is_integral : bool_constant<__is_integral(T)> {};
template <class T> constexpr bool is_floating_point_v =
    __is_same(__remove_cv(T), float) || __is_same(__remove_cv(T), half) || __is_same(__remove_cv(T), bfloat);
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T> constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T> struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <class T> constexpr bool is_signed_v = __is_signed(T) || is_floating_point_v<T>;
template <class T> constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T> struct make_unsigned { using type = __make_unsigned(T); };
template <class T> using make_unsigned_t = __make_unsigned(T);
template <class T> constexpr bool is_pointer_v = __is_pointer(T);
template <class T> T&& declval();

// Element type and count of a scalar or vector.
template <class T> struct emu_shape { using element = T; static constexpr int count = 1; };
template <class T, int N>
struct emu_shape<T __attribute__((ext_vector_type(N)))> { using element = T; static constexpr int count = N; };
template <class T> constexpr bool emu_is_vector = (emu_shape<T>::count > 1);

template <class T> struct numeric_limits;
#define EMU_INTEGER_LIMITS(T, lo, hi)                                                                   \
  template <> struct numeric_limits<T> {                                                                \
    static constexpr bool is_integer = true;                                                            \
    static constexpr T min() { return lo; } static constexpr T lowest() { return lo; }                  \
    static constexpr T max() { return hi; } static constexpr T infinity() { return 0; }                 \
  };
EMU_INTEGER_LIMITS(bool, false, true)
EMU_INTEGER_LIMITS(char, -128, 127) EMU_INTEGER_LIMITS(signed char, -128, 127) EMU_INTEGER_LIMITS(uchar, 0, 255)
EMU_INTEGER_LIMITS(short, -32768, 32767) EMU_INTEGER_LIMITS(ushort, 0, 65535)
EMU_INTEGER_LIMITS(int, INT_MIN, INT_MAX) EMU_INTEGER_LIMITS(uint, 0, UINT_MAX)
EMU_INTEGER_LIMITS(long, -9223372036854775807L - 1, 9223372036854775807L)
EMU_INTEGER_LIMITS(ulong, 0, 18446744073709551615ul)
#undef EMU_INTEGER_LIMITS
#define EMU_FLOAT_LIMITS(T, smallest, largest, eps)                                                     \
  template <> struct numeric_limits<T> {                                                                \
    static constexpr bool is_integer = false;                                                           \
    static constexpr T min() { return (T)smallest; } static constexpr T max() { return (T)largest; }    \
    static constexpr T lowest() { return (T)-largest; } static constexpr T epsilon() { return (T)eps; } \
    static constexpr T infinity() { return (T)__builtin_inff(); }                                       \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }                                    \
  };
EMU_FLOAT_LIMITS(float, FLT_MIN, FLT_MAX, FLT_EPSILON)
EMU_FLOAT_LIMITS(half, 6.103515625e-05f, 65504.0f, 0.0009765625f)
EMU_FLOAT_LIMITS(bfloat, FLT_MIN, 3.3895313892515355e38f, 0.0078125f)
#undef EMU_FLOAT_LIMITS

template <class To, class From>
METAL_FUNC constexpr To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return __builtin_bit_cast(To, x);
}

// Constructors of vectors: any mix of scalars and vectors, element count exact; or one scalar for all.
template <class T, int N, class A>
METAL_FUNC constexpr void emu_append(vec<T, N>& out, int& at, A a) {
  if constexpr (emu_is_vector<A>) for (int i = 0; i < emu_shape<A>::count; i++) out[at++] = (T)a[i];
  else out[at++] = (T)a;
}
template <class V, class... A>
METAL_FUNC constexpr V emu_construct(A... a) {
  using T = typename emu_shape<V>::element;
  constexpr int N = emu_shape<V>::count;
  if constexpr (N == 1) { return V(a...); }
  else if constexpr (sizeof...(A) == 1 && ((emu_shape<A>::count == 1) && ...)) { return (V((T)a), ...); }
  else {
    static_assert((emu_shape<A>::count + ... + 0) == (sizeof...(A) ? N : 0), "vector constructor: element count");
    V out{};
    int at = 0;
    (emu_append<T, N>(out, at, a), ...);
    return out;
  }
}

template <class T> struct uniform { T value; operator T() const { return value; } };
template <class T> METAL_FUNC T make_uniform(T x) { return x; }
template <class T, size_t N>
struct array {
  T items[N];
  T& operator[](size_t i) { return items[i]; }
  const T& operator[](size_t i) const { return items[i]; }
};
struct os_log {
  constexpr os_log(const char*, const char*) {}
  template <class... A> void log_debug(const char*, A...) const {}
};
}  // namespace metal
using metal::as_type;
