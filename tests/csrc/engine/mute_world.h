// A world in which one rank has no engine.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/loopback_world.h"

namespace bagua {

// One rank agrees to exchanges, but what comes of it there is up to the test.
class MuteWorld {
 public:
  MuteWorld(const NodeOf& node_of, int mute, const Config& config)
      : hub_(static_cast<int>(node_of.size()), node_of),
        board_(hub_.size()),
        mute_(mute),
        channel_(board_.connect(mute)),
        transport_(hub_.connect(mute)) {
    std::vector<std::string> names;
    for (int rank = 0; rank < hub_.size(); ++rank) names.push_back("host h" + std::to_string(rank));
    for (int rank = 0; rank < hub_.size(); ++rank)
      engines.push_back(rank == mute ? nullptr
                                     : std::make_unique<Engine>(config, hub_.connect(rank),
                                                                board_.connect(rank), names));
  }
  ~MuteWorld() { die(); }  // else rank 0 would wait for its goodbye
  void die() { board_.lose(mute_); }
  Node& node() { return *transport_->node(); }

  // All ranks ask for one allreduce. The mute one answers rank 0, if it answers, until the others
  // have failed, and calls agreed() when they are told to begin. Returns what they get.
  std::vector<std::string> exchange(const std::vector<RequestPtr>& requests, bool answers,
                                    const std::function<void()>& agreed) {
    std::vector<std::string> texts(requests.size());
    run_ranks(hub_.size(), [&](int rank) {
      const RequestPtr& request = requests[static_cast<size_t>(rank)];
      if (rank == mute_) return stand_by(requests, answers, agreed);
      texts[static_cast<size_t>(rank)] =
          error_of<PeerError>([&] { call(*engines[static_cast<size_t>(rank)], request); });
    });
    return texts;
  }

 private:
  void stand_by(const std::vector<RequestPtr>& requests, bool answers,
                const std::function<void()>& agreed) {
    const Request& request = *requests[static_cast<size_t>(mute_)];
    Report report;
    report.full.push_back({{request.name, 0}, request.description.encode(), ""});
    Writer w;
    report.encode(w);
    channel_->send(0, w.bytes());
    const auto open = [&](const RequestPtr& other) { return !other->handle->done(); };
    while (std::count_if(requests.begin(), requests.end(), open) > 1) {  // but for the mute one's
      std::vector<Message> inbox;
      channel_->receive(1000, inbox);
      for (const Message& message : inbox) {
        Reader r(message.bytes);
        const auto type = message.lost ? MessageType::kFault : r.get<MessageType>();
        if (type == MessageType::kDecision) agreed();
        if (type == MessageType::kPing && answers)
          channel_->send(0, text_message(MessageType::kPong));
      }
    }
  }

  LoopbackHub hub_;
  LoopbackSwitchboard board_;
  const int mute_;
  std::unique_ptr<Channel> channel_;
  std::unique_ptr<Transport> transport_;

 public:
  std::vector<std::unique_ptr<Engine>> engines;  // by rank; none of the mute one
};

}  // namespace bagua
