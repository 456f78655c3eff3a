// Atomics with relaxed order. Fibers of one OS thread make them trivially atomic.
#pragma once

namespace metal {
enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
template <class T> METAL_FUNC T atomic_load_explicit(const atomic<T>* p, memory_order) {
  T r; __atomic_load((T*)&p->value, &r, 0); return r; }
template <class T> METAL_FUNC void atomic_store_explicit(atomic<T>* p, T x, memory_order) { __atomic_store(&p->value, &x, 0); }
template <class T> METAL_FUNC bool atomic_compare_exchange_weak_explicit(atomic<T>* p, T* e, T x, memory_order, memory_order) {
  return __atomic_compare_exchange(&p->value, e, &x, false, 0, 0); }
#define EMU_FETCH(name, value_expression)                                                     \
  template <class T> METAL_FUNC T atomic_fetch_##name##_explicit(atomic<T>* p, T x, memory_order) { \
    T old; __atomic_load(&p->value, &old, 0);                                                 \
    for (;;) { T next = value_expression; if (__atomic_compare_exchange(&p->value, &old, &next, false, 0, 0)) return old; } }
EMU_FETCH(add, (T)(old + x)) EMU_FETCH(sub, (T)(old - x)) EMU_FETCH(or, (T)(old | x)) EMU_FETCH(and, (T)(old & x))
EMU_FETCH(max, metal::max(old, x)) EMU_FETCH(min, metal::min(old, x))
#undef EMU_FETCH
}  // namespace metal
