// cos and sin for rotary embeddings, in fp64 from basic operations only, rounded to fp32 (docs/numerics.md section 4).
#pragma once
#include <cstdint>

namespace isobatch {

// table: (positions, rotary_dim/2, 2). inverse frequency i = base^(-2i/rotary_dim) / factors[i] (factors may be null),
// times position_scale (1 for none). Positions below 2^24.
void build_rope_table(float* table, int positions, int rotary_dim, double base, const float* factors, double position_scale);

// The same before rounding and floor, for positions first .. first + count - 1; within 1e-15 of the true values (tests).
void build_rope_rows(double* rows, int first, int count, int rotary_dim, double base, const float* factors, double position_scale);

}  // namespace isobatch
