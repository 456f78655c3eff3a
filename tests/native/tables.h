// The tables that this build and this processor have, the reference apart.
#pragma once
#include <vector>

#include "cpu_features.h"
#include "engine.h"

namespace isobatch::testing {

// AMX's kernels on tiles in memory (emulated_amx.cpp); null where this build has no AVX-512.
const LinearOps* emulated_amx_linear_ops();

template <class Table>
void add_table(std::vector<const Table*>& tables, bool runs, const Table* table) {
  if (runs && table) tables.push_back(table);
}

inline std::vector<const RowOps*> row_tables() {
  const CpuFeatures cpu = detect_cpu_features();
  std::vector<const RowOps*> tables{scalar_row_ops()};
  add_table(tables, cpu.avx2, avx2_row_ops());
  add_table(tables, cpu.avx512_vnni, avx512_row_ops());
  add_table(tables, cpu.neon, neon_row_ops());
  return tables;
}

inline std::vector<const LinearOps*> linear_tables() {
  const CpuFeatures cpu = detect_cpu_features();
  std::vector<const LinearOps*> tables{scalar_linear_ops()};
  add_table(tables, cpu.avx2, avx2_linear_ops());
  add_table(tables, cpu.avx512_vnni, avx512_linear_ops());
  add_table(tables, cpu.avx512_vnni, emulated_amx_linear_ops());
  add_table(tables, cpu.amx_int8, amx_linear_ops());
  add_table(tables, cpu.neon, neon_linear_ops());
  add_table(tables, cpu.dotprod, neon_dotprod_linear_ops());
  return tables;
}

inline std::vector<const char*> engine_units() {
  std::vector<const char*> units;
  for (const char* unit : {"scalar", "avx2", "vnni", "amx", "neon"}) {
    if (find_unit(unit).available()) units.push_back(unit);
  }
  return units;
}

}  // namespace isobatch::testing
