#include "kv_pool.h"

#include <cstring>

namespace isobatch {

KvPool::KvPool(int layers, int num_kv_heads, int head_dim, int block_size, int num_blocks) {
  for (int layer = 0; layer < layers; layer++) {
    KvView view{num_kv_heads, head_dim, block_size, num_blocks, nullptr, nullptr};
    const size_t bytes = view.block_stride() * num_blocks * sizeof(uint16_t);
    view.keys = place(bytes, 2 * layers);
    view.values = place(bytes, 2 * layers);
    views_.push_back(view);
  }
}

// The system gives the memory of a large buffer by huge pages of 2 MB, and clears each when it is first written. A block
// has the same place in every array. Were all aligned alike, one step in some thousand positions would have to take a
// page for each of them (0.3 s for 60 arrays), so they are shifted against each other.
uint16_t* KvPool::place(size_t bytes, int num_arrays) {
  constexpr size_t kHugePage = (size_t)2 << 20, kPage = 4096;
  const size_t index = memory_.size();
  const size_t shift = bytes >= 4 * kHugePage ? kHugePage * index / num_arrays / kPage * kPage : 0;
  memory_.emplace_back(bytes + shift);
  return memory_.back().as<uint16_t>() + shift / sizeof(uint16_t);
}

void KvPool::zero_block(int block, int layer) {
  const KvView& view = views_[layer];
  const size_t stride = view.block_stride();
  std::memset(view.keys + block * stride, 0, stride * sizeof(uint16_t));
  std::memset(view.values + block * stride, 0, stride * sizeof(uint16_t));
}

void KvPool::read_block(int block, uint16_t* out) const {
  for (const KvView& view : views_) {
    const size_t stride = view.block_stride();
    const uint16_t *keys = view.keys + block * stride, *values = view.values + block * stride;
    for (int head = 0; head < view.num_kv_heads; head++) {
      for (int slot = 0; slot < view.block_size; slot++) {
        for (int d = 0; d < view.head_dim; d++) *out++ = keys[head * view.head_stride() + (size_t)d * view.block_size + slot];
      }
    }
    std::memcpy(out, values, stride * sizeof(uint16_t));
    out += stride;
  }
}

void KvPool::write_block(int block, const uint16_t* in) {
  for (const KvView& view : views_) {
    const size_t stride = view.block_stride();
    uint16_t *keys = view.keys + block * stride, *values = view.values + block * stride;
    for (int head = 0; head < view.num_kv_heads; head++) {
      for (int slot = 0; slot < view.block_size; slot++) {
        for (int d = 0; d < view.head_dim; d++) keys[head * view.head_stride() + (size_t)d * view.block_size + slot] = *in++;
      }
    }
    std::memcpy(values, in, stride * sizeof(uint16_t));
    in += stride;
  }
}

}  // namespace isobatch
