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

// Whole lines, to where one begins.
#define BAGUA_COPY(isa, attribute, vector, load, store)                                          \
  attribute void isa(char* to, const char* from, size_t lines) {                                 \
    constexpr size_t kEach = kLineNbytes / sizeof(vector);                                       \
    for (size_t i = 0; i < lines * kEach; ++i)                                                   \
      store(reinterpret_cast<vector*>(to) + i, load(reinterpret_cast<const vector*>(from) + i)); \
  }
BAGUA_COPY(stream_baseline, , __m128i, _mm_loadu_si128, _mm_stream_si128)
BAGUA_COPY(plain_baseline, , __m128i, _mm_loadu_si128, _mm_store_si128)
#define BAGUA_TARGET __attribute__((target("avx2")))
BAGUA_COPY(stream_avx2, BAGUA_TARGET, __m256i, _mm256_loadu_si256, _mm256_stream_si256)
BAGUA_COPY(plain_avx2, BAGUA_TARGET, __m256i, _mm256_loadu_si256, _mm256_store_si256)
#undef BAGUA_TARGET
#define BAGUA_TARGET __attribute__((target("avx512f")))
BAGUA_COPY(stream_avx512, BAGUA_TARGET, __m512i, _mm512_loadu_si512, _mm512_stream_si512)
BAGUA_COPY(plain_avx512, BAGUA_TARGET, __m512i, _mm512_loadu_si512, _mm512_store_si512)
#undef BAGUA_TARGET
#undef BAGUA_COPY

using Lines = void (*)(char*, const char*, size_t);
constexpr Lines streams[kIsaCount] = {stream_baseline, stream_avx2, stream_avx512};
constexpr Lines plains[kIsaCount] = {plain_baseline, plain_avx2, plain_avx512};

void copy(Lines copy_lines, void* to, const void* from, size_t nbytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const size_t head = std::min(
      nbytes, (kLineNbytes - reinterpret_cast<uintptr_t>(out) % kLineNbytes) % kLineNbytes);
  const size_t lines = (nbytes - head) / kLineNbytes;
  if (head > 0) std::memcpy(out, in, head);
  copy_lines(out + head, in + head, lines);
  const size_t done = head + lines * kLineNbytes;
  if (nbytes > done) std::memcpy(out + done, in + done, nbytes - done);
}

}  // namespace

void plain_copy(void* to, const void* from, size_t nbytes, Isa isa) {
  constexpr size_t kLeast = 1 << 10, kMost = 8 << 20;
  if (nbytes >= kLeast && nbytes < kMost)
    return copy(plains[static_cast<int>(isa)], to, from, nbytes);
  if (nbytes > 0) std::memcpy(to, from, nbytes);
}

void stream_copy(void* to, const void* from, size_t nbytes, Isa isa) {
  copy(streams[static_cast<int>(isa)], to, from, nbytes);
}

void stream_fence() { _mm_sfence(); }
#else
void plain_copy(void* to, const void* from, size_t nbytes, Isa) {
  if (nbytes > 0) std::memcpy(to, from, nbytes);
}
void stream_copy(void* to, const void* from, size_t nbytes, Isa) {
  if (nbytes > 0) std::memcpy(to, from, nbytes);
}
void stream_fence() {}
#endif

}  // namespace bagua
