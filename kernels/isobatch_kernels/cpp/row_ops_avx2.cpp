// Row operations for AVX2, FMA and F16C; absent where the file is compiled without them.
#include "row_ops.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ISOBATCH_UNIT avx2
#define ISOBATCH_SIMD_HEADER "simd_avx2.h"
#include "row_ops_unit.h"

namespace isobatch {

const RowOps* avx2_row_ops() {
  static constexpr RowOps table = avx2::row_ops_table("avx2");
  return &table;
}

}  // namespace isobatch
#else
namespace isobatch {
const RowOps* avx2_row_ops() { return nullptr; }
}  // namespace isobatch
#endif
