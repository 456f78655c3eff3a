// 8x8 simdgroup matrices. Lane l holds two neighbouring elements of one row: row (l/16)*4 + (l/2)%4, columns
// ((l/8)%2)*4 + (l%2)*2 and the next; MLX's own kernels rely on the same layout through thread_elements().
#pragma once

#ifndef EMU_CHECK
#define EMU_CHECK 0
#endif

namespace metal {
constexpr int emu_matrix_row(int lane) { return lane / 16 * 4 + lane / 2 % 4; }
constexpr int emu_matrix_column(int lane) { return lane / 8 % 2 * 4 + lane % 2 * 2; }

template <class T, int Columns = 8, int Rows = Columns>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "8x8 only");
  vec<T, 2> elements;
  simdgroup_matrix() { __builtin_memset((void*)&elements, 0xFF, sizeof elements); }
  explicit simdgroup_matrix(T diagonal) {
    int off = emu_matrix_row(emu_lane()) - emu_matrix_column(emu_lane());
    for (int i = 0; i < 2; i++) elements[i] = off == i ? diagonal : T(0);
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int C, int R>
METAL_FUNC simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, C, R> m;
  m.elements[0] = v;
  m.elements[1] = v;
  return m;
}
template <class T, class P, class Visit>
METAL_FUNC void emu_matrix_visit(P* base, ulong stride, ulong2 origin, bool transpose, int line, Visit visit) {
  static_assert(__is_same(T, __remove_cv(P)), "matrix and memory must have one element type");
  int row = emu_matrix_row(emu_lane()), column = emu_matrix_column(emu_lane());
  for (int i = 0; i < 2; i++) {
    ulong y = origin.y + (transpose ? column + i : row), x = origin.x + (transpose ? row : column + i);
    visit(i, base[y * stride + x]);
  }
  if (EMU_CHECK) emu_simdgroup_barrier(-1, line);  // collective: every lane has to come here
}
template <class T, int C, int R, class P>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, C, R>& m, const P* from, ulong stride = C, ulong2 origin = ulong2{0, 0},
                               bool transpose = false, int line = __builtin_LINE()) {
  emu_matrix_visit<T>(from, stride, origin, transpose, line, [&](int i, const P& x) { m.elements[i] = x; });
}
template <class T, int C, int R, class P>
METAL_FUNC void simdgroup_store(const simdgroup_matrix<T, C, R>& m, P* to, ulong stride = C, ulong2 origin = ulong2{0, 0},
                                bool transpose = false, int line = __builtin_LINE()) {
  emu_matrix_visit<T>(to, stride, origin, transpose, line, [&](int i, P& x) { x = m.elements[i]; });
}

// The order of the eight products and the addend inside the unit is unknown, so it follows emu_sum_order too.
struct emu_product { float a[2], b[2], c[2]; };
typedef float emu_row __attribute__((ext_vector_type(8)));
inline void emu_matrix_multiply(char* slots, unsigned, int, long order) {
  float a[8][8], b[8][8], c[8][8];
  for (int l = 0; l < 32; l++) {
    auto& s = emu_slot<emu_product>(slots, l);
    int r = emu_matrix_row(l), k = emu_matrix_column(l);
    for (int i = 0; i < 2; i++) { a[r][k + i] = s.a[i]; b[r][k + i] = s.b[i]; c[r][k + i] = s.c[i]; }
  }
  emu_row rows[8];
  for (int k = 0; k < 8; k++) __builtin_memcpy(&rows[k], b[k], sizeof rows[k]);
  for (int r = 0; r < 8; r++) {
    emu_row sum;
    __builtin_memcpy(&sum, c[r], sizeof sum);
    auto step = [&](int k, emu_row to) { return __builtin_elementwise_fma((emu_row)a[r][k], rows[k], to); };
    if (order == 1) for (int k = 7; k >= 0; k--) sum = step(k, sum);
    else if (order == 2) { emu_row t = (emu_row)0.0f; for (int k = 0; k < 8; k++) t = step(k, t); sum = sum + t; }
    else if (order == 3) {
      emu_row even = sum, odd = (emu_row)0.0f;
      for (int k = 0; k < 8; k += 2) { even = step(k, even); odd = step(k + 1, odd); }
      sum = even + odd;
    } else for (int k = 0; k < 8; k++) sum = step(k, sum);
    __builtin_memcpy(c[r], &sum, sizeof sum);
  }
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 2; i++) emu_slot<emu_product>(slots, l).c[i] = c[emu_matrix_row(l)][emu_matrix_column(l) + i];
}
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                              int line = __builtin_LINE()) {
  auto& s = emu_own_slot<emu_product>();
  for (int i = 0; i < 2; i++) { s.a[i] = (float)a.elements[i]; s.b[i] = (float)b.elements[i]; s.c[i] = (float)c.elements[i]; }
  emu_simdgroup_op(&emu_matrix_multiply, emu_sum_order, line);
  auto& done = emu_own_slot<emu_product>();
  for (int i = 0; i < 2; i++) d.elements[i] = (D)done.c[i];
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b, int line = __builtin_LINE()) {
  simdgroup_matrix<float, 8, 8> zero = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_multiply_accumulate(d, a, b, zero, line);
}
}  // namespace metal
