// Float linear layers alone, for tests and benchmarks.
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

void check(bool ok, const char* rule) {
  if (!ok) throw std::invalid_argument(std::string("[linear] ") + rule);
}

// One layer on one thread.
class FloatLayer {
 public:
  explicit FloatLayer(const std::string& unit) : ops_(find_unit(unit).floats), plain_(unit == "reference"), pool_(1) {
    if (!ops_) throw std::invalid_argument("[linear] unit must be one that this processor and build have, got " + unit);
  }
  void set_quantized(const QuantizedSource& source) {
    quantized_ = pack_quantized({source}, std::min(source.group, 64), plain_, arena_, pool_);
  }
  void set_dense(const DenseSource& source) { dense_ = pack_dense({source}, plain_, arena_); }
  int inputs() const { return quantized_ ? quantized_->view.K : dense_->view.K; }
  int outputs() const { return quantized_ ? quantized_->view.N : dense_->view.N; }

  // y (M, N) for x (M, K). finite: one flag a row.
  void forward(const float* x, int M, bool gemv, const float* bias, const float* residual, float* y, bool* finite) {
    ScopedFloatMode mode(false);
    const LinearOutput out{y, (size_t)outputs(), bias, residual, (size_t)outputs(), false};
    const int K = inputs();
    rows_.ensure((size_t)(M + kFloatPanel) * K * sizeof(float));
    sums_.ensure((size_t)(M + kFloatPanel) * (K / kSumInputs + 1) * sizeof(float));
    FloatRows rows{K, M, gemv ? 1 : float_panel_rows(M, ops_->panel_rows), rows_.as<float>(),
                   gemv && quantized_ ? sums_.as<float>() : nullptr};
    for (int m = 0; m < M; m++) finite[m] = ops_->prepare(x + (size_t)m * K, rows, m);
    if (quantized_) (gemv ? ops_->gemv : ops_->gemm)(quantized_->view, rows, out, 0, quantized_->view.tiles);
    else (gemv ? ops_->dense_gemv : ops_->dense_gemm)(dense_->view, rows, out, 0, dense_->view.tiles);
  }

 private:
  const FloatLinearOps* ops_;
  bool plain_;
  ThreadPool pool_;
  Arena arena_;
  std::unique_ptr<QuantizedWeight> quantized_;
  std::unique_ptr<DenseMatrix> dense_;
  AlignedBuffer rows_, sums_;
};

}  // namespace

void bind_float(nb::module_& module) {
  nb::class_<FloatLayer>(module, "FloatLayer", "One float linear layer on one thread.")
      .def_static("quantized",
           [](const std::string& unit, In<uint32_t, 2> packed, AnyMatrix scales, std::optional<AnyMatrix> biases, int bits,
              int group_size) {
             auto layer = std::make_unique<FloatLayer>(unit);
             layer->set_quantized(quantized_source(packed, scales, biases, bits, group_size));
             return layer.release();
           },
           nb::rv_policy::take_ownership, nb::arg("unit"), nb::arg("packed"), nb::arg("scales"), nb::arg("biases").none(),
           nb::arg("bits"), nb::arg("group_size"))
      .def_static("dense",
           [](const std::string& unit, In<uint16_t, 2> values, bool bfloat) {
             auto layer = std::make_unique<FloatLayer>(unit);
             layer->set_dense({(int)values.shape(0), (int)values.shape(1), bfloat, values.data()});
             return layer.release();
           },
           nb::rv_policy::take_ownership, nb::arg("unit"), nb::arg("values"), nb::arg("bfloat"))
      .def("forward",
           [](FloatLayer& layer, In<float, 2> x, Out<float, 2> y, Out<bool, 1> finite, bool gemv, std::optional<In<float, 1>> bias,
              std::optional<In<float, 2>> residual) {
             const size_t M = x.shape(0), N = (size_t)layer.outputs();
             check((int)x.shape(1) == layer.inputs(), "x must have the weight's number of inputs");
             check(M >= 1 && y.shape(0) == M && y.shape(1) == N && finite.size() == M, "y must be (rows, outputs)");
             check(!bias || bias->size() == N, "bias must have one value an output");
             check(!residual || (residual->shape(0) == M && residual->shape(1) == N), "residual must be like y");
             layer.forward(x.data(), (int)M, gemv, bias ? bias->data() : nullptr, residual ? residual->data() : nullptr, y.data(),
                           finite.data());
           },
           nb::arg("x"), nb::arg("y"), nb::arg("finite"), nb::kw_only(), nb::arg("gemv"), nb::arg("bias").none() = nb::none(),
           nb::arg("residual").none() = nb::none());
}

}  // namespace isobatch
