// While one of these lives, its thread computes with denormal numbers, though its owner may have
// told it to take them for zeros (torch.set_flush_denormal). Any thread may come to add up what
// ranks are to have in common, and threads inherit this from those that start them.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace bagua {

class Denormals {
 public:
  Denormals() : before_(state()) {
    if (before_ & kFlushes) set(before_ & ~kFlushes);
  }
  ~Denormals() {
    if (before_ & kFlushes) set(before_);
  }
  Denormals(const Denormals&) = delete;
  Denormals& operator=(const Denormals&) = delete;

 private:
#if defined(__x86_64__)
  using State = uint32_t;
  static constexpr State kFlushes = 1u << 15 | 1u << 6;  // of results, of what is read
  static State state() { return _mm_getcsr(); }
  static void set(State state) { _mm_setcsr(state); }
#elif defined(__aarch64__)
  using State = uint64_t;
  static constexpr State kFlushes = 1u << 24;
  static State state() {
    State state;
    asm volatile("mrs %0, fpcr" : "=r"(state));
    return state;
  }
  static void set(State state) { asm volatile("msr fpcr, %0" : : "r"(state)); }
#else
  using State = uint32_t;
  static constexpr State kFlushes = 0;
  static State state() { return 0; }
  static void set(State) {}
#endif

  const State before_;
};

}  // namespace bagua
