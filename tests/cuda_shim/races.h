// A detector of data races between the threads of all ranks, by happens-before, with the scopes and fences of the PTX memory
// model, which ThreadSanitizer does not know. Its eyes are the compiler's: `-fsanitize=thread` calls a function at each access,
// and races.cpp defines these functions. Everything runs on one CPU thread, so nothing here is atomic.
//
// A task is what accesses memory in program order: a thread of a kernel, or a rank's host. Its clock says how far it has seen
// each other task; an access races with an earlier one that its clock does not cover, unless both are strong (of an atomic or
// volatile kind) and each is within the other's scope.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "language.h"

namespace shim {

class Clock {
 public:
  std::uint32_t of(std::uint32_t task) const { return task < at_.size() ? at_[task] : 0; }
  void tick(std::uint32_t task);
  void join(const Clock& other);

 private:
  std::vector<std::uint32_t> at_;
};

// A relaxed store that has not reached memory yet.
struct Pending {
  void* p;
  std::uint32_t bytes;
  std::uint8_t value[16];
};

struct Task {
  std::uint32_t id = 0, rank = 0;
  const void* block = nullptr;
  Clock clock;
  bool fenced = false;  // a release fence: relaxed stores carry what it saw
  Clock fence;
  Scope fence_scope = Scope::kSystem;
  bool watched = false;  // relaxed loads saw something that an acquire fence makes use of
  Clock seen;
  std::uint64_t seen_last = 0;
  // What this task may overwrite though it must not read it. A relaxed load of a word says that all that went before the start of
  // the kernel that stored it has been done, reads included; and a store never overtakes a load that decides about it.
  // The stream's next kernels may, too.
  Clock done;
  std::shared_ptr<const Clock> begun;               // what went before this task's kernel
  std::vector<std::shared_ptr<const Clock>> known;  // of other kernels, that are in `done`
  std::vector<Pending> pending;
};

constexpr std::uint32_t kMostTasks = 8191;

// The memory that is watched: everything else (stacks, the tests' own data) belongs to one task.
void watch(void* memory, std::size_t bytes);
void forget_all();  // as if nothing had ever been accessed, and all of it were zero

void begin_task(Task& task);  // it runs from now on
void describe_tasks(std::function<std::string(std::uint32_t id)> name);
void describe_memory(std::function<std::string(const void*)> name);
// `reader` and `writer` copy after what `task` has done; `barrier`, if there is one, counts up when they are through.
void expect_for(Task& task, std::uint64_t* barrier, std::uint32_t bytes);
void copy_for(Task& task, Task& reader, Task& writer, void* to, const void* from, std::uint32_t bytes,
              std::uint64_t* barrier);
void deliver(Task& task);       // all pending stores reach memory
void deliver_some(Task& task);  // perhaps one of them does
bool changed();                 // whether memory or anything has, since the last question
void note_change();

}  // namespace shim
