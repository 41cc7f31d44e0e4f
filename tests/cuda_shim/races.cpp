#include "races.h"

#include <sys/mman.h>
#include <algorithm>
#include <unordered_map>

#include "machine.h"

namespace shim {
namespace {

// Who made an access, and when by its own clock; pc: where in the program.
struct Access {
  std::uint32_t task : 13, strength : 2, clock : 17;  // strength: its scope, or 0 for an ordinary access
  std::uint32_t pc;
  bool none() const { return clock == 0; }
};
constexpr std::uint32_t kMostClock = (1u << 17) - 1;

// Of each byte: its last write, and who has read it since. Where several reads matter, `read.pc` is the number of a set.
struct Cell {
  Access write, read;
};
constexpr std::uint32_t kSet = kMostTasks;  // as a task's number: `read` is a set of readers
bool operator==(const Cell& a, const Cell& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// What a release store left for those who acquire it.
struct Release {
  Clock clock;
  Scope scope;
  std::uint32_t rank;
  const void* block;
  std::uint64_t number;
};

std::uint8_t* memory = nullptr;
std::size_t memory_bytes = 0;
Cell* cells = nullptr;
std::vector<std::vector<Access>> sets;
std::vector<std::uint32_t> spare_sets;
std::unordered_map<const void*, Release> releases;
std::unordered_map<const void*, std::shared_ptr<const Clock>> origins;  // Task::begun of who stored last
std::vector<const Task*> tasks(kMostTasks);
Task* task = nullptr;  // that runs
std::uint64_t releases_made = 0;
bool has_changed = false;
std::function<std::string(std::uint32_t)> task_name;
std::function<std::string(const void*)> memory_name;

std::uint32_t pc_of(const void* p) { return std::uint32_t(reinterpret_cast<std::uintptr_t>(p)); }

[[noreturn]] void race(const Access& earlier, bool wrote, const Access& now, bool writes, const void* p,
                       std::uint32_t bytes) {
  auto kind = [](const Access& a, bool write) {
    static const char* const scopes[] = {"", "block-scope ", "device-scope ", "system-scope "};
    return std::string(scopes[a.strength]) + (a.strength ? "atomic " : "plain ") + (write ? "write" : "read");
  };
  wrong(
      kRace,
      "DATA RACE: %s of %u bytes by %s at pc 0x%x\n  and earlier %s by %s at pc 0x%x\n  of %s; nothing orders the two",
      kind(now, writes).c_str(), bytes, task_name(now.task).c_str(), now.pc, kind(earlier, wrote).c_str(),
      task_name(earlier.task).c_str(), earlier.pc, memory_name(p).c_str());
}

bool ordered(const Access& a) { return a.none() || a.task == task->id || a.clock <= task->clock.of(a.task); }

bool may_meet(Scope one, Scope other, std::uint32_t rank, const void* block) {
  const Scope least = std::min(one, other);
  return least == Scope::kSystem || (rank == task->rank && (least == Scope::kDevice || block == task->block));
}

bool compatible(const Access& a, const Access& now, bool writes) {
  if (ordered(a) || (writes && a.clock <= task->done.of(a.task))) return true;
  const Task& other = *tasks[a.task];
  return a.strength && now.strength && may_meet(Scope(a.strength), Scope(now.strength), other.rank, other.block);
}

void drop_set(std::uint32_t number) {
  sets[number].clear();
  spare_sets.push_back(number);
}

void add_read(Cell& cell, const Access& now) {
  auto covered = [&](const Access& a) { return ordered(a) && now.strength <= a.strength; };
  if (cell.read.none() || (cell.read.task != kSet && covered(cell.read))) {
    cell.read = now;
    return;
  }
  if (cell.read.task != kSet) {
    if (spare_sets.empty()) {
      spare_sets.push_back(std::uint32_t(sets.size()));
      sets.emplace_back();
    }
    const std::uint32_t number = spare_sets.back();
    spare_sets.pop_back();
    sets[number].push_back(cell.read);
    cell.read = Access{kSet, 0, 1, number};
  }
  std::vector<Access>& set = sets[cell.read.pc];
  set.erase(std::remove_if(set.begin(), set.end(), covered), set.end());
  set.push_back(now);
}

void check(Cell& cell, const Access& now, bool writes, const void* p, std::uint32_t bytes) {
  if (!compatible(cell.write, now, writes)) race(cell.write, true, now, writes, p, bytes);
  if (!writes) return add_read(cell, now);
  if (!cell.read.none()) {
    if (cell.read.task != kSet) {
      if (!compatible(cell.read, now, writes)) race(cell.read, false, now, writes, p, bytes);
    } else {
      for (const Access& a : sets[cell.read.pc])
        if (!compatible(a, now, writes)) race(a, false, now, writes, p, bytes);
      drop_set(cell.read.pc);
    }
  }
  cell.write = now;
  cell.read = {};
}

void access(const void* p, std::size_t bytes, bool writes, std::uint32_t strength, const void* pc) {
  const std::size_t at = std::size_t(static_cast<const std::uint8_t*>(p) - memory);
  if (at >= memory_bytes || !task || !task->id) return;
  const Access now{task->id, strength, task->clock.of(task->id), pc_of(pc)};
  Cell* cell = cells + at;
  Cell before = cell[0];
  check(cell[0], now, writes, p, std::uint32_t(bytes));
  for (std::size_t i = 1; i < bytes; i++) {
    if (cell[i] == before && before.read.task != kSet && cell[i - 1].read.task != kSet) {
      cell[i] = cell[i - 1];
      continue;
    }
    before = cell[i];
    check(cell[i], now, writes, static_cast<const std::uint8_t*>(p) + i, std::uint32_t(bytes));
  }
}

bool acquires(Order order) { return order == Order::kAcquire || order == Order::kAcquireRelease; }
bool releases_too(Order order) { return order == Order::kRelease || order == Order::kAcquireRelease; }

void see(const void* p, Order order, Scope scope) {
  const auto origin = origins.find(p);
  if (origin != origins.end()) {
    const std::shared_ptr<const Clock>& begun = origin->second;
    if (std::find(task->known.begin(), task->known.end(), begun) == task->known.end()) {
      task->known.push_back(begun);
      task->done.join(*begun);
    }
  }
  const auto found = releases.find(p);
  if (found == releases.end()) return;
  const Release& r = found->second;
  if (!may_meet(r.scope, scope, r.rank, r.block)) return;
  if (acquires(order)) return task->clock.join(r.clock);
  if (r.number == task->seen_last) return;
  task->seen_last = r.number;
  task->seen.join(r.clock);
  task->watched = true;
}

void release(const void* p, const Clock& clock, Scope scope, bool joins) {
  Release& r = releases[p];
  if (joins && r.number) {  // an update goes on with the release sequence that it found
    r.clock.join(clock);
    r.number = ++releases_made;
    return;
  }
  r = Release{clock, scope, task->rank, task->block, ++releases_made};
}

void deliver(Task& from, std::size_t i) {
  const Pending& store = from.pending[i];
  std::memcpy(store.p, store.value, store.bytes);
  if (from.begun) origins[store.p] = from.begun;
  releases.erase(store.p);
  from.pending.erase(from.pending.begin() + long(i));
  has_changed = true;
}

// At a barrier of bulk copies. A phase is over when it is known how many bytes belong to it and all have come.
void arrive(std::uint64_t* barrier, const Clock& clock, std::int32_t bytes, std::uint16_t expects, const void* pc) {
  access(barrier, sizeof *barrier, true, std::uint32_t(Scope::kBlock), pc);
  release(barrier, clock, Scope::kBlock, true);
  BulkBarrier now;
  std::memcpy(&now, barrier, sizeof now);
  now.awaited += bytes;
  now.expects = std::uint16_t(now.expects + expects);
  if (now.expects > 1) wrong(kMisuse, "two threads say how many bytes a phase of a barrier has");
  if (now.expects && now.awaited == 0) {
    now.expects = 0;
    now.phases++;
  }
  std::memcpy(barrier, &now, sizeof now);
}

bool overlaps(const Pending& store, const void* p, std::uint32_t bytes) {
  const auto *a = static_cast<const std::uint8_t*>(store.p), *b = static_cast<const std::uint8_t*>(p);
  return a < b + bytes && b < a + store.bytes;
}

void deliver_to(const void* p, std::uint32_t bytes) {
  for (std::size_t i = 0; i < task->pending.size();)
    if (overlaps(task->pending[i], p, bytes))
      deliver(*task, i);
    else
      i++;
}

}  // namespace

void Clock::tick(std::uint32_t id) {
  if (id >= at_.size()) at_.resize(id + 1);
  if (++at_[id] > kMostClock) wrong(kMisuse, "a task has synchronised %u times: make the scenario shorter", kMostClock);
}

void Clock::join(const Clock& other) {
  if (at_.size() < other.at_.size()) at_.resize(other.at_.size());
  std::uint32_t* to = at_.data();
  const std::uint32_t* from = other.at_.data();
  for (std::size_t i = 0; i < other.at_.size(); i++) to[i] = to[i] < from[i] ? from[i] : to[i];
}

void watch(void* p, std::size_t bytes) {
  memory = static_cast<std::uint8_t*>(p);
  memory_bytes = bytes;
  void* m =
      mmap(nullptr, bytes * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) wrong(kMisuse, "no address space for the history of %zu bytes", bytes);
  cells = static_cast<Cell*>(m);
}

void forget_all() {
  madvise(memory, memory_bytes, MADV_DONTNEED);
  madvise(cells, memory_bytes * sizeof(Cell), MADV_DONTNEED);
  sets.clear();
  spare_sets.clear();
  releases.clear();
  origins.clear();
  task = nullptr;
}

void begin_task(Task& t) {
  task = &t;
  tasks[t.id] = &t;
}

void describe_tasks(std::function<std::string(std::uint32_t)> name) { task_name = std::move(name); }
void describe_memory(std::function<std::string(const void*)> name) { memory_name = std::move(name); }
void note_change() { has_changed = true; }

void copy_for(Task& owner, Task& reader, Task& writer, void* to, const void* from, std::uint32_t bytes,
              std::uint64_t* barrier) {
  const void* pc = __builtin_return_address(0);
  deliver(owner);
  for (Task* engine : {&reader, &writer}) {
    engine->clock.join(owner.clock);
    engine->done = owner.done;
    engine->clock.tick(engine->id);
  }
  owner.clock.tick(owner.id);
  begin_task(reader);
  access(from, bytes, false, 0, pc);
  begin_task(writer);
  access(to, bytes, true, 0, pc);
  std::memcpy(to, from, bytes);
  if (barrier) {
    Clock both = reader.clock;
    both.join(writer.clock);
    arrive(barrier, both, -std::int32_t(bytes), 0, pc);
  }
  has_changed = true;
  begin_task(owner);
}

void expect_for(Task& owner, std::uint64_t* barrier, std::uint32_t bytes) {
  deliver(owner);
  arrive(barrier, owner.clock, std::int32_t(bytes), 1, __builtin_return_address(0));
  owner.clock.tick(owner.id);
  has_changed = true;
}

bool changed() {
  const bool was = has_changed;
  has_changed = false;
  return was;
}

void deliver(Task& t) {
  while (!t.pending.empty()) deliver(t, 0);
}

void deliver_some(Task& t) {
  if (!t.pending.empty() && draw(4) == 0) deliver(t, draw(std::uint32_t(t.pending.size())));
}

// ---- what ptx.cuh is made of

void load(const void* p, void* value, std::uint32_t bytes, Order order, Scope scope) {
  pause(2);
  deliver_to(p, bytes);
  access(p, bytes, false, std::uint32_t(scope), __builtin_return_address(0));
  see(p, order, scope);
  std::memcpy(value, p, bytes);
}

// A relaxed store may reach memory late, and after later ones to other places: never after a release, a barrier or the end of its
// kernel, which would promise that it is there.
void store(void* p, const void* value, std::uint32_t bytes, Order order, Scope scope) {
  pause(4);
  access(p, bytes, true, std::uint32_t(scope), __builtin_return_address(0));
  if (releases_too(order)) {
    deliver(*task);
    release(p, task->clock, scope, false);
    task->clock.tick(task->id);
  } else {
    deliver_to(p, bytes);
    if (!task->fenced && draw(3) == 0) {
      Pending late{p, bytes, {}};
      std::memcpy(late.value, value, bytes);
      task->pending.push_back(late);
      if (task->pending.size() > 6) deliver(*task, draw(6));
      return;
    }
    if (task->fenced)
      release(p, task->fence, std::min(scope, task->fence_scope), false);
    else
      releases.erase(p);
  }
  if (task->begun) origins[p] = task->begun;
  std::memcpy(p, value, bytes);
  has_changed = true;
  if (!task->pending.empty()) give_way(8);  // this one has overtaken an earlier one: let others see that
}

void begin_update(void* p, std::uint32_t bytes, Order order, Scope scope) {
  pause(2);
  if (releases_too(order))
    deliver(*task);
  else
    deliver_to(p, bytes);
  access(p, bytes, true, std::uint32_t(scope), __builtin_return_address(0));
  see(p, order, scope);
  if (releases_too(order)) {
    release(p, task->clock, scope, true);
    task->clock.tick(task->id);
  } else if (task->fenced) {
    release(p, task->fence, std::min(scope, task->fence_scope), true);
  }
}

void peek(const void* p, void* value, std::uint32_t bytes) { std::memcpy(value, p, bytes); }
void poke(void* p, const void* value, std::uint32_t bytes) {
  std::memcpy(p, value, bytes);
  has_changed = true;
}

void fence(Order order, Scope scope) {
  pause(4);
  deliver(*task);
  if (acquires(order) && task->watched) task->clock.join(task->seen);
  if (!releases_too(order)) return;
  task->fenced = true;
  task->fence = task->clock;
  task->fence_scope = scope;
  task->clock.tick(task->id);
}

}  // namespace shim

// ---- what the compiler calls at each access of a kernel

#define ACCESS(BYTES)                                                                                           \
  void __tsan_read##BYTES(void* p) { shim::access(p, BYTES, false, 0, __builtin_return_address(0)); }           \
  void __tsan_write##BYTES(void* p) { shim::access(p, BYTES, true, 0, __builtin_return_address(0)); }           \
  void __tsan_unaligned_read##BYTES(void* p) { shim::access(p, BYTES, false, 0, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##BYTES(void* p) { shim::access(p, BYTES, true, 0, __builtin_return_address(0)); } \
  void __tsan_volatile_read##BYTES(void* p) { volatile_access(p, BYTES, false, __builtin_return_address(0)); }  \
  void __tsan_volatile_write##BYTES(void* p) { volatile_access(p, BYTES, true, __builtin_return_address(0)); }  \
  void __tsan_unaligned_volatile_read##BYTES(void* p) {                                                         \
    volatile_access(p, BYTES, false, __builtin_return_address(0));                                              \
  }                                                                                                             \
  void __tsan_unaligned_volatile_write##BYTES(void* p) { volatile_access(p, BYTES, true, __builtin_return_address(0)); }

namespace {
// A volatile access is a relaxed one of the system.
void volatile_access(const void* p, std::uint32_t bytes, bool writes, const void* pc) {
  shim::pause(4);
  if (shim::task) shim::deliver_to(p, bytes);
  shim::access(p, bytes, writes, std::uint32_t(shim::Scope::kSystem), pc);
  if (writes) shim::has_changed = true;
}
}  // namespace

extern "C" {
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* p, std::size_t bytes) { shim::access(p, bytes, false, 0, __builtin_return_address(0)); }
void __tsan_write_range(void* p, std::size_t bytes) { shim::access(p, bytes, true, 0, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
