// Portable row operations.
#define ISOBATCH_UNIT scalar
#define ISOBATCH_SIMD_HEADER "simd_scalar.h"
#include "row_ops_unit.h"

namespace isobatch {

const RowOps* scalar_row_ops() {
  static constexpr RowOps table = scalar::row_ops_table("scalar");
  return &table;
}

}  // namespace isobatch
