// Engines as threads over loopback, and requests on vectors of theirs.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "control/loopback_channel.h"
#include "engine/engine.h"
#include "ranks.h"
#include "transport/loopback.h"

namespace bagua {

using NodeOf = std::vector<int>;  // the node of each rank

inline std::string name_of(const NodeOf& node_of) {
  std::string name = "Nodes";
  for (const int node : node_of) name += "_" + std::to_string(node);
  return name;
}

// Ranks by themselves, on one node, and on nodes of equal and unequal size.
inline std::vector<NodeOf> layouts() {
  return {{0},    {0, 1},    {0, 1, 2},    {0, 1, 2, 3, 4},
          {0, 0}, {0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 0, 2}};
}

// The node of each of n ranks, where so many share one: with 1 none do.
inline NodeOf nodes_of(int n, int ranks_per_node) {
  NodeOf node_of;
  for (int rank = 0; rank < n; ++rank) node_of.push_back(rank / ranks_per_node);
  return node_of;
}

// On nodes of several ranks each, few bytes take the way of many.
inline Config quiet_config(const NodeOf& node_of = {}) {
  Config config;
  const std::set<int> nodes(node_of.begin(), node_of.end());
  if (nodes.size() > 1 && nodes.size() < node_of.size()) config.allreduce = "hierarchical";
  config.log_level = "error";
  config.spin_us = 0;              // ranks outnumber the cores
  config.allow_shared_gpu = true;  // some tests have one for all
  // A sanitizer on a loaded machine is slow, but not dead; tests of silence set their own.
  config.peer_timeout_s = 60;
  return config;
}

// Of how many messages more a rank may notice that they have come, and whether it has asked in
// vain; or what breaks when it asks. What is sent may stay behind until the sender, who is told
// that it has left, gives the transport time: by asking in vain, or by progress().
struct Gate {
  std::atomic<int> open{1 << 30};
  std::atomic<bool> shut_out{false};
  std::atomic<bool> broken{false};
  std::atomic<bool> holds_back{false};
};

class GatedTransport : public Transport {
 public:
  GatedTransport(std::unique_ptr<Transport> inner, Gate& gate)
      : inner_(std::move(inner)), gate_(gate) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Ticket send(int peer, int track, const void* data, size_t nbytes) override {
    if (!gate_.holds_back) return inner_->send(peer, track, data, nbytes);
    held_.emplace_back(peer, track, std::string(static_cast<const char*>(data), nbytes));
    return kHeld;
  }
  Ticket recv(int peer, int track, void* data, size_t nbytes) override {
    const Ticket ticket = inner_->recv(peer, track, data, nbytes);
    received_.insert(ticket);
    return ticket;
  }
  bool done(Ticket ticket) override {
    if (ticket == kHeld) return true;
    const bool comes = received_.count(ticket) > 0;
    if (comes && gate_.broken) throw PeerError("the network of this rank is broken");
    const bool open = !comes || gate_.open > 0;
    if (!open || !inner_->done(ticket)) {
      if (open) progress();
      gate_.shut_out = true;
      return false;
    }
    if (comes) --gate_.open;
    received_.erase(ticket);
    return true;
  }
  int peer_of(Ticket ticket) const override {
    return ticket == kHeld ? -1 : inner_->peer_of(ticket);
  }
  void progress() override {
    for (const auto& [peer, track, message] : held_)
      inner_->send(peer, track, message.data(), message.size());
    held_.clear();
    inner_->progress();
  }
  Node* node() override { return inner_->node(); }
  int node_of(int rank) const override { return inner_->node_of(rank); }
  bool abort() override {
    held_.clear();
    return inner_->abort();
  }

 private:
  static constexpr Ticket kHeld = -1;
  const std::unique_ptr<Transport> inner_;
  Gate& gate_;
  std::set<Ticket> received_;
  std::vector<std::tuple<int, int, std::string>> held_;  // with whom each is for, and its track
};

class LoopbackWorld {
 public:
  // With `node_of`, the node of each rank, those of a node share memory.
  explicit LoopbackWorld(int size, const Config& config = quiet_config(),
                         const NodeOf& node_of = {})
      : LoopbackWorld(std::vector<Config>(static_cast<size_t>(size), config), node_of) {}
  // Settings of each rank; most have to agree, which nobody checks here.
  explicit LoopbackWorld(const std::vector<Config>& configs, const NodeOf& node_of = {})
      : hub(static_cast<int>(configs.size()), node_of), board(static_cast<int>(configs.size())) {
    const auto size = static_cast<int>(configs.size());
    std::vector<std::string> names;
    for (int rank = 0; rank < size; ++rank) names.push_back("host h" + std::to_string(rank));
    for (int rank = 0; rank < size; ++rank)
      engines.push_back(std::make_shared<Engine>(
          configs[static_cast<size_t>(rank)],
          std::make_unique<GatedTransport>(hub.connect(rank), gates.emplace_back()),
          board.connect(rank), names));
  }
  explicit LoopbackWorld(const NodeOf& node_of) : LoopbackWorld(node_of, quiet_config(node_of)) {}
  LoopbackWorld(const NodeOf& node_of, const Config& config)
      : LoopbackWorld(static_cast<int>(node_of.size()), config, node_of) {}
  ~LoopbackWorld() { stop(); }

  int size() const { return static_cast<int>(engines.size()); }
  Engine& operator[](int rank) { return *engines[static_cast<size_t>(rank)]; }
  void run(const std::function<void(int)>& body) { run_ranks(size(), body); }

  // All together, as at the end of a program.
  void stop() {
    for (auto& engine : engines)
      if (engine) engine->stop();
    for (auto& engine : engines)
      if (engine) {
        EXPECT_TRUE(engine->wait_stopped(kHangS));
      }
  }
  // What the others see when a rank's process is killed; call it from that rank's thread.
  void die(int rank) {
    board.lose(rank);
    engines[static_cast<size_t>(rank)].reset();
  }

  LoopbackHub hub;
  LoopbackSwitchboard board;
  std::deque<Gate> gates;  // by rank
  std::vector<std::shared_ptr<Engine>> engines;
};

template <class Reached>
void wait_until(Reached&& reached) {
  const double late_s = now_s() + kHangS;
  while (!reached() && now_s() < late_s) std::this_thread::yield();
  ASSERT_TRUE(reached());
}

inline void open_gates(LoopbackWorld& world, int messages) {
  for (Gate& gate : world.gates) gate.open = messages;
}

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DType::kF32;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kI32;
  return DType::kI64;
}

// A request without tensors.
inline RequestPtr request_of(OpKind kind, const std::string& name, int32_t set = 0) {
  auto request = std::make_shared<Request>();
  request->name = name;
  request->set = set;
  request->description.kind = kind;
  return request;
}

// Adds a vector, in place; `rows` other than its size makes it a matrix.
template <class T>
void add_vector(Request& request, std::vector<T>& values, int64_t rows = -1) {
  std::vector<int64_t> shape{static_cast<int64_t>(values.size())};
  if (rows >= 0) shape = {rows, rows ? shape[0] / rows : 1};
  char* data = reinterpret_cast<char*>(values.data());
  request.parts.push_back({data, data});
  request.rows.push_back(shape[0]);
  const bool any = request.description.kind == OpKind::kAllgather ||
                   request.description.kind == OpKind::kAlltoall;
  if (any) shape[0] = kAnyExtent;
  request.description.add_tensor(dtype_of<T>(), shape);
}

template <class T>
RequestPtr allreduce_of(const std::string& name, std::vector<T>& values,
                        ReduceOp op = ReduceOp::kSum, int32_t set = 0) {
  RequestPtr request = request_of(OpKind::kAllreduce, name, set);
  request->description.op = op;
  add_vector(*request, values);
  return request;
}

// Waits and rethrows; a handle that never gets done is an error of its own.
inline void finish(Engine& engine, const HandlePtr& handle) {
  if (!engine.wait(*handle, kHangS)) throw std::runtime_error("a handle was never done");
  handle->rethrow();
}

inline void call(Engine& engine, RequestPtr request) {
  finish(engine, engine.submit(std::move(request), Urgency::kWaited));
}

inline float sum_of_ones(Engine& engine, const std::string& name, int32_t set = 0) {
  std::vector<float> one{1};
  call(engine, allreduce_of(name, one, ReduceOp::kSum, set));
  return one[0];
}

inline int32_t add_set(Engine& engine, const std::vector<int64_t>& ranks) {
  RequestPtr request = request_of(OpKind::kAddProcessSet, "");
  request->description.layout = ranks;
  const HandlePtr handle = request->handle;
  call(engine, std::move(request));
  return static_cast<int32_t>(handle->value);
}

inline void remove_set(Engine& engine, int32_t set) {
  RequestPtr request = request_of(OpKind::kRemoveProcessSet, "");
  request->description.root = set;
  call(engine, std::move(request));
}

inline int64_t join(Engine& engine) {
  RequestPtr request = request_of(OpKind::kJoin, "");
  const HandlePtr handle = request->handle;
  call(engine, std::move(request));
  return handle->value;
}

// The text of the error that `body` throws; empty when it throws none, or one of another kind.
template <class Kind, class Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const Kind& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error than expected: " << error.what();
  }
  return "";
}

// The failure that ends an engine; null if none comes in time.
inline FailurePtr wait_for_failure(Engine& engine) {
  const double late_s = now_s() + kHangS;
  while (!engine.failure() && now_s() < late_s)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return engine.failure();
}

#define EXPECT_CONTAINS(text, part)                          \
  EXPECT_NE(std::string(text).find(part), std::string::npos) \
      << "'" << (text) << "' lacks '" << (part) << "'"

}  // namespace bagua
