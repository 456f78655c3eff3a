// All matrix products of one step of SmolLM2-135M in ggml, with random weights, as llama.cpp runs
// them: every weight in the first of the CPU's buffer types that supports its product.
//
// Usage: ggml_matmuls THREADS REPETITIONS ROWS...   (prints JSON: milliseconds by rows)

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace {

constexpr int kHidden = 576, kInner = 1536, kKeys = 192, kLayers = 30, kVocab = 49152;

ggml_context* new_context() {
  return ggml_init({ggml_tensor_overhead() * 4096 + ggml_graph_overhead(), nullptr, true});
}

// Whether the CPU multiplies with `weight` when it lies in buffers of `type`.
bool supports(ggml_backend_dev_t device, ggml_tensor* weight, ggml_backend_buffer_type_t type) {
  ggml_context* context = new_context();
  ggml_tensor* input = ggml_new_tensor_2d(context, GGML_TYPE_F32, weight->ne[0], 512);
  ggml_tensor* product = ggml_mul_mat(context, weight, input);
  weight->buffer = ggml_backend_buft_alloc_buffer(type, 0);
  const bool supported = ggml_backend_dev_supports_op(device, product);
  ggml_backend_buffer_free(weight->buffer);
  weight->buffer = nullptr;
  ggml_free(context);
  return supported;
}

std::vector<ggml_backend_buffer_type_t> buffer_types(ggml_backend_dev_t device) {
  std::vector<ggml_backend_buffer_type_t> types;
  auto extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
  for (auto* type = extra ? extra(device) : nullptr; type && *type; ++type) types.push_back(*type);
  types.push_back(ggml_backend_dev_buffer_type(device));
  return types;
}

// A weight with random values, in the buffer that llama.cpp would choose.
ggml_tensor* new_weight(ggml_backend_dev_t device, ggml_type type, int outputs, int inputs) {
  ggml_context* context = new_context();  // lives as long as the process, like the weights
  ggml_tensor* weight = ggml_new_tensor_2d(context, type, inputs, outputs);
  for (ggml_backend_buffer_type_t buffer_type : buffer_types(device)) {
    if (!supports(device, weight, buffer_type)) continue;
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type);
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    std::vector<float> values(static_cast<size_t>(outputs) * inputs);
    uint32_t state = 1;
    for (float& value : values) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<float>(state >> 8) / (1 << 24) - 0.5f;
    }
    std::vector<uint8_t> packed(ggml_nbytes(weight));
    ggml_quantize_chunk(type, values.data(), packed.data(), 0, outputs, inputs, nullptr);
    ggml_backend_tensor_set(weight, packed.data(), 0, packed.size());
    return weight;
  }
  std::fprintf(stderr, "no buffer type supports the product\n");
  std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  ggml_backend_t backend = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(backend, std::atoi(argv[1]));
  ggml_threadpool_params pool = ggml_threadpool_params_default(std::atoi(argv[1]));
  ggml_backend_cpu_set_threadpool(backend, ggml_threadpool_new(&pool));
  ggml_backend_dev_t device = ggml_backend_get_device(backend);
  struct Product { ggml_tensor* weight; bool inner; };
  std::vector<Product> products;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int outputs : {kHidden, kKeys, kKeys, kHidden, kInner, kInner}) {
      products.push_back({new_weight(device, GGML_TYPE_Q4_1, outputs, kHidden), false});
    }
    products.push_back({new_weight(device, GGML_TYPE_Q4_1, kHidden, kInner), true});
  }
  products.push_back({new_weight(device, GGML_TYPE_Q8_0, kVocab, kHidden), false});

  std::string json = "{";
  for (int i = 3; i < argc; ++i) {
    const int rows = std::atoi(argv[i]);
    ggml_context* context = new_context();
    ggml_tensor* hidden = ggml_new_tensor_2d(context, GGML_TYPE_F32, kHidden, rows);
    ggml_tensor* inner = ggml_new_tensor_2d(context, GGML_TYPE_F32, kInner, rows);
    ggml_cgraph* graph = ggml_new_graph(context);
    for (const Product& product : products) {
      ggml_build_forward_expand(
          graph, ggml_mul_mat(context, product.weight, product.inner ? inner : hidden));
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(context, backend);
    std::vector<float> ones(static_cast<size_t>(kInner) * rows, 1.0f);
    ggml_backend_tensor_set(hidden, ones.data(), 0, ggml_nbytes(hidden));
    ggml_backend_tensor_set(inner, ones.data(), 0, ggml_nbytes(inner));
    ggml_backend_graph_compute(backend, graph);
    json += (i > 3 ? ", \"" : "\"") + std::to_string(rows) + "\": [";
    for (int repetition = 0; repetition < std::atoi(argv[2]); ++repetition) {
      const auto begin = std::chrono::steady_clock::now();
      ggml_backend_graph_compute(backend, graph);
      const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
      json += (repetition ? ", " : "") + std::to_string(time.count());
    }
    json += "]";
    ggml_backend_buffer_free(buffer);
    ggml_free(context);
  }
  std::puts((json + "}").c_str());
}
