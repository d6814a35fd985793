// Append-only writer and bounds-checked reader for control messages. Integers are little-endian
// host integers: every rank of a job runs the same build.
#pragma once

#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "common/errors.h"

namespace bagua {

class Writer {
 public:
  template <class T>
  void put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(&bytes_[at], &value, sizeof(T));
  }
  void put_string(std::string_view text) {
    put(static_cast<uint32_t>(text.size()));
    bytes_.append(text);
  }
  template <class T>
  void put_vector(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    put(static_cast<uint32_t>(values.size()));
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
  const std::string& bytes() const { return bytes_; }
  std::string take() { return std::move(bytes_); }
  void clear() { bytes_.clear(); }
  bool empty() const { return bytes_.empty(); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <class T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  std::string_view get_string() {
    const auto n = get<uint32_t>();
    return {take(n), n};
  }
  template <class T>
  std::vector<T> get_vector() {
    const auto n = get<uint32_t>();
    const char* from = take(n * sizeof(T));
    std::vector<T> values(n);
    if (n > 0) std::memcpy(values.data(), from, n * sizeof(T));
    return values;
  }
  bool done() const { return at_ == bytes_.size(); }

 private:
  const char* take(size_t n) {
    if (n > bytes_.size() - at_) throw InternalError("control message ends too early");
    const char* p = bytes_.data() + at_;
    at_ += n;
    return p;
  }
  std::string_view bytes_;
  size_t at_ = 0;
};

}  // namespace bagua
