// The three kinds of failure a caller can see, and how one is carried inside a handle.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

namespace bagua {

// kLeft is kPeer of a rank that has shut down, which ends no exchange but its own;
// kJoined is kUsage of what a rank that has joined takes no part in.
enum class ErrorKind : uint8_t { kUsage, kPeer, kInternal, kLeft, kJoined };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// The caller can fix it.
struct UsageError : Error {
  explicit UsageError(const std::string& what, ErrorKind kind = ErrorKind::kUsage)
      : Error(kind, what) {}
};
// Another rank failed, left or is late.
struct PeerError : Error {
  explicit PeerError(const std::string& what, ErrorKind kind = ErrorKind::kPeer)
      : Error(kind, what) {}
};
// Our bug, or the machine's.
struct InternalError : Error {
  explicit InternalError(const std::string& what) : Error(ErrorKind::kInternal, what) {}
};

// Immutable, so that one failure can be shared by every open handle.
struct Failure {
  ErrorKind kind;
  std::string what;
};
using FailurePtr = std::shared_ptr<const Failure>;

[[noreturn]] inline void throw_failure(const Failure& failure) {
  switch (failure.kind) {
    case ErrorKind::kUsage:
    case ErrorKind::kJoined:
      throw UsageError(failure.what, failure.kind);
    case ErrorKind::kPeer:
    case ErrorKind::kLeft:
      throw PeerError(failure.what, failure.kind);
    default:
      throw InternalError(failure.what);
  }
}

inline FailurePtr make_failure(ErrorKind kind, std::string what) {
  return std::make_shared<const Failure>(Failure{kind, std::move(what)});
}

}  // namespace bagua
