// All row operations for one instruction set. The including file defines ISOBATCH_UNIT (the namespace) and
// ISOBATCH_SIMD_HEADER first, and is compiled for that instruction set. Everything lives in an anonymous namespace and no
// standard template is used: a shared inline symbol could reach a machine that lacks the instructions it was compiled with.
#include "row_ops.h"
#include ISOBATCH_SIMD_HEADER
#include "vector_math.h"
#include "row_ops_impl.h"
#include "attention_impl.h"
#include "rope_impl.h"
#include "top_k_impl.h"
#include "statistics_impl.h"

namespace isobatch::ISOBATCH_UNIT {
namespace {

constexpr RowOps row_ops_table(const char* name) {
  return {name,      quantize,  norm_quantize,    norm,            gate_quantize,   gate,      rope_query,
          write_kv,  attention, attention_tokens, attention_chunk, attention_merge, statistics};
}

}  // namespace
}  // namespace isobatch::ISOBATCH_UNIT
