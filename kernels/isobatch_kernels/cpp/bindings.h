// Pieces of the Python module `_cpu`.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "contract.h"
#include "weights.h"

namespace isobatch {

namespace nb = nanobind;

template <class T, int N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using AnyMatrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Borrows a matrix in MLX's packed layout; scales and biases are float16 or float32.
inline QuantizedSource quantized_source(const In<uint32_t, 2>& packed, const AnyMatrix& scales,
                                        const std::optional<AnyMatrix>& biases, int bits, int group) {
  check_format(bits, group);
  const bool half = scales.itemsize() == 2;
  QuantizedSource s{(int)packed.shape(0), (int)(packed.shape(1) * 32 / bits), bits, group, packed.data(), half, scales.data(), nullptr};
  const auto fits = [&](const AnyMatrix& m) {
    return m.dtype().code == (uint8_t)nb::dlpack::dtype_code::Float && (m.itemsize() == 2 || m.itemsize() == 4) &&
           m.itemsize() == scales.itemsize() && (int)m.shape(0) == s.N && (int)m.shape(1) == s.K / group;
  };
  if (!fits(scales) || (biases && !fits(*biases))) {
    throw std::invalid_argument("[weights] scales and biases must be float16 or float32 of shape (N, K/group_size)");
  }
  if (biases) s.biases = biases->data();
  return s;
}

// The largest block integer of activations of 12 or 8 bits.
inline int activation_limit(int bits) {
  if (bits != 12 && bits != 8) throw std::invalid_argument("[activations] bits must be 12 or 8, got " + std::to_string(bits));
  return bits == 8 ? kShortActivationMax : kActivationMax;
}

void bind_engine(nb::module_& module);
void bind_float(nb::module_& module);
void bind_linear(nb::module_& module);
void bind_reference(nb::module_& module);

}  // namespace isobatch
