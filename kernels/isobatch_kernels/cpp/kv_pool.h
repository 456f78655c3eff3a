// The paged key/value cache of all layers (layout: views.h). Pages are taken from the system when first written.
#pragma once
#include <vector>
#include "aligned.h"
#include "views.h"

namespace isobatch {

class KvPool {
 public:
  KvPool(int layers, int num_kv_heads, int head_dim, int block_size, int num_blocks);

  const KvView& layer(int index) const { return views_[index]; }
  int layers() const { return (int)views_.size(); }
  // Clears keys and values of a block in one layer.
  void zero_block(int block, int layer);
  // Writes (layers, 2, num_kv_heads, block_size, head_dim) fp16 bits, keys then values.
  void read_block(int block, uint16_t* out) const;
  // Writes a block of every layer from such bits.
  void write_block(int block, const uint16_t* in);

 private:
  uint16_t* place(size_t bytes, int num_arrays);

  std::vector<AlignedBuffer> memory_;
  std::vector<KvView> views_;
};

}  // namespace isobatch
