// Wire formats for float32 values, and the table of them. Encoding the same values gives the same
// bytes everywhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel/isa.h"
#include "kernel/reduce.h"

namespace bagua {

struct Codec;

// A codec and what its user chose.
struct Coding {
  const Codec* codec = nullptr;
  int kept = 0;                   // topk: values of a chunk that travel, from 1 on
  const Codec* values = nullptr;  // topk: their codec

  int64_t block() const;
  int64_t wire_nbytes(int64_t count) const;
  // No memory needs alignment beyond a float's, and wires none. Large wires are written past the
  // caches, see stream_copy.
  void encode(const float* in, int64_t count, char* wire, Isa isa = best_isa()) const;
  void decode(const char* wire, int64_t count, float* out, Isa isa = best_isa()) const;
  // The same past the caches (see stream_copy), as decode does by itself from 8 MB on: for a piece
  // of a large result.
  void decode_past(const char* wire, int64_t count, float* out, Isa isa = best_isa()) const;
  // What encoding loses is kept for the next time: encodes in + residual, and makes residual what
  // is left of that. Without a residual nothing is.
  void encode_rest(const float* in, float* residual, int64_t count, char* wire,
                   Isa isa = best_isa()) const;
  // sum[i] += what the wire says.
  void decode_add(const char* wire, int64_t count, float* sum, Isa isa = best_isa()) const;
  // What several wires say, added up in order, and finished.
  void add_up(const std::vector<const char*>& wires, Finish finish, int64_t count, float* sum,
              OddSources* odd = nullptr) const;
};

struct Codec {
  const char* name;
  int64_t block;  // values that are coded together: a vector may be cut at its multiples
  bool lossy;     // other than by rounding to a shorter float
  bool needs_feedback;
  bool sparse;  // most values are 0 in what it says
  int64_t (*wire_nbytes)(const Coding&, int64_t count);
  void (*encode)(const Coding&, const float* in, int64_t count, char* wire, Isa isa);
  void (*decode)(const Coding&, const char* wire, int64_t count, float* out, Isa isa);
  // See Coding, where it can do better than the two above.
  void (*encode_rest)(const Coding&, const float* in, float* rest, int64_t count, char* wire,
                      Isa isa) = nullptr;
  void (*decode_add)(const Coding&, const char* wire, int64_t count, float* sum, Isa isa) = nullptr;
};

const std::vector<Codec>& codecs();
const Codec* find_codec(const std::string& name);  // null if there is none
// What "codec", or "topk:kept:values", says. Throws a UsageError.
Coding parse_coding(const std::string& text);
// What carries 16-bit floats of this type as they are.
inline Coding half_coding(DType dtype) {
  return {find_codec(dtype == DType::kF16 ? "fp16" : "bf16")};
}

inline int64_t Coding::block() const { return codec->block; }
inline int64_t Coding::wire_nbytes(int64_t count) const { return codec->wire_nbytes(*this, count); }
inline void Coding::encode(const float* in, int64_t count, char* wire, Isa isa) const {
  codec->encode(*this, in, count, wire, isa);
}

}  // namespace bagua
