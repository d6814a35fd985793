#include "kernel/stream.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bagua {

#if defined(__x86_64__) && defined(__GNUC__)
namespace {

void copy_baseline(char* to, const char* from, size_t lines) {
  for (size_t i = 0; i < lines * 4; ++i)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i,
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i));
}

__attribute__((target("avx2"))) void copy_avx2(char* to, const char* from, size_t lines) {
  for (size_t i = 0; i < lines * 2; ++i)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + i,
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i));
}

__attribute__((target("avx512f"))) void copy_avx512(char* to, const char* from, size_t lines) {
  for (size_t i = 0; i < lines; ++i)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to) + i,
                        _mm512_loadu_si512(reinterpret_cast<const __m512i*>(from) + i));
}

constexpr void (*copies[kIsaCount])(char*, const char*, size_t) = {copy_baseline, copy_avx2,
                                                                   copy_avx512};

}  // namespace

void stream_copy(void* to, const void* from, size_t nbytes, Isa isa) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const size_t head = std::min(
      nbytes, (kLineNbytes - reinterpret_cast<uintptr_t>(out) % kLineNbytes) % kLineNbytes);
  const size_t lines = (nbytes - head) / kLineNbytes;
  if (head > 0) std::memcpy(out, in, head);
  copies[static_cast<int>(isa)](out + head, in + head, lines);
  const size_t done = head + lines * kLineNbytes;
  if (nbytes > done) std::memcpy(out + done, in + done, nbytes - done);
}

void stream_fence() { _mm_sfence(); }
#else
void stream_copy(void* to, const void* from, size_t nbytes, Isa) {
  if (nbytes > 0) std::memcpy(to, from, nbytes);
}
void stream_fence() {}
#endif

}  // namespace bagua
