// What runs on the machine: fibers in blocks, and who of them runs next. machine.cpp gives them something to do.
#pragma once
#include <ucontext.h>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "machine.h"
#include "races.h"

namespace shim {

struct Block;
struct Launch;
struct Stream;

struct Fiber {
  Task task, reader, writer;  // what it does, and what the copy engine does for it
  Clock read, written;        // of the engine, when it was last committed to
  Block* block = nullptr;
  Dim index;
  std::uint32_t number = 0;     // in its block
  std::uint32_t place = 0;      // in block->ready, while it is there
  const char* waits = nullptr;  // what for, while it is not
  bool vote = false;            // at the barrier
  std::uint32_t votes = 0;
  bool allows = false;  // the next launch to start
  Lanes lanes;
  std::uint8_t* stack = nullptr;
  void* sp = nullptr;  // while it does not run
  ucontext_t context;
  std::function<void()> body;
};

struct Barrier {
  std::uint32_t threads = 0;
  std::vector<Fiber*> here;
};

// Lanes of a warp that have come to one exchange; the others of its mask are awaited.
struct Gathering {
  std::uint32_t warp, mask, here;
  const char* operation;
  Fiber* fibers[32];
};

struct Block {
  DeviceState* device = nullptr;
  std::uint32_t rank = 0;
  Launch* launch = nullptr;  // none: a host program
  Dim index;
  std::vector<Fiber*> fibers, ready;
  std::uint32_t place = 0;  // in `active`, while one of its fibers is ready
  std::uint32_t running = 0;
  Barrier barriers[16];
  std::vector<Gathering> gatherings;
  std::map<const void*, std::size_t> variables;
  std::size_t shared_used = 0;
  std::uint8_t* shared = nullptr;
  std::uint32_t allowed = 0;  // threads that have let the next launch start
};

struct Launch {
  Shape shape;
  std::function<void()> body;
  Clock host;  // what the host had seen
  std::vector<Block*> blocks;
  std::uint32_t running = 0, allowing = 0;  // blocks
  std::uint64_t number = 0;
  bool over = false;
  Clock end, done;                 // what it did, and what of others its tasks knew to be over
  Stream* stream = nullptr;
  std::shared_ptr<Launch> before;  // that a programmatic one can wait for
};

extern Fiber* self;    // that runs
extern Fiber outside;  // the test, which makes worlds

void begin_schedule(std::uint64_t seed, std::uint32_t ranks);  // nobody runs but the test
void prepare_stack(Fiber& fiber, void (*body)());
void make_ready(Fiber* fiber);
void wait_for(const char* what);  // until somebody makes this fiber ready; `what` is for reports
[[noreturn]] void end_fiber();    // its stack may be used again
std::string where(const Fiber& fiber);
void look_at(const std::vector<Block*>* blocks);  // which a report of a hang is about

}  // namespace shim
