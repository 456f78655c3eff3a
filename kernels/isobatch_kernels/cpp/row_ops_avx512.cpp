// Row operations for AVX-512 (F, BW, DQ, VL); absent where the file is compiled without them.
#include "row_ops.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ISOBATCH_UNIT avx512
#define ISOBATCH_SIMD_HEADER "simd_avx512.h"
#include "row_ops_unit.h"

namespace isobatch {

const RowOps* avx512_row_ops() {
  static constexpr RowOps table = avx512::row_ops_table("avx512");
  return &table;
}

}  // namespace isobatch
#else
namespace isobatch {
const RowOps* avx512_row_ops() { return nullptr; }
}  // namespace isobatch
#endif
