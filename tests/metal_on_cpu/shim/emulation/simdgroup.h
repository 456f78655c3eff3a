// Simdgroup and quad operations of 32 lanes. Each one meets all live lanes at one source line; the runtime reports
// lanes that come elsewhere. The order of a floating-point reduction is not documented by Apple, so four are offered
// (emu_sum_order): 0 halving, 1 ascending, 2 descending, 3 neighbouring pairs.
#pragma once

namespace metal {
#define EMU_LINE int line = __builtin_LINE()
template <class T> METAL_FUNC T& emu_slot(char* slots, int lane) { return *(T*)(slots + emu_slot_bytes * lane); }
template <class T> METAL_FUNC T& emu_own_slot() { return emu_slot<T>(emu_current->slots, emu_lane()); }

struct emu_add { template <class T> static T of(T a, T b) { return a + b; } };
struct emu_multiply { template <class T> static T of(T a, T b) { return a * b; } };
struct emu_max { template <class T> static T of(T a, T b) { return metal::max(a, b); } };
struct emu_min { template <class T> static T of(T a, T b) { return metal::min(a, b); } };
struct emu_and { template <class T> static T of(T a, T b) { return a & b; } };
struct emu_or { template <class T> static T of(T a, T b) { return a | b; } };
struct emu_xor { template <class T> static T of(T a, T b) { return a ^ b; } };

template <class T, class Op>
T emu_fold(T* v, int count, long order) {
  if (order == 1) { T r = v[0]; for (int i = 1; i < count; i++) r = Op::of(r, v[i]); return r; }
  if (order == 2) { T r = v[count - 1]; for (int i = count - 2; i >= 0; i--) r = Op::of(r, v[i]); return r; }
  while (count > 1) {
    int up = (count + 1) / 2;
    if (order == 3) for (int i = 0; i < up; i++) v[i] = 2 * i + 1 < count ? Op::of(v[2 * i], v[2 * i + 1]) : v[2 * i];
    else for (int i = 0; i + up < count; i++) v[i] = Op::of(v[i], v[i + up]);
    count = up;
  }
  return v[0];
}
template <class T, class Op, int Width>
void emu_reduce(char* slots, unsigned mask, int lanes, long order) {
  for (int base = 0; base < lanes; base += Width) {
    T v[Width];
    int count = 0;
    for (int i = base; i < base + Width && i < lanes; i++) if (mask >> i & 1) v[count++] = emu_slot<T>(slots, i);
    if (!count) continue;
    T r = emu_fold<T, Op>(v, count, order);
    for (int i = base; i < base + Width && i < lanes; i++) emu_slot<T>(slots, i) = r;
  }
}
template <class T, class Op, bool Inclusive>
void emu_scan(char* slots, unsigned mask, int lanes, long) {
  bool started = false;
  T sum{};
  for (int i = 0; i < lanes; i++) {
    if (!(mask >> i & 1)) continue;
    T x = emu_slot<T>(slots, i), next = started ? Op::of(sum, x) : x;
    T before = started ? sum : (__is_same(Op, emu_multiply) ? T(1) : T(0));
    emu_slot<T>(slots, i) = Inclusive ? next : before;
    sum = next;
    started = true;
  }
}
// A lane asks for the value of lane `from`; one that does not exist or has returned gives a poison pattern, because
// Metal leaves it undefined. With `filled`, sources below 0 or above 31 come from the fill operand instead.
template <class T> struct emu_exchange { T value, fill; int from; bool filled; };
template <class T>
void emu_gather(char* slots, unsigned mask, int lanes, long) {
  T values[32], fills[32];
  for (int i = 0; i < lanes; i++) { auto& s = emu_slot<emu_exchange<T>>(slots, i); values[i] = s.value; fills[i] = s.fill; }
  for (int i = 0; i < lanes; i++) {
    auto& s = emu_slot<emu_exchange<T>>(slots, i);
    if (s.from >= 0 && s.from < lanes && (mask >> s.from & 1)) s.value = values[s.from];
    else if (s.filled) s.value = fills[(s.from + 32) & 31];
    else __builtin_memset((void*)&s.value, 0xEB, sizeof(T));
  }
}
template <class T>
METAL_FUNC T emu_take(T x, int from, int line, bool filled = false, T fill = T()) {
  static_assert(sizeof(emu_exchange<T>) <= emu_slot_bytes, "value too large for an exchange slot");
  auto& s = emu_own_slot<emu_exchange<T>>();
  s.value = x; s.fill = fill; s.from = from; s.filled = filled;
  emu_simdgroup_op(&emu_gather<T>, sizeof(T), line);
  return emu_own_slot<emu_exchange<T>>().value;
}
template <class T>
METAL_FUNC T emu_combined(T x, emu_combine combine, long argument, int line) {
  emu_own_slot<T>() = x;
  emu_simdgroup_op(combine, argument, line);
  return emu_own_slot<T>();
}

// bfloat goes through MLX's own overloads, as on a Mac.
#define EMU_SIMD template <class T, enable_if_t<!__is_same(T, bfloat), int> = 0> METAL_FUNC
#define EMU_REDUCTION(name, Op)                                                                                       \
  EMU_SIMD T simd_##name(T x, EMU_LINE) { return emu_combined<T>(x, &emu_reduce<T, Op, 32>, emu_sum_order, line); }   \
  EMU_SIMD T quad_##name(T x, EMU_LINE) { return emu_combined<T>(x, &emu_reduce<T, Op, 4>, emu_sum_order, line); }
EMU_REDUCTION(sum, emu_add) EMU_REDUCTION(product, emu_multiply) EMU_REDUCTION(max, emu_max) EMU_REDUCTION(min, emu_min)
EMU_REDUCTION(and, emu_and) EMU_REDUCTION(or, emu_or) EMU_REDUCTION(xor, emu_xor)
#define EMU_SCAN(name, Op, inclusive) \
  EMU_SIMD T simd_prefix_##name(T x, EMU_LINE) { return emu_combined<T>(x, &emu_scan<T, Op, inclusive>, 0, line); }
EMU_SCAN(inclusive_sum, emu_add, true) EMU_SCAN(exclusive_sum, emu_add, false)
EMU_SCAN(inclusive_product, emu_multiply, true) EMU_SCAN(exclusive_product, emu_multiply, false)
EMU_SIMD T simd_broadcast(T x, ushort lane, EMU_LINE) { return emu_take<T>(x, lane, line); }
EMU_SIMD T simd_broadcast_first(T x, EMU_LINE) { return emu_take<T>(x, 0, line); }
EMU_SIMD T simd_shuffle(T x, ushort lane, EMU_LINE) { return emu_take<T>(x, lane, line); }
EMU_SIMD T simd_shuffle_xor(T x, ushort mask, EMU_LINE) { return emu_take<T>(x, emu_lane() ^ mask, line); }
EMU_SIMD T simd_shuffle_down(T x, ushort d, EMU_LINE) { return emu_take<T>(x, emu_lane() + d, line); }
EMU_SIMD T simd_shuffle_up(T x, ushort d, EMU_LINE) { return emu_take<T>(x, emu_lane() - d, line); }
EMU_SIMD T simd_shuffle_rotate_down(T x, ushort d, EMU_LINE) { return emu_take<T>(x, (emu_lane() + d) & 31, line); }
EMU_SIMD T simd_shuffle_rotate_up(T x, ushort d, EMU_LINE) { return emu_take<T>(x, (emu_lane() - d) & 31, line); }
EMU_SIMD T simd_shuffle_and_fill_down(T x, T fill, ushort d, EMU_LINE) { return emu_take<T>(x, emu_lane() + d, line, true, fill); }
EMU_SIMD T simd_shuffle_and_fill_up(T x, T fill, ushort d, EMU_LINE) { return emu_take<T>(x, emu_lane() - d, line, true, fill); }
EMU_SIMD T quad_broadcast(T x, ushort lane, EMU_LINE) { return emu_take<T>(x, (emu_lane() & ~3) + lane, line); }
EMU_SIMD T quad_shuffle_xor(T x, ushort mask, EMU_LINE) { return emu_take<T>(x, emu_lane() ^ mask, line); }
METAL_FUNC bool simd_all(bool b, EMU_LINE) { return simd_and((uint)b, line); }
METAL_FUNC bool simd_any(bool b, EMU_LINE) { return simd_or((uint)b, line); }
METAL_FUNC bool simd_is_first() { return emu_lane() == 0; }
}  // namespace metal
