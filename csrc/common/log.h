// Lines on stderr, each written with one call so that ranks do not mix inside a line.
#pragma once

#include <string>

namespace bagua {

enum class LogLevel { kTrace, kDebug, kInfo, kWarning, kError };

class Log {
 public:
  Log(int rank, const std::string& level);
  void write(LogLevel level, const std::string& text) const;
  bool enabled(LogLevel level) const { return level >= threshold_; }

 private:
  int rank_;
  LogLevel threshold_;
};

}  // namespace bagua
