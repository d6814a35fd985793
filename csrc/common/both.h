// Marks functions that CPUs and GPUs run alike, and loops that GPUs unroll: over arrays that are to
// stay in registers, which have no addresses.
#pragma once

#ifdef __CUDACC__
#define BAGUA_BOTH __host__ __device__ inline
#else
#define BAGUA_BOTH [[gnu::always_inline]] inline
#endif

#ifdef __CUDA_ARCH__
#define BAGUA_UNROLL _Pragma("unroll")
#define BAGUA_UNROLL_4 _Pragma("unroll 4")
#else
#define BAGUA_UNROLL
#define BAGUA_UNROLL_4
#endif
