#include "codec/codec.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "codec/bf16.h"
#include "codec/blocks.h"
#include "codec/fp16.h"
#include "codec/fp8_e4m3.h"
#include "codec/minmax_u4.h"
#include "codec/minmax_u8.h"
#include "codec/raw.h"
#include "codec/sign1.h"
#include "codec/topk.h"
#include "common/errors.h"
#include "common/memory.h"
#include "kernel/stream.h"

namespace bagua {
namespace {

// What goes past the caches is made in them, so many values at a time: a multiple of every block
// but those of sparse codecs.
constexpr int64_t kPastTile = Sign1::kBlock;
// Encoding with a slower one takes so long that writing the wire does not count.
constexpr Isa kFastest = static_cast<Isa>(kIsaCount - 1);

// A block format, compiled for every instruction set.
template <class C>
struct Blocks {
  static_assert(Sign1::kBlock % C::kBlock == 0 && block_nbytes<C>(C::kBlock) % 4 == 0,
                "see format.h");
  static int64_t wire_nbytes(const Coding&, int64_t count) {
    const int64_t rest = count % C::kBlock;
    return count / C::kBlock * block_nbytes<C>(C::kBlock) + (rest ? block_nbytes<C>(rest) : 0);
  }
#define BAGUA_BLOCKS(isa, attribute)                                                        \
  attribute static void encode_##isa(const float* in, int64_t count, char* to) {            \
    encode_blocks<C>(in, count, reinterpret_cast<uint8_t*>(to));                            \
  }                                                                                         \
  attribute static void rest_##isa(const float* in, float* rest, int64_t count, char* to) { \
    encode_rests<C>(in, rest, count, reinterpret_cast<uint8_t*>(to));                       \
  }                                                                                         \
  attribute static void decode_##isa(const char* from, int64_t count, float* out) {         \
    decode_blocks<C, false>(reinterpret_cast<const uint8_t*>(from), count, out);            \
  }                                                                                         \
  attribute static void add_##isa(const char* from, int64_t count, float* sum) {            \
    decode_blocks<C, true>(reinterpret_cast<const uint8_t*>(from), count, sum);             \
  }
  BAGUA_CLONES(BAGUA_BLOCKS)
#undef BAGUA_BLOCKS
#define BAGUA_ENTRY(isa, attribute) {encode_##isa, rest_##isa, decode_##isa, add_##isa},
  struct Loops {
    void (*encode)(const float*, int64_t, char*);
    void (*rest)(const float*, float*, int64_t, char*);
    void (*decode)(const char*, int64_t, float*);
    void (*add)(const char*, int64_t, float*);
  };
  static const Loops& loops(Isa isa) {
    static constexpr Loops all[] = {BAGUA_CLONES(BAGUA_ENTRY)};
    return all[static_cast<int>(isa)];
  }
#undef BAGUA_ENTRY
  static void encode(const Coding& coding, const float* in, int64_t count, char* wire, Isa isa) {
    const auto encode_some = loops(isa).encode;
    const bool large = static_cast<size_t>(wire_nbytes(coding, count)) >= kStreamNbytes;
    if (!large || isa != kFastest) return encode_some(in, count, wire);
    char made[kLineNbytes + kPastTile / C::kBlock * block_nbytes<C>(C::kBlock)];
    size_t held = 0;  // bytes of a line of which more comes: lines that are written twice take long
    for (int64_t at = 0; at < count; at += kPastTile) {
      const int64_t n = std::min(kPastTile, count - at);
      encode_some(in + at, n, made + held);
      const size_t all = held + static_cast<size_t>(wire_nbytes(coding, n));
      held = at + n < count ? reinterpret_cast<uintptr_t>(wire + all) % kLineNbytes : 0;
      stream_copy(wire, made, all - held, isa);
      memcpy(made, made + all - held, held);
      wire += all - held;
    }
    stream_fence();
  }
  static void encode_rest(const Coding&, const float* in, float* rest, int64_t count, char* wire,
                          Isa isa) {
    loops(isa).rest(in, rest, count, wire);
  }
  static void decode(const Coding&, const char* wire, int64_t count, float* out, Isa isa) {
    loops(isa).decode(wire, count, out);
  }
  static void decode_add(const Coding&, const char* wire, int64_t count, float* sum, Isa isa) {
    loops(isa).add(wire, count, sum);
  }
};

template <class C>
constexpr Codec row(const char* name, int64_t block, bool lossy, bool needs_feedback) {
  return {name, block, lossy, needs_feedback, false, C::wire_nbytes, C::encode, C::decode};
}
template <class C>
constexpr Codec lossy(const char* name, int64_t block, bool needs_feedback) {
  Codec codec = row<C>(name, block, true, needs_feedback);
  codec.encode_rest = C::encode_rest;
  codec.decode_add = C::decode_add;
  return codec;
}
template <class C>
constexpr Codec sparse(const char* name, int64_t block) {
  Codec codec = lossy<C>(name, block, true);
  codec.sparse = true;
  return codec;
}

// What is added up or kept meanwhile stays in a core's first cache.
constexpr int64_t kTile = 1024;

// Loops between encoding and decoding, compiled for every instruction set.
struct Between {
#define BAGUA_BETWEEN(isa, attribute)                                                        \
  attribute static void add_##isa(const float* a, const float* b, int64_t n, float* sum) {   \
    for (int64_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];                                    \
  }                                                                                          \
  attribute static void rest_##isa(const float* a, const float* b, int64_t n, float* rest) { \
    for (int64_t i = 0; i < n; ++i) rest[i] = finite_or_zero(a[i] - b[i]);                   \
  }
  BAGUA_CLONES(BAGUA_BETWEEN)
#undef BAGUA_BETWEEN
  using Loop = void (*)(const float*, const float*, int64_t, float*);
  static void add(Isa isa, const float* a, const float* b, int64_t n, float* sum) {
#define BAGUA_ENTRY(isa, attribute) add_##isa,
    constexpr Loop loops[] = {BAGUA_CLONES(BAGUA_ENTRY)};
#undef BAGUA_ENTRY
    loops[static_cast<int>(isa)](a, b, n, sum);
  }
  // What is left of a after b. A NaN or an Inf is told once, not for ever.
  static void rest(Isa isa, const float* a, const float* b, int64_t n, float* rest) {
#define BAGUA_ENTRY(isa, attribute) rest_##isa,
    constexpr Loop loops[] = {BAGUA_CLONES(BAGUA_ENTRY)};
#undef BAGUA_ENTRY
    loops[static_cast<int>(isa)](a, b, n, rest);
  }
};

}  // namespace

const std::vector<Codec>& codecs() {
  static const std::vector<Codec> table = {
      row<Raw>("raw", 1, false, false),
      row<Fp16>("fp16", 1, false, false),
      row<Bf16>("bf16", 1, false, false),
      lossy<Blocks<MinMaxU8>>("minmax_u8", MinMaxU8::kBlock, false),
      lossy<Blocks<MinMaxU4>>("minmax_u4", MinMaxU4::kBlock, false),
      lossy<Blocks<Fp8E4M3>>("fp8_e4m3", Fp8E4M3::kBlock, false),
      lossy<Blocks<Sign1>>("sign1", Sign1::kBlock, true),
      sparse<TopK>("topk", TopK::kChunk),
  };
  return table;
}

const Codec* find_codec(const std::string& name) {
  for (const Codec& codec : codecs())
    if (name == codec.name) return &codec;
  return nullptr;
}

Coding parse_coding(const std::string& text) {
  std::istringstream words(text);
  std::string name, kept = "41", values = "raw";
  std::getline(words, name, ':');
  std::getline(words, kept, ':');
  std::getline(words, values, ':');
  const Coding coding{find_codec(name), std::atoi(kept.substr(0, 9).c_str()), find_codec(values)};
  if (!coding.codec || !coding.values) {
    std::string names;
    for (const Codec& codec : codecs())
      names += (names.empty() ? "" : ", ") + std::string(codec.name);
    throw UsageError("there is no codec " + text + "; there are " + names);
  }
  std::string rest;
  const bool plain = kept.find_first_not_of("0123456789") == std::string::npos;
  if (!plain || words >> rest) throw UsageError(text + " is not codec:kept:values");
  if (coding.kept < 1 || coding.kept > TopK::kChunk)
    throw UsageError("topk keeps 1 to 4096 values of 4096, not " + kept);
  if (coding.values->block > MinMaxU8::kBlock)
    throw UsageError(values + " cannot code what topk keeps");
  return coding;
}

void Coding::encode_rest(const float* in, float* residual, int64_t count, char* wire,
                         Isa isa) const {
  if (!residual) return encode(in, count, wire, isa);
  if (codec->encode_rest) return codec->encode_rest(*this, in, residual, count, wire, isa);
  float whole[kTile], said[kTile];
  for (int64_t at = 0; at < count; at += kTile) {
    const int64_t n = std::min(kTile, count - at);
    Between::add(isa, in + at, residual + at, n, whole);
    encode(whole, n, wire, isa);
    decode(wire, n, said, isa);
    Between::rest(isa, whole, said, n, residual + at);
    wire += wire_nbytes(n);
  }
}

void Coding::decode(const char* wire, int64_t count, float* out, Isa isa) const {
  if (static_cast<size_t>(count) * sizeof(float) >= kStreamNbytes)
    return decode_past(wire, count, out, isa);
  codec->decode(*this, wire, count, out, isa);
}

void Coding::decode_past(const char* wire, int64_t count, float* out, Isa isa) const {
  alignas(kLineNbytes) float said[kPastTile];
  // One clears and adds little; the other is a memcpy.
  if (codec->sparse || wire_nbytes(kPastTile) == sizeof said)
    return codec->decode(*this, wire, count, out, isa);
  for (int64_t at = 0; at < count; at += kPastTile) {
    const int64_t n = std::min(kPastTile, count - at);
    codec->decode(*this, wire, n, said, isa);
    stream_copy(out + at, said, static_cast<size_t>(n) * sizeof(float), isa);
    wire += wire_nbytes(n);
  }
  stream_fence();
}

void Coding::decode_add(const char* wire, int64_t count, float* sum, Isa isa) const {
  if (codec->decode_add) return codec->decode_add(*this, wire, count, sum, isa);
  float said[kTile];
  for (int64_t at = 0; at < count; at += kTile) {
    const int64_t n = std::min(kTile, count - at);
    decode(wire, n, said, isa);
    Between::add(isa, sum + at, said, n, sum + at);
    wire += wire_nbytes(n);
  }
}

void Coding::add_up(const std::vector<const char*>& wires, Finish finish, int64_t count, float* sum,
                    OddSources* odd) const {
  std::fill_n(sum, count, 0.0f);
  for (const char* wire : wires) decode_add(wire, count, sum);
  const void* srcs[] = {sum};
  if (odd || !finish.identity())
    reduce(DType::kF32, ReduceOp::kSum, sum, srcs, 1, count, finish, best_isa(), odd);
}

}  // namespace bagua
