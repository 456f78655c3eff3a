#include "kv_pool.h"

#include <cstring>

namespace isobatch {

KvPool::KvPool(int layers, int num_kv_heads, int head_dim, int block_size, int num_blocks) {
  for (int layer = 0; layer < layers; layer++) {
    KvView view{num_kv_heads, head_dim, block_size, num_blocks, nullptr, nullptr};
    const size_t bytes = view.block_stride() * num_blocks * sizeof(uint16_t);
    memory_.emplace_back(bytes);
    view.keys = memory_.back().as<uint16_t>();
    memory_.emplace_back(bytes);
    view.values = memory_.back().as<uint16_t>();
    views_.push_back(view);
  }
}

void KvPool::zero_block(int block) {
  for (const KvView& view : views_) {
    const size_t stride = view.block_stride();
    std::memset(view.keys + block * stride, 0, stride * sizeof(uint16_t));
    std::memset(view.values + block * stride, 0, stride * sizeof(uint16_t));
  }
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
