// How long rank 0 takes to agree with many ranks: `make bench-agreement`.
//
// This process is rank 0, with its ledger and its connections; another is all other ranks at once,
// which report everything of a step and wait for the decision. Eight ranks are on each machine,
// and are carried by one of them or not. Between machines a network's latency comes on top.
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "control/link.h"
#include "control/socket_channel.h"
#include "engine/ledger.h"

namespace {

using namespace bagua;

constexpr double kLimitS = 60;
constexpr int kRanksPerNode = 8;
constexpr int kWarmup = 3;

std::string name_of(int tensor) { return "model.layers." + std::to_string(tensor) + ".weight"; }

Report first_report(int tensors) {
  Description description;
  description.add_tensor(DType::kF32, {1024});
  Report report;
  for (int i = 0; i < tensors; ++i)
    report.full.push_back({{name_of(i), 0}, description.encode(), ""});
  return report;
}

Report later_report(int tensors) {
  Report report;
  report.ids.resize(static_cast<size_t>(tensors));
  std::iota(report.ids.begin(), report.ids.end(), 0);
  return report;
}

// Rank 0 is connected to the ranks 1 to `links`; each carries every other that is `links` more.
int carrier_of(int rank, int links) { return 1 + (rank - 1) % links; }

// What comes by one of them.
std::string frames_of(const Report& report, int carrier, int links, int ranks) {
  Writer w;
  report.encode(w);
  std::string frames;
  for (int rank = carrier; rank < ranks; rank += links) {
    const Link::Header header{static_cast<uint32_t>(w.bytes().size()), rank};
    frames.append(reinterpret_cast<const char*>(&header), sizeof header);
    frames.append(w.bytes());
  }
  return frames;
}

// The other ranks: all report, and each that is connected waits for the decision.
[[noreturn]] void be_the_others(const std::string& address, int ranks, int links, int tensors,
                                int rounds) {
  std::vector<Socket> sockets(static_cast<size_t>(links));
  std::vector<std::thread> threads;
  std::vector<std::string> first, later;
  for (int rank = 1; rank <= links; ++rank) {
    first.push_back(frames_of(first_report(tensors), rank, links, ranks));
    later.push_back(frames_of(later_report(tensors), rank, links, ranks));
    threads.emplace_back([&, rank] {
      sockets[static_cast<size_t>(rank) - 1] = connect_to_listener(address, 0, rank, kLimitS);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string decision;
  for (int round = 0; round < rounds; ++round) {
    const auto& frames = round == 0 ? first : later;
    for (size_t i = 0; i < sockets.size(); ++i)
      sockets[i].write_all(frames[i].data(), frames[i].size(), now_s() + kLimitS);
    for (const Socket& socket : sockets) {
      Link::Header header;
      socket.read_all(&header, sizeof header, now_s() + kLimitS);
      decision.resize(header.length);
      socket.read_all(decision.data(), header.length, now_s() + kLimitS);
    }
  }
  ::_exit(0);
}

double cpu_s() {
  timespec t;
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

class RankZero {
 public:
  RankZero(SocketListener& listener, int ranks, int links, int tensors)
      : channel_(accept_channel(listener, kLimitS)), ledger_(ranks), tensors_(tensors) {
    std::vector<int> carriers(1);
    for (int rank = 1; rank < ranks; ++rank) {
      others_.push_back(rank);
      carriers.push_back(carrier_of(rank, links));
    }
    channel_->set_carriers(std::move(carriers));
  }

  void agree(bool first) {
    ledger_.report(0, first ? first_report(tensors_) : later_report(tensors_), 0);
    for (size_t heard = 0; heard < others_.size();) {
      inbox_.clear();
      channel_->receive(static_cast<int>(kLimitS * 1e6), inbox_);
      for (const Message& message : inbox_) {
        Reader r(message.bytes);
        r.get<MessageType>();
        ledger_.report(message.from, Report::decode(r), 0);
      }
      heard += inbox_.size();
    }
    for (const Decision& decision : ledger_.take()) {
      Writer w;
      decision.encode(w);
      channel_->post(others_, w.bytes());
    }
  }

 private:
  const std::unique_ptr<SocketChannel> channel_;
  Ledger ledger_;
  const int tensors_;
  std::vector<int> others_;
  std::vector<Message> inbox_;
};

void measure(int ranks, int links, int tensors) {
  const int rounds = kWarmup + std::max(10, 60000 / ranks / tensors);
  SocketListener listener(links + 1, "lo");
  const std::string address = listener.address();
  const pid_t child = ::fork();
  if (child == 0) be_the_others(address, ranks, links, tensors, rounds);
  RankZero zero(listener, ranks, links, tensors);
  std::vector<double> wall_us;
  double cpu = 0;
  for (int round = 0; round < rounds; ++round) {
    const double wall_began_s = now_s(), cpu_began_s = cpu_s();
    zero.agree(round == 0);
    if (round < kWarmup) continue;
    wall_us.push_back((now_s() - wall_began_s) * 1e6);
    cpu += (cpu_s() - cpu_began_s) * 1e6;
  }
  ::waitpid(child, nullptr, 0);
  std::sort(wall_us.begin(), wall_us.end());
  std::printf("%5d  %7d  %8s  %12.0f  %17.0f\n", ranks, tensors, links < ranks - 1 ? "yes" : "no",
              wall_us[wall_us.size() / 2], cpu / static_cast<double>(wall_us.size()));
  std::fflush(stdout);
}

}  // namespace

int main() {
  rlimit files;
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  std::printf("ranks  tensors  carriers  us, median  us of rank 0's CPU\n");
  for (const int tensors : {1, 500})
    for (const int ranks : {9, 33, 129, 1001})
      for (const int per_link : {1, kRanksPerNode}) measure(ranks, (ranks - 1) / per_link, tensors);
}
