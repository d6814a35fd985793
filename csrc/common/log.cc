#include "common/log.h"

#include <unistd.h>

#include <iterator>

namespace bagua {
namespace {
constexpr const char* kNames[] = {"trace", "debug", "info", "warning", "error"};
}

Log::Log(int rank, const std::string& level) : rank_(rank), threshold_(LogLevel::kWarning) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (level == kNames[i]) threshold_ = static_cast<LogLevel>(i);
  }
}

void Log::write(LogLevel level, const std::string& text) const {
  if (!enabled(level)) return;
  const std::string line = "bagua[" + std::to_string(rank_) + "] " +
                           kNames[static_cast<int>(level)] + ": " + text + "\n";
  if (::write(STDERR_FILENO, line.data(), line.size()) < 0) return;  // nowhere left to complain
}

}  // namespace bagua
