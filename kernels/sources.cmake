# The kernels without Python: their sources, and the flags of each instruction set. Included by the build of the module
# and by that of the native tests, each of which compiles them its own way.
set(kernels_cpp ${CMAKE_CURRENT_LIST_DIR}/isobatch_kernels/cpp)
set(kernels_sources
  ${kernels_cpp}/cpu_features.cpp
  ${kernels_cpp}/dense.cpp
  ${kernels_cpp}/engine.cpp
  ${kernels_cpp}/engine_attention.cpp
  ${kernels_cpp}/engine_float.cpp
  ${kernels_cpp}/engine_ops.cpp
  ${kernels_cpp}/greedy.cpp
  ${kernels_cpp}/kv_pool.cpp
  ${kernels_cpp}/linear_amx.cpp
  ${kernels_cpp}/linear_avx2.cpp
  ${kernels_cpp}/linear_avx512.cpp
  ${kernels_cpp}/linear_avx512_short.cpp
  ${kernels_cpp}/linear_float_avx2.cpp
  ${kernels_cpp}/linear_float_avx512.cpp
  ${kernels_cpp}/linear_float_neon.cpp
  ${kernels_cpp}/linear_float_reference.cpp
  ${kernels_cpp}/linear_float_scalar.cpp
  ${kernels_cpp}/linear_neon.cpp
  ${kernels_cpp}/linear_neon_dotprod.cpp
  ${kernels_cpp}/linear_reference.cpp
  ${kernels_cpp}/linear_scalar.cpp
  ${kernels_cpp}/reference.cpp
  ${kernels_cpp}/reference_row_ops.cpp
  ${kernels_cpp}/rope_table.cpp
  ${kernels_cpp}/row_ops_avx2.cpp
  ${kernels_cpp}/row_ops_avx512.cpp
  ${kernels_cpp}/row_ops_neon.cpp
  ${kernels_cpp}/row_ops_scalar.cpp
  ${kernels_cpp}/step.cpp
  ${kernels_cpp}/thread_pool.cpp
  ${kernels_cpp}/weights.cpp)

# The contract counts every rounding: no contraction into fma, no reordering.
set(kernels_options -ffp-contract=off -fno-fast-math -Wall -Wextra)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(kernels_avx2 -mavx2 -mfma -mf16c)
  set(kernels_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mprefer-vector-width=512)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC's own AVX-512 headers trip these warnings.
    list(APPEND kernels_avx512 -Wno-maybe-uninitialized -Wno-uninitialized)
  endif()
  set_source_files_properties(${kernels_cpp}/linear_avx2.cpp ${kernels_cpp}/linear_float_avx2.cpp ${kernels_cpp}/row_ops_avx2.cpp
    PROPERTIES COMPILE_OPTIONS "${kernels_avx2}")
  set_source_files_properties(${kernels_cpp}/linear_amx.cpp ${kernels_cpp}/linear_avx512.cpp
      ${kernels_cpp}/linear_avx512_short.cpp ${kernels_cpp}/linear_float_avx512.cpp ${kernels_cpp}/row_ops_avx512.cpp
    PROPERTIES COMPILE_OPTIONS "${kernels_avx2};${kernels_avx512}")
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set_source_files_properties(${kernels_cpp}/linear_neon_dotprod.cpp
    PROPERTIES COMPILE_OPTIONS -march=armv8.2-a+dotprod)
endif()
