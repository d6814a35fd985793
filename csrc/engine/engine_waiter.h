// How the engine waits inside an exchange: it spins, yields, then sleeps in short naps, and in
// between keeps answering pings and taking note of control messages, so that a dead peer ends the
// exchange and a busy rank 0 still coordinates other process sets. What is submitted meanwhile is
// reported, so that the next exchange is agreed on when this one ends; between hosts it begins and
// goes on meanwhile.
#pragma once

#include "engine/patience.h"
#include "transport/transport.h"

namespace bagua {

class Engine;

class EngineWaiter : public Waiter {
 public:
  EngineWaiter(Engine& engine, double spin_us) : engine_(engine), patience_(spin_us) {}
  void begin(int peer) override;
  void pause(Node* node) override;
  void look() override;

 private:
  Engine& engine_;
  Patience patience_;
  double began_s_ = 0;
  double looked_s_ = 0;
  double warned_s_ = 0;
  int pauses_ = 0;
  int peer_ = -1;
  int nap_us_ = 0;
};

}  // namespace bagua
