// AMX int8 for many rows, VNNI for few. The instructions are written out: some compilers drop the stores of a tile
// configuration in front of their own intrinsics.
#include "linear.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__linux__)
#include "linear_amx_impl.h"

namespace isobatch {
namespace {

// Below this VNNI is faster: its time grows with the rows, that of a tile hardly does.
constexpr int kFewestRows = 13;

class AmxTiles {
 public:
  AmxTiles(int rows, int inputs) {
    // Palette 1: byte counts of the rows of each tile from byte 16 on, numbers of rows from byte 48 on.
    alignas(64) uint8_t config[64] = {1};
    const auto shape = [&](int tile, int tile_rows, int bytes) {
      config[16 + 2 * tile] = (uint8_t)bytes;
      config[48 + tile] = (uint8_t)tile_rows;
    };
    shape(kSums, rows, 64);
    shape(kLowSums, rows, 64);
    shape(kActivations, rows, inputs);
    shape(kLowActivations, rows, inputs);
    shape(kWeights, inputs / 4, 64);
    shape(kWeights16, inputs / 4, 64);
    __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  ~AmxTiles() { __asm__ volatile("tilerelease" ::: "memory"); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

  template <int T>
  void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  void load(const uint8_t* base, int64_t stride) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(base), "r"(stride) : "memory");
  }
  template <int T>
  void store(int32_t* base) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(base), "r"((int64_t)64) : "memory");
  }
  template <int C, int A, int B>
  void add_signed() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  template <int C, int A, int B>
  void add_unsigned() {
    __asm__ volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

template <bool Short>
void quantized(const PackedView& w, const ActView& x, const LinearOutput& out, int tile_begin, int tile_end) {
  const LinearOps& few = *avx512_linear_ops();
  if (x.M < kFewestRows) (Short ? few.short_quantized : few.quantized)(w, x, out, tile_begin, tile_end);
  else quantized_by_tiles<AmxTiles, Short>(w, x, out, tile_begin, tile_end);
}

// Panels as high as a tile, where tiles are used.
int tile_panel_rows(int M) {
  return M < kFewestRows ? panel_rows(M) : panel_rows(M, kTileRows);
}

}  // namespace

const LinearOps* amx_linear_ops() {
  static const LinearOps ops{"amx",           ActFormat::kHalves, ActFormat::kBytes, quantized<false>,
                             quantized<true>, avx512_linear_ops()->dense, tile_panel_rows};
  return &ops;
}

}  // namespace isobatch
#else
namespace isobatch {
const LinearOps* amx_linear_ops() { return nullptr; }
}  // namespace isobatch
#endif
