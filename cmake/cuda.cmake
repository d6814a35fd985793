# GPUs: the runtime, linked statically, and the kernels. nvcc is called as it is: CMake's own support
# for CUDA wants a toolkit laid out as NVIDIA's installer does it, and wheels are not.
find_program(BAGUA_NVCC nvcc PATHS ${BAGUA_CUDA_ROOT}/bin NO_DEFAULT_PATH REQUIRED)
find_path(cuda_include cuda_runtime_api.h
  PATHS ${BAGUA_CUDA_ROOT}/include
        ${BAGUA_CUDA_ROOT}/targets/x86_64-linux/include ${BAGUA_CUDA_ROOT}/targets/sbsa-linux/include
  NO_DEFAULT_PATH REQUIRED)
find_library(cuda_runtime cudart_static
  PATHS ${BAGUA_CUDA_ROOT}/lib64 ${BAGUA_CUDA_ROOT}/lib
        ${BAGUA_CUDA_ROOT}/targets/x86_64-linux/lib ${BAGUA_CUDA_ROOT}/targets/sbsa-linux/lib
  NO_DEFAULT_PATH REQUIRED)
message(STATUS "Building for GPUs with ${BAGUA_NVCC}")

target_include_directories(bagua_core SYSTEM PRIVATE ${cuda_include})
target_link_libraries(bagua_core PUBLIC ${cuda_runtime} rt)

# A100, H100 and H200, B100 and B200, if this nvcc knows them; and what later ones compile by
# themselves. Bytes must be those of CPUs, so: no contraction into FMA.
execute_process(COMMAND ${BAGUA_NVCC} --list-gpu-arch OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
set(archs)
foreach(arch 80 90 100)
  if(known MATCHES "compute_${arch}[\r\n]")
    list(APPEND archs -gencode arch=compute_${arch},code=sm_${arch})
    set(newest ${arch})
  endif()
endforeach()
set(nvcc_flags -std=c++17 -O3 -fmad=false --expt-relaxed-constexpr
  ${archs} -gencode arch=compute_${newest},code=compute_${newest}
  -ccbin ${CMAKE_CXX_COMPILER} -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra
  -I${CMAKE_SOURCE_DIR}/csrc)
file(GLOB_RECURSE kernel_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/*.cu)
foreach(source ${kernel_sources})
  get_filename_component(name ${source} NAME_WE)
  set(object ${CMAKE_BINARY_DIR}/kernels/${name}.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/kernels
    COMMAND ${BAGUA_NVCC} ${nvcc_flags} -MD -MF ${object}.d -c ${source} -o ${object}
    DEPENDS ${source} DEPFILE ${object}.d
    COMMENT "Compiling ${name}.cu" VERBATIM)
  target_sources(bagua_core INTERFACE ${object})
endforeach()
