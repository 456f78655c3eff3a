// Calls a kernel function with arguments found by the harness: buffers by index, thread attributes by number.
#pragma once

struct emu_parameter { bool is_buffer; int index; };

// Numbers of thread attributes, in the order of ATTRIBUTES in harness/signature.py.
METAL_FUNC const uint* emu_attribute(int index) {
  static const uint width[3] = {32, 1, 1};
  const emu_thread* t = emu_current;
  const uint* table[] = {t->position_in_grid, t->position_in_group, t->group_position, t->group_size, t->groups_per_grid,
                         t->grid_size, t->full_group_size, &t->index_in_group, &t->lane, &t->simdgroup, &t->simdgroups, width};
  return table[index];
}
template <class A>
METAL_FUNC A emu_argument(emu_parameter p, void* const* buffers) {
  if constexpr (__is_pointer(A)) return (A)buffers[p.index];
  else if constexpr (__is_lvalue_reference(A)) return *(__remove_reference_t(A)*)buffers[p.index];
  else {
    using E = __remove_cv(A);
    const uint* from = emu_attribute(p.index);
    if constexpr (metal::emu_is_vector<E>) { E r; for (int i = 0; i < metal::emu_shape<E>::count; i++) r[i] = from[i]; return r; }
    else return (E)from[0];
  }
}
template <int... I> struct emu_indices {};
template <class, int... I> using emu_indices_of = emu_indices<I...>;
template <class... A, int... I>
METAL_FUNC void emu_call_with(void (*function)(A...), const emu_parameter* p, void* const* buffers, emu_indices<I...>) {
  function(emu_argument<A>(p[I], buffers)...);
}
template <class... A>
METAL_FUNC void emu_call(void (*function)(A...), const emu_parameter* p, void* const* buffers) {
  emu_call_with(function, p, buffers, __make_integer_seq<emu_indices_of, int, sizeof...(A)>{});
}
