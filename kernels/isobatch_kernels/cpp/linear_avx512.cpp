// AVX-512 VNNI for activations of 12 bits, and the table of this instruction set.
#include "linear.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "dense_impl.h"
#include "linear_avx512_impl.h"

namespace isobatch {

const LinearOps* avx512_linear_ops() {
  static const LinearOps ops{"vnni", ActFormat::kHalves, ActFormat::kBytes, quantized<false>, avx512_short_quantized(), dense_tiles};
  return &ops;
}

}  // namespace isobatch
#else
namespace isobatch {
const LinearOps* avx512_linear_ops() { return nullptr; }
}  // namespace isobatch
#endif
