// Linear layers alone, for the self-test, tests and benchmarks.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "bindings.h"
#include "cpu_features.h"
#include "engine.h"

namespace isobatch {
namespace {

// One layer with its own activation buffers, on one thread.
class LinearLayer {
 public:
  LinearLayer(const std::string& unit, int activation_block, int limit)
      : unit_(find_unit(unit)), block_(activation_block), limit_(limit), pool_(1) {
    if (!unit_.available()) throw std::invalid_argument("[linear] unit must be one that this processor and build have, got " + unit);
  }

  void set_quantized(const QuantizedSource& source) {
    quantized_ = pack_quantized({source}, std::min(source.group, block_), unit_.linears == reference_linear_ops(), arena_, pool_);
  }
  void set_dense(const DenseSource& source) { dense_ = pack_dense({source}, unit_.linears == reference_linear_ops(), arena_); }

  int inputs() const { return quantized_ ? quantized_->view.K : dense_->view.K; }
  int outputs() const { return quantized_ ? quantized_->view.N : dense_->view.N; }

  // y (M, N) for x (M, K). finite: one flag a row.
  void forward(const float* x, int M, const float* bias, const float* residual, bool flush, float* y, bool* finite) {
    ScopedFloatMode mode(flush);
    const LinearOutput out{y, (size_t)outputs(), bias, residual, (size_t)outputs(), false};
    if (dense_) {
      const DenseView& w = dense_->view;
      std::vector<float> scaled((size_t)M * w.K), powers(M);
      for (int m = 0; m < M; m++) finite[m] = prepare_dense_row(x + (size_t)m * w.K, w.K, w.bfloat, &scaled[(size_t)m * w.K], &powers[m]);
      unit_.linears->dense(w, w.plain ? x : scaled.data(), powers.data(), M, out, 0, w.tiles);
      return;
    }
    const PackedView& w = quantized_->view;
    activations_.width = w.K;
    activations_.block = block_;
    activations_.half_sums = w.b < block_;
    activations_.ensure(M, unit_.linears->panel(M));
    std::vector<uint32_t> flags(M, 0);
    ActView v{w.K, block_, (w.K + block_ - 1) / block_, M, unit_.linears->panel(M), limit_, unit_.linears->format_of(limit_),
              activations_.half_sums,
              activations_.values.as<uint8_t>(), activations_.d.as<float>(), activations_.s.as<float>(),
              activations_.s_low.as<float>(), activations_.s_high.as<float>(), flags.data(), 0};
    for (int m = 0; m < M; m++) unit_.rows->quantize(x + (size_t)m * w.K, v, m);
    for (int m = 0; m < M; m++) finite[m] = flags[m] == 0;
    unit_.linears->quantized_of(limit_)(w, v, out, 0, w.tiles);
  }

  void embed(int id, float* x) const {
    if (quantized_) embed_quantized(quantized_->view, id, x);
    else embed_dense(dense_->view, id, x);
  }

 private:
  Unit unit_;
  int block_, limit_;
  ThreadPool pool_;
  Arena arena_;
  std::unique_ptr<QuantizedWeight> quantized_;
  std::unique_ptr<DenseMatrix> dense_;
  Buffer activations_;
};

void check_shape(bool ok, const char* rule) {
  if (!ok) throw std::invalid_argument(std::string("[linear] ") + rule);
}

}  // namespace

void bind_linear(nb::module_& module) {
  nb::class_<LinearLayer>(module, "LinearLayer", "One linear layer on one thread: quantises its rows, then multiplies.")
      .def_static("quantized",
           [](const std::string& unit, In<uint32_t, 2> packed, AnyMatrix scales, std::optional<AnyMatrix> biases, int bits,
              int group_size, int activation_block, int activation_bits) {
             check_shape(activation_block == 32 || activation_block == 64, "activation_block must be 32 or 64");
             auto layer = std::make_unique<LinearLayer>(unit, activation_block, activation_limit(activation_bits));
             layer->set_quantized(quantized_source(packed, scales, biases, bits, group_size));
             return layer.release();
           },
           nb::rv_policy::take_ownership, nb::arg("unit"), nb::arg("packed"), nb::arg("scales"), nb::arg("biases").none(),
           nb::arg("bits"), nb::arg("group_size"), nb::arg("activation_block"), nb::arg("activation_bits") = 12)
      .def_static("dense",
           [](const std::string& unit, In<uint16_t, 2> values, bool bfloat) {
             auto layer = std::make_unique<LinearLayer>(unit, 32, kActivationMax);
             layer->set_dense({(int)values.shape(0), (int)values.shape(1), bfloat, values.data()});
             return layer.release();
           },
           nb::rv_policy::take_ownership, nb::arg("unit"), nb::arg("values"), nb::arg("bfloat"))
      .def("forward",
           [](LinearLayer& layer, In<float, 2> x, Out<float, 2> y, Out<bool, 1> finite, std::optional<In<float, 1>> bias,
              std::optional<In<float, 2>> residual, bool flush_subnormals) {
             const size_t M = x.shape(0), N = (size_t)layer.outputs();
             check_shape((int)x.shape(1) == layer.inputs(), "x must have the weight's number of inputs");
             check_shape(M >= 1 && y.shape(0) == M && y.shape(1) == N && finite.size() == M, "y must be (rows, outputs)");
             check_shape(!bias || bias->size() == N, "bias must have one value an output");
             check_shape(!residual || (residual->shape(0) == M && residual->shape(1) == N), "residual must be like y");
             layer.forward(x.data(), (int)M, bias ? bias->data() : nullptr, residual ? residual->data() : nullptr,
                           flush_subnormals, y.data(), finite.data());
           },
           nb::arg("x"), nb::arg("y"), nb::arg("finite"), nb::arg("bias").none() = nb::none(),
           nb::arg("residual").none() = nb::none(), nb::arg("flush_subnormals") = false)
      .def("embed",
           [](const LinearLayer& layer, int id, Out<float, 1> x) {
             check_shape(id >= 0 && id < layer.outputs() && (int)x.size() == layer.inputs(), "id and x must fit the weight");
             layer.embed(id, x.data());
           },
           nb::arg("id"), nb::arg("x"));
}

}  // namespace isobatch
