// The kernels of linear_amx_impl.h on tiles in memory, so that they are tested on processors without AMX as well.
#include "linear.h"
#include "tables.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <cstdlib>
#include <cstring>

#include "linear_amx_impl.h"

namespace isobatch::testing {
namespace {

// What the instructions are documented to do, with the errors they would raise.
class MemoryTiles {
 public:
  MemoryTiles(int rows, int inputs) {
    shape(kSums, rows, 64);
    shape(kLowSums, rows, 64);
    shape(kActivations, rows, inputs);
    shape(kLowActivations, rows, inputs);
    shape(kWeights, inputs / 4, 64);
    shape(kWeights16, inputs / 4, 64);
  }

  template <int T>
  void zero() {
    std::memset(tiles_[T].bytes, 0, sizeof tiles_[T].bytes);
  }
  template <int T>
  void load(const uint8_t* base, int64_t stride) {
    Tile& tile = tiles_[T];
    zero<T>();
    for (int r = 0; r < tile.rows; r++) std::memcpy(tile.bytes[r], base + r * stride, tile.columns);
  }
  template <int T>
  void store(int32_t* base) {
    const Tile& tile = tiles_[T];
    for (int r = 0; r < tile.rows; r++) std::memcpy(base + 16 * r, tile.bytes[r], tile.columns);
  }
  template <int C, int A, int B>
  void add_signed() {
    add<C, A, B, int8_t>();
  }
  template <int C, int A, int B>
  void add_unsigned() {
    add<C, A, B, uint8_t>();
  }

 private:
  struct Tile {
    int rows = 0, columns = 0;
    uint8_t bytes[16][64];
  };

  void shape(int tile, int rows, int columns) {
    if (rows < 1 || rows > 16 || columns < 4 || columns > 64 || columns % 4 != 0) std::abort();
    tiles_[tile].rows = rows;
    tiles_[tile].columns = columns;
  }

  template <int C, int A, int B, class Byte>
  void add() {
    Tile& c = tiles_[C];
    const Tile &a = tiles_[A], &b = tiles_[B];
    if (a.rows != c.rows || b.columns != c.columns || a.columns != 4 * b.rows) std::abort();
    for (int m = 0; m < c.rows; m++) {
      for (int n = 0; n < c.columns / 4; n++) {
        int32_t sum;
        std::memcpy(&sum, &c.bytes[m][4 * n], 4);
        for (int k = 0; k < a.columns; k++) sum += (Byte)a.bytes[m][k] * (int32_t)b.bytes[k / 4][4 * n + k % 4];
        std::memcpy(&c.bytes[m][4 * n], &sum, 4);
      }
    }
  }

  Tile tiles_[8];
};

int tile_panel_rows(int M) { return panel_rows(M, kTileRows); }

}  // namespace

const LinearOps* emulated_amx_linear_ops() {
  static const LinearOps ops{"emulated-amx",
                             ActFormat::kHalves,
                             ActFormat::kBytes,
                             quantized_by_tiles<MemoryTiles, false>,
                             quantized_by_tiles<MemoryTiles, true>,
                             avx512_linear_ops()->dense,
                             tile_panel_rows};
  return &ops;
}

}  // namespace isobatch::testing
#else
namespace isobatch::testing {
const LinearOps* emulated_amx_linear_ops() { return nullptr; }
}  // namespace isobatch::testing
#endif
