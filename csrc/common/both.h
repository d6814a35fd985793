// Marks functions that CPUs and GPUs run alike.
#pragma once

#ifdef __CUDACC__
#define BAGUA_BOTH __host__ __device__ inline
#else
#define BAGUA_BOTH [[gnu::always_inline]] inline
#endif
