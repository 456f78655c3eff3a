// AVX-512 VNNI for activations of 8 bits.
#include "linear.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "linear_avx512_impl.h"

namespace isobatch {
QuantizedFn avx512_short_quantized() { return quantized<true>; }
}  // namespace isobatch
#else
namespace isobatch {
QuantizedFn avx512_short_quantized() { return nullptr; }
}  // namespace isobatch
#endif
