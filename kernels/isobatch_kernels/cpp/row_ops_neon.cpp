// Row operations for NEON of aarch64; absent on other processors.
#include "row_ops.h"

#if defined(__aarch64__)
#define ISOBATCH_UNIT neon
#define ISOBATCH_SIMD_HEADER "simd_neon.h"
#include "row_ops_unit.h"

namespace isobatch {

const RowOps* neon_row_ops() {
  static constexpr RowOps table = neon::row_ops_table("neon");
  return &table;
}

}  // namespace isobatch
#else
namespace isobatch {
const RowOps* neon_row_ops() { return nullptr; }
}  // namespace isobatch
#endif
