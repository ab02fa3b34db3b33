// The words of CUDA that page_copy.cu uses, for a C++ compiler: blocks and threads run one after the other.
#pragma once
#include <cstdint>

#define __global__
#define __launch_bounds__(threads)

struct int2 { std::int32_t x, y; };
struct alignas(16) uint4 { std::uint32_t x, y, z, w; };
struct Index { unsigned x; };
static Index blockIdx, threadIdx, blockDim, gridDim;

template <class T> T __ldcs(const T* from) { return *from; }
template <class T> void __stcs(T* to, T value) { *to = value; }
