#include "weights.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu_features.h"
#include "half.h"

namespace isobatch {
namespace {

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument("[weights] " + message);
}

float stored_float(const void* values, bool half, size_t index) {
  return half ? half_to_float(static_cast<const uint16_t*>(values)[index]) : static_cast<const float*>(values)[index];
}

uint16_t float_bits_as_half(float x) {  // exact values only
  const uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000;
  const float magnitude = std::fabs(x);
  if (magnitude < 0x1p-14f) return (uint16_t)(sign | (uint32_t)(magnitude * 0x1p24f));
  return (uint16_t)(sign | ((bits & 0x7fffffffu) - (112u << 23)) >> 13);
}

size_t words_per_row(const QuantizedSource& s) { return (size_t)s.K * s.bits / 32; }

struct Affine {
  float scale, bias;
};

// Scale and bias of one group as the contract uses them.
Affine affine_of(const QuantizedSource& s, size_t index) {
  Affine a{flush_below(stored_float(s.scales, s.half, index), kScaleFloor), 0.0f};
  if (s.biases) a.bias = flush_below(stored_float(s.biases, s.half, index), kScaleFloor);
  if (s.bits == 8) a.bias = flush_below(std::fma(128.0f, a.scale, a.bias), kScaleFloor);
  return a;
}

// The k-th integer of a row.
uint32_t integer_at(const uint32_t* row, int bits, int k) {
  const size_t first = (size_t)k * bits, word = first / 32, shift = first % 32;
  uint64_t window = row[word];
  if (shift + bits > 32) window |= (uint64_t)row[word + 1] << 32;
  return (uint32_t)(window >> shift) & ((1u << bits) - 1);
}

// Sixteen bits, four integers of 4 bits, into the low halves of four bytes.
uint32_t spread_nibbles(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ffu;
  return (x | x << 4) & 0x0f0f0f0fu;
}

// Quants of one output and sub-block; `at` is the output's place in the quants of its 16.
void pack_quants(const QuantizedSource& s, const uint32_t* row, int k0, int b, uint8_t* at) {
  if (s.bits == 4) {
    for (int k = 0; k < b; k += 8) {
      const uint32_t word = row[(k0 + k) / 8];
      const uint32_t bytes = spread_nibbles(word & 0xffff) | spread_nibbles(word >> 16) << 4;
      std::memcpy(at + 64 * (k / 8), &bytes, 4);
    }
  } else if (s.bits == 8) {
    for (int k = 0; k < b; k += 4) std::memcpy(at + 64 * (k / 4), &row[(k0 + k) / 4], 4);
  } else if (s.bits < 4) {
    for (int k = 0; k < b; k++) at[64 * (k / 8) + k % 4] |= integer_at(row, s.bits, k0 + k) << (k % 8 < 4 ? 0 : 4);
  } else {
    for (int k = 0; k < b; k++) at[64 * (k / 4) + k % 4] = (uint8_t)integer_at(row, s.bits, k0 + k);
  }
}

void store_float(FloatStorage storage, uint8_t* base, int index, float value) {
  if (storage == FloatStorage::kHalf) {
    const uint16_t half = float_bits_as_half(value);
    std::memcpy(base + 2 * index, &half, 2);
  } else if (storage == FloatStorage::kSingle) {
    std::memcpy(base + 4 * index, &value, 4);
  }
}

float load_float(FloatStorage storage, const uint8_t* base, int index) {
  if (storage == FloatStorage::kNone) return 0.0f;
  if (storage == FloatStorage::kSingle) {
    float value;
    std::memcpy(&value, base + 4 * index, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, base + 2 * index, 2);
  return half_to_float(half);
}

// Calls body(source, row in it, output) for outputs [begin, end) of the joined matrix.
template <class Source, class Body>
void for_outputs(const std::vector<Source>& sources, int begin, int end, Body&& body) {
  int first = 0;
  for (const Source& s : sources) {
    for (int n = std::max(begin, first); n < std::min(end, first + s.N); n++) body(s, n - first, n);
    first += s.N;
  }
}

bool all_biases_zero(const std::vector<QuantizedSource>& sources) {
  for (const QuantizedSource& s : sources) {
    const size_t count = (size_t)s.N * (s.K / s.group);
    if (!s.biases && s.bits != 8) continue;
    for (size_t i = 0; i < count; i++) {
      if (affine_of(s, i).bias != 0.0f) return false;
    }
  }
  return true;
}

void check_sources(const std::vector<QuantizedSource>& sources, int b) {
  require(!sources.empty(), "at least one matrix is needed, got none");
  const QuantizedSource& first = sources[0];
  const int g = first.group;
  check_format(first.bits, g);
  require(b == 16 || b == 32 || b == 64, "sub-block must be 16, 32 or 64, got " + std::to_string(b));
  require(g % b == 0, "group size must be a multiple of the sub-block");
  require(first.K > 0 && first.K % g == 0, "inputs must be a positive multiple of the group size, got " + std::to_string(first.K));
  require((size_t)first.K * first.bits % 32 == 0, "rows must fill whole 32-bit words");
  for (const QuantizedSource& s : sources) {
    require(s.N > 0, "outputs must be positive, got " + std::to_string(s.N));
    require(s.K == first.K && s.bits == first.bits && s.group == g && s.half == first.half,
            "merged matrices must agree on inputs, bits, group size and type of scales");
  }
}

void make_plain(const std::vector<QuantizedSource>& sources, QuantizedWeight& w) {
  auto plain = std::make_unique<reference::Weights>();
  plain->N = w.view.N;
  plain->K = w.view.K;
  plain->G = w.view.G;
  plain->q.resize((size_t)plain->N * plain->K);
  const int groups = plain->K / plain->G;
  plain->scales.resize((size_t)plain->N * groups);
  plain->biases.resize((size_t)plain->N * groups);
  for_outputs(sources, 0, plain->N, [&](const QuantizedSource& s, int row, int n) {
    const uint32_t* words = s.packed + (size_t)row * words_per_row(s);
    for (int k = 0; k < s.K; k++) {
      plain->q[(size_t)n * s.K + k] = (int16_t)((int)integer_at(words, s.bits, k) - (s.bits == 8 ? 128 : 0));
    }
    for (int g = 0; g < groups; g++) {
      const Affine a = affine_of(s, (size_t)row * groups + g);
      plain->scales[(size_t)n * groups + g] = a.scale;
      plain->biases[(size_t)n * groups + g] = a.bias;
    }
  });
  w.view.tiles = 1;
  w.view.plain = plain.get();
  w.plain = std::move(plain);
}

}  // namespace

void check_format(int bits, int group) {
  require(bits >= 2 && bits <= 8, "bits must be 2 to 8, got " + std::to_string(bits));
  require(group == 16 || group == 32 || group == 64 || group == 128,
          "group size must be 16, 32, 64 or 128, got " + std::to_string(group));
}

std::unique_ptr<QuantizedWeight> pack_quantized(const std::vector<QuantizedSource>& sources, int b, bool keep_plain,
                                                Arena& arena, ThreadPool& pool) {
  check_sources(sources, b);
  auto weight = std::make_unique<QuantizedWeight>();
  PackedView& v = weight->view;
  const QuantizedSource& first = sources[0];
  for (const QuantizedSource& s : sources) v.N += s.N;
  v.K = first.K;
  v.G = first.group;
  v.b = b;
  v.NB = v.K / b;
  v.tiles = (v.N + kTileOutputs - 1) / kTileOutputs;
  v.code = first.bits <= 4 ? WeightCode::kNibble : first.bits < 8 ? WeightCode::kByte : WeightCode::kByteCentred;
  if (keep_plain) {
    make_plain(sources, *weight);
    return weight;
  }
  v.scale_storage = first.half ? FloatStorage::kHalf : FloatStorage::kSingle;
  // Re-centring computes biases in fp32, which fp16 does not hold.
  v.bias_storage = all_biases_zero(sources) ? FloatStorage::kNone
                   : first.half && first.bits != 8 ? FloatStorage::kHalf : FloatStorage::kSingle;
  v.half_bytes = (size_t)16 * b / (v.code == WeightCode::kNibble ? 2 : 1);
  v.scale_offset = 2 * v.half_bytes;
  v.bias_offset = v.scale_offset + kTileOutputs * (first.half ? 2 : 4);
  v.record_bytes = v.bias_offset + kTileOutputs * (size_t)(2 * (int)v.bias_storage);
  uint8_t* records = arena.take((size_t)v.tiles * v.NB * v.record_bytes);
  v.data = records;

  WorkCounter work;
  pool.run([&](int) {
    ScopedFloatMode mode(false);
    work.share(v.tiles, 4, [&](int begin, int end) {
      for_outputs(sources, begin * kTileOutputs, end * kTileOutputs, [&](const QuantizedSource& s, int row, int n) {
        const int tile = n / kTileOutputs, lane = n % kTileOutputs, groups = s.K / s.group;
        const uint32_t* words = s.packed + (size_t)row * words_per_row(s);
        Affine a{};
        for (int j = 0; j < v.NB; j++) {
          uint8_t* record = records + ((size_t)tile * v.NB + j) * v.record_bytes;
          pack_quants(s, words, j * b, b, record + (lane / 16) * v.half_bytes + 4 * (lane % 16));
          if (j * b % s.group == 0) a = affine_of(s, (size_t)row * groups + j * b / s.group);
          store_float(v.scale_storage, record + v.scale_offset, lane, a.scale);
          store_float(v.bias_storage, record + v.bias_offset, lane, a.bias);
        }
      });
    });
  });
  return weight;
}

void embed_quantized(const PackedView& w, int id, float* x) {
  if (w.plain) {
    reference::embed(*static_cast<const reference::Weights*>(w.plain), id, x);
    return;
  }
  const int tile = id / kTileOutputs, lane = id % kTileOutputs;
  for (int j = 0; j < w.NB; j++) {
    const uint8_t* record = w.record(tile, j);
    const uint8_t* at = record + (lane / 16) * w.half_bytes + 4 * (lane % 16);
    const float scale = load_float(w.scale_storage, record + w.scale_offset, lane);
    const float bias = load_float(w.bias_storage, record + w.bias_offset, lane);
    for (int k = 0; k < w.b; k++) {
      int q;
      if (w.code == WeightCode::kNibble) q = at[64 * (k / 8) + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15;
      else q = at[64 * (k / 4) + k % 4] - (w.code == WeightCode::kByteCentred ? 128 : 0);
      x[j * w.b + k] = std::fma(scale, (float)q, bias);
    }
  }
}

std::unique_ptr<DenseMatrix> pack_dense(const std::vector<DenseSource>& sources, bool keep_plain, Arena& arena) {
  require(!sources.empty(), "at least one matrix is needed, got none");
  auto matrix = std::make_unique<DenseMatrix>();
  DenseView& v = matrix->view;
  v.K = sources[0].K;
  v.bfloat = sources[0].bfloat;
  for (const DenseSource& s : sources) {
    require(s.N > 0 && s.K > 0, "a matrix must not be empty");
    require(s.K == v.K && s.bfloat == v.bfloat, "merged matrices must agree on inputs and type");
    v.N += s.N;
  }
  v.tiles = keep_plain ? 1 : (v.N + kTileOutputs - 1) / kTileOutputs;
  uint16_t* tiles = nullptr;
  if (keep_plain) matrix->plain.resize((size_t)v.N * v.K);
  else tiles = reinterpret_cast<uint16_t*>(arena.take((size_t)v.tiles * v.K * kTileOutputs * 2));
  for_outputs(sources, 0, v.N, [&](const DenseSource& s, int row, int n) {
    const uint16_t* values = s.values + (size_t)row * s.K;
    uint16_t* out = tiles + (keep_plain ? 0 : (size_t)(n / kTileOutputs) * s.K * kTileOutputs);
    for (int k = 0; k < s.K; k++) {
      const float x = s.bfloat ? bfloat_to_float(values[k]) : half_to_float(values[k]);
      const bool keep = !(std::fabs(x) < kDenseFloor);
      if (keep_plain) matrix->plain[(size_t)n * s.K + k] = keep ? x : 0.0f;
      else out[(size_t)k * kTileOutputs + n % kTileOutputs] = keep ? values[k] : 0;
    }
  });
  v.data = tiles;
  v.plain = keep_plain ? matrix->plain.data() : nullptr;
  return matrix;
}

void embed_dense(const DenseView& w, int id, float* x) {
  for (int k = 0; k < w.K; k++) {
    if (w.plain) {
      x[k] = static_cast<const float*>(w.plain)[(size_t)id * w.K + k];
    } else {
      const uint16_t value = w.data[((size_t)(id / kTileOutputs) * w.K + k) * kTileOutputs + id % kTileOutputs];
      x[k] = w.bfloat ? bfloat_to_float(value) : half_to_float(value);
    }
  }
}

}  // namespace isobatch
