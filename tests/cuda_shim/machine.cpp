#include "machine.h"

#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <deque>

#include "fibers.h"

namespace shim {

struct Event {
  bool over = false;
  Clock clock;
};

// Threads and blocks of launches that are over.
struct Spare {
  std::vector<Fiber*> fibers;
  std::vector<Block*> blocks;
};

struct Work {  // one of these
  std::shared_ptr<Launch> launch;
  std::shared_ptr<Event> record, wait;
};

struct Stream {
  DeviceState* device = nullptr;
  Fiber* fiber = nullptr;  // that starts what comes next
  Block block;
  std::deque<Work> queue;
  std::vector<std::shared_ptr<Launch>> running;
  std::shared_ptr<Launch> last;  // the work before, if that was a launch
  Clock after, after_done;       // what is over, and what of others its tasks knew to be (Task::done)
  Clock base, base_done;         // what was, when the last launch started that came after all before it
  Spare spare, ended;            // before that, and since
};

struct DeviceState {
  Device* device;
  Fiber* host = nullptr;
  Block host_block;
  Stream streams[kStreams];
  std::uint64_t launched = 0;
  bool host_waits = false;
};

namespace {

constexpr std::size_t kBlockMemory = 128 << 10, kMostBlocks = 256;
constexpr std::uint8_t kUndefined = 0xa5;

const char* scenario = "?";
std::uint64_t scenario_seed = 0;
std::uint32_t next_task = 1, shared_taken = 0, hosts_left = 0;
std::uint8_t *watched = nullptr, *shared_memories = nullptr;
std::vector<Fiber*> all_fibers, spare_fibers;  // stacks are used again by later worlds
std::vector<Block*> all_blocks;
World* world = nullptr;

bool waits_for(const Fiber* f, const char* what) { return f->waits && std::strcmp(f->waits, what) == 0; }

void look_again(Stream& s) {
  if (s.fiber && waits_for(s.fiber, "work")) make_ready(s.fiber);
}

// Each has seen what all of them have.
void meet(const std::vector<Fiber*>& fibers) {
  Clock clock, done;
  for (const Fiber* f : fibers) {
    clock.join(f->task.clock);
    done.join(f->task.done);
  }
  for (Fiber* f : fibers) {
    f->task.clock = clock;
    f->task.clock.tick(f->task.id);
    f->task.done = done;
  }
}

void allow_next(Fiber& f) {
  if (f.allows) return;
  f.allows = true;
  Block& b = *f.block;
  Launch& launch = *b.launch;
  if (++b.allowed != b.fibers.size() || ++launch.allowing != launch.blocks.size()) return;
  look_again(*launch.stream);
}

// ---- a fiber's life

void end_launch(Launch* launch) {
  Stream& s = *launch->stream;
  for (Block* b : launch->blocks) {
    for (std::size_t at = launch->shape.shared_bytes; at < kBlockMemory / 2; at++)
      if (b->shared[at] != kUndefined)
        wrong(kMisuse, "block %u of launch %llu wrote byte %zu of its %zu of dynamic shared memory", b->index.x,
              (unsigned long long)launch->number, at, launch->shape.shared_bytes);
    s.ended.blocks.push_back(b);
    s.ended.fibers.insert(s.ended.fibers.end(), b->fibers.begin(), b->fibers.end());
    b->launch = nullptr;
  }
  launch->over = true;
  launch->before.reset();
  s.after.join(launch->end);
  s.after_done.join(launch->done);
  s.running.erase(std::find_if(s.running.begin(), s.running.end(), [&](auto& l) { return l.get() == launch; }));
  for (auto& l : s.running)
    for (Block* b : l->blocks)
      for (Fiber* f : b->fibers)
        if (waits_for(f, "the launch before")) make_ready(f);
  look_again(s);
}

[[noreturn]] void run_body() {
  Fiber& f = *self;
  Block& b = *f.block;
  (b.launch ? b.launch->body : f.body)();
  deliver(f.task);
  if (b.launch) {
    b.launch->end.join(f.task.clock);
    b.launch->done.join(f.task.done);
    f.task.clock.tick(f.task.id);
    allow_next(f);  // who ends allows it, too
    if (--b.running == 0 && --b.launch->running == 0) end_launch(b.launch);
  } else if (--hosts_left == 0 && outside.waits) {
    make_ready(&outside);
  }
  end_fiber();
}

std::uint32_t new_task() {
  if (next_task == kMostTasks) wrong(kMisuse, "more than %u threads: make the blocks smaller", kMostTasks);
  return next_task++;
}

Fiber* new_fiber(std::vector<Fiber*>& spare) {
  if (!spare.empty()) {
    Fiber* f = spare.back();
    spare.pop_back();
    return f;
  }
  if (spare_fibers.empty()) {
    all_fibers.push_back(new Fiber);
    spare_fibers.push_back(all_fibers.back());
  }
  Fiber* f = spare_fibers.back();
  spare_fibers.pop_back();
  f->task.id = new_task();
  return f;
}

void start_fiber(Fiber* f, Block* b, std::uint32_t number) {
  f->block = b;
  f->number = number;
  f->allows = false;
  f->task.rank = b->rank;
  f->task.block = b;
  f->task.fenced = f->task.watched = false;
  f->task.done = Clock();
  f->task.known.clear();
  prepare_stack(*f, run_body);
  f->task.clock.tick(f->task.id);
  b->fibers.push_back(f);
  make_ready(f);
}

Block* new_block(DeviceState& d, std::vector<Block*>& spare) {
  Block* b;
  if (!spare.empty()) {
    b = spare.back();
    spare.pop_back();
  } else {
    b = new Block;
    all_blocks.push_back(b);
    if (shared_taken == kMostBlocks) wrong(kMisuse, "more than %zu blocks", kMostBlocks);
    b->shared = shared_memories + kBlockMemory * shared_taken++;
    b->device = &d;
    b->rank = d.device->rank;
  }
  b->fibers.clear();
  b->variables.clear();
  b->allowed = 0;
  std::memset(b->shared, kUndefined, kBlockMemory);  // not what the block before left
  return b;
}

// ---- streams

template <class T>
void move_all(std::vector<T>& from, std::vector<T>& to) {
  to.insert(to.end(), from.begin(), from.end());
  from.clear();
}

void start(Stream& s, const std::shared_ptr<Launch>& launch) {
  const Shape& shape = launch->shape;
  auto begun = std::make_shared<Clock>(launch->host);
  if (shape.programmatic && s.last) {
    launch->before = s.last;
  } else {
    s.base = s.after;
    s.base_done = s.after_done;
    move_all(s.ended.fibers, s.spare.fibers);
    move_all(s.ended.blocks, s.spare.blocks);
  }
  begun->join(s.base);
  const Dim g = shape.grid, n = shape.block;
  for (std::uint32_t i = 0; i < g.x * g.y * g.z; i++) {
    Block* b = new_block(*s.device, s.spare.blocks);
    b->launch = launch.get();
    b->index = {i % g.x, i / g.x % g.y, i / g.x / g.y};
    b->shared_used = kBlockMemory / 2;
    launch->blocks.push_back(b);
    b->running = n.x * n.y * n.z;
    for (std::uint32_t t = 0; t < b->running; t++) {
      Fiber* f = new_fiber(s.spare.fibers);
      f->index = {t % n.x, t / n.x % n.y, t / n.x / n.y};
      f->task.clock.join(*begun);
      f->task.begun = begun;
      start_fiber(f, b, t);
      f->task.done = s.base_done;
    }
  }
  launch->running = std::uint32_t(launch->blocks.size());
  s.running.push_back(launch);
  note_change();
}

// Whether the first of the queue has been done.
bool take(Stream& s) {
  const Work work = s.queue.front();
  const bool early = work.launch && work.launch->shape.programmatic && s.last &&
                     (s.last->over || s.last->allowing == s.last->blocks.size());
  if (!s.running.empty() && !early) return false;
  if (work.wait) {
    if (!work.wait->over) return false;
    s.after.join(work.wait->clock);
  } else if (work.record) {
    work.record->over = true;
    work.record->clock = s.after;
    for (Stream& other : s.device->streams) look_again(other);
  } else {
    start(s, work.launch);
  }
  s.last = work.launch;
  s.queue.pop_front();
  return true;
}

void serve(Stream& s) {
  for (;;) {
    while (!s.queue.empty()) {
      give_way(8);  // what could start may start late
      if (!take(s)) break;
    }
    DeviceState& d = *s.device;
    if (d.host_waits) make_ready(d.host);
    d.host_waits = false;
    wait_for("work");
  }
}

void enqueue_work(DeviceState& d, std::uint32_t stream, Work work) {
  pause(1);
  Stream& s = d.streams[stream];
  if (work.launch) {
    work.launch->stream = &s;
    work.launch->host = d.host->task.clock;
    d.host->task.clock.tick(d.host->task.id);
  }
  s.queue.push_back(std::move(work));
  if (s.fiber) return look_again(s);
  std::vector<Fiber*> none;
  s.device = &d;
  s.block.rank = d.device->rank;
  s.fiber = new_fiber(none);
  s.fiber->body = [&s] { serve(s); };
  start_fiber(s.fiber, &s.block, 0);
}

std::string memory_name(const void* p) {
  char text[96];
  auto at = std::size_t(static_cast<const std::uint8_t*>(p) - watched);
  const std::size_t windows = World::kWindow * world->ranks, all = windows + World::kMemory * world->ranks;
  if (at < windows)
    std::snprintf(text, sizeof text, "rank %zu's window + 0x%zx", at / World::kWindow, at % World::kWindow);
  else if (at < all)
    std::snprintf(text, sizeof text, "rank %zu's own memory + 0x%zx", (at - windows) / World::kMemory,
                  (at - windows) % World::kMemory);
  else
    std::snprintf(text, sizeof text, "shared memory + 0x%zx", at % kBlockMemory);
  return text;
}

std::string task_name(std::uint32_t id) {
  for (const Fiber* f : all_fibers)
    if (f->task.id == id)
      return where(*f);
    else if (f->reader.id == id || f->writer.id == id)
      return "a bulk copy of " + where(*f);
  return "?";
}

}  // namespace

// ---- what kernels call

Dim thread_index() { return self->index; }
Dim block_index() { return self->block->index; }
Dim block_dim() { return self->block->launch->shape.block; }
Dim grid_dim() { return self->block->launch->shape.grid; }
std::uint32_t lane() { return self->number % 32; }

void barrier(std::uint32_t number, std::uint32_t threads) {
  Block& block = *self->block;
  if (number >= 16 || threads % 32 || !threads || threads > block.fibers.size())
    wrong(kMisuse, "%s: barrier %u of %u threads: a block of %zu threads has barriers 0 to 15, of a multiple of 32",
          where(*self).c_str(), number, threads, block.fibers.size());
  deliver(self->task);
  Barrier& b = block.barriers[number];
  if (b.here.empty()) b.threads = threads;
  if (b.threads != threads)
    wrong(kMisuse, "%s: barrier %u of %u threads; others are at it with %u", where(*self).c_str(), number, threads,
          b.threads);
  b.here.push_back(self);
  if (b.here.size() < threads) return wait_for("a barrier");
  meet(b.here);
  std::uint32_t votes = 0;
  for (const Fiber* f : b.here) votes += f->vote;
  for (Fiber* f : b.here) {
    f->votes = votes;
    if (f != self) make_ready(f);
  }
  b.here.clear();
  note_change();
  pause(2);
}

std::uint32_t votes_at_barrier(bool vote) {
  self->vote = vote;
  barrier(0, std::uint32_t(self->block->fibers.size()));
  self->vote = false;
  return self->votes;
}

Lanes exchange(const char* operation, std::uint32_t mask, std::uint64_t value) {
  Block& block = *self->block;
  const std::uint32_t warp = self->number / 32, me = 1u << lane();
  if (!(mask & me))
    wrong(kMisuse, "%s: %s with mask %x, of which it is no part", where(*self).c_str(), operation, mask);
  const bool orders = std::strcmp(operation, "syncwarp") == 0;
  if (orders) deliver(self->task);
  auto g = std::find_if(block.gatherings.begin(), block.gatherings.end(),
                        [&](const Gathering& x) { return x.warp == warp && (x.mask & mask); });
  if (g == block.gatherings.end()) g = block.gatherings.insert(g, Gathering{warp, mask, 0, operation, {}});
  if (g->mask != mask || std::strcmp(g->operation, operation) != 0)
    wrong(kMisuse, "%s: %s with mask %x, while lanes of its warp are at %s with mask %x", where(*self).c_str(),
          operation, mask, g->operation, g->mask);
  g->fibers[lane()] = self;
  g->here |= me;
  self->lanes.value[0] = value;
  if (g->here != mask) {
    wait_for(operation);
    return self->lanes;
  }
  Lanes all{};
  std::vector<Fiber*> here;
  for (std::uint32_t i = 0; i < 32; i++)
    if (mask >> i & 1) {
      here.push_back(g->fibers[i]);
      all.value[i] = here.back()->lanes.value[0];
    }
  if (orders) meet(here);
  for (Fiber* f : here) {
    f->lanes = all;
    if (f != self) make_ready(f);
  }
  block.gatherings.erase(g);
  note_change();
  pause(2);
  return all;
}

void* shared_memory(const void* variable, std::size_t bytes, std::size_t align) {
  if (!self || !self->block->launch) wrong(kMisuse, "a __shared__ variable outside of a kernel's functions");
  Block& b = *self->block;
  const auto found = b.variables.find(variable);
  if (found != b.variables.end()) return b.shared + found->second;
  const std::size_t at = (b.shared_used + align - 1) / align * align;
  if (at + bytes > kBlockMemory) wrong(kMisuse, "a block has %zu bytes of shared memory here", kBlockMemory);
  b.shared_used = at + bytes;
  b.variables[variable] = at;
  return b.shared + at;
}

void* dynamic_shared_memory() { return self->block->shared; }

void bulk_copy(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  if ((reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | bytes) % 16)
    wrong(kMisuse, "%s: a bulk copy of %u bytes from %p to %p: all must be multiples of 16", where(*self).c_str(),
          bytes, from, to);
  pause(4);
  for (Task* engine : {&self->reader, &self->writer}) {
    if (!engine->id) engine->id = new_task();
    engine->rank = self->task.rank;
    engine->block = self->task.block;
  }
  copy_for(self->task, self->reader, self->writer, to, from, bytes, barrier);
}

void bulk_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  pause(4);
  expect_for(self->task, barrier, bytes);
}

void bulk_commit() {
  self->read = self->reader.clock;
  self->written = self->writer.clock;
}

void bulk_wait(bool arrived) {
  self->task.clock.join(self->read);
  if (arrived) self->task.clock.join(self->written);
}

void let_next_launch_start() { allow_next(*self); }

void wait_for_launch_before() {
  const std::shared_ptr<Launch> before = self->block->launch->before;
  if (!before) return;  // it has started after it
  while (!before->over) wait_for("the launch before");
  self->task.clock.join(before->end);
}

// ---- devices

Device::Device(World& w, std::uint32_t r)
    : world(w), rank(r), ranks(w.ranks), plan{mix(w.seed, 14)}, own{mix(w.seed, 15, r + 1)}, state(new DeviceState) {
  window = w.base + World::kWindow * r;
  memory = w.base + World::kWindow * w.ranks + World::kMemory * r;
  state->device = this;
  state->host_block.device = state.get();
  state->host_block.rank = r;
}

Device::~Device() {
  auto spare = [](Fiber* f) {
    if (!f) return;
    f->task = f->reader = f->writer = Task{};
    f->waits = nullptr;
    f->body = nullptr;
    spare_fibers.push_back(f);
  };
  spare(state->host);
  for (Stream& s : state->streams) {
    spare(s.fiber);
    for (Spare* all : {&s.spare, &s.ended})
      for (Fiber* f : all->fibers) spare(f);
  }
}

Fiber* Device::host() const { return state->host; }

void Device::synchronize() {
  DeviceState& d = *state;
  auto idle = [&] {
    for (const Stream& s : d.streams)
      if (s.fiber && !(s.queue.empty() && s.running.empty() && waits_for(s.fiber, "work"))) return false;
    return true;
  };
  while (!idle()) {
    d.host_waits = true;
    wait_for("its streams");
  }
  for (const Stream& s : d.streams) d.host->task.clock.join(s.after);
}

void Device::enqueue(const Shape& shape, std::function<void()> kernel) {
  if (shape.shared_bytes > kBlockMemory / 2) wrong(kMisuse, "%zu bytes of dynamic shared memory", shape.shared_bytes);
  auto launch = std::make_shared<Launch>();
  launch->shape = shape;
  launch->body = std::move(kernel);
  launch->number = state->launched++;
  enqueue_work(*state, shape.stream, {launch, nullptr, nullptr});
}

std::shared_ptr<Event> Device::record(std::uint32_t stream) {
  auto event = std::make_shared<Event>();
  enqueue_work(*state, stream, {nullptr, event, nullptr});
  return event;
}

void Device::wait(std::uint32_t stream, std::shared_ptr<Event> event) {
  enqueue_work(*state, stream, {nullptr, nullptr, std::move(event)});
}

World::World(std::uint64_t s, std::uint32_t n) : seed(s), ranks(n) {
  constexpr std::size_t kMost = 8;
  constexpr std::size_t bytes = kMost * (kWindow + kMemory) + kMostBlocks * kBlockMemory;
  if (n < 1 || n > kMost) wrong(kMisuse, "a world of %u ranks: 1 to %zu fit", n, kMost);
  if (!watched) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) wrong(kMisuse, "no memory");
    watched = static_cast<std::uint8_t*>(p);
    shared_memories = watched + bytes - kMostBlocks * kBlockMemory;
    watch(watched, bytes);
    describe_tasks(task_name);
    describe_memory(memory_name);
  }
  forget_all();
  base = watched;
  world = this;
  next_task = 1;
  shared_taken = 0;
  begin_schedule(s, n);
  look_at(&all_blocks);
  for (std::uint32_t r = 0; r < n; r++) devices_.push_back(std::make_unique<Device>(*this, r));
}

World::~World() {
  for (Block* b : all_blocks) delete b;
  all_blocks.clear();
  devices_.clear();
  forget_all();
}

void World::run(const std::function<void(Device&)>& program) {
  start(program);
  finish();
}

void World::start(std::function<void(Device&)> program) {
  hosts_left = ranks;
  program_ = std::move(program);
  std::vector<Fiber*> none;
  for (auto& device : devices_) {
    DeviceState& d = *device->state;
    if (!d.host) d.host = new_fiber(none);
    d.host_block.fibers.clear();
    d.host->body = [this, &device] {
      program_(*device);
      device->synchronize();
    };
    start_fiber(d.host, &d.host_block, 0);
  }
}

void World::finish() {
  while (hosts_left) wait_for("the ranks");
  for (auto& device : devices_)  // whoever runs next, comes after all of these
    for (auto& other : devices_) device->state->host->task.clock.join(other->state->host->task.clock);
}

// ---- the program

std::uint64_t mix(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
  std::uint64_t x = a;
  for (std::uint64_t more : {b, c, d}) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x = (x ^ (x >> 31)) + more;
  }
  return x;
}

void announce(const char* name, std::uint64_t seed) {
  scenario = name;
  scenario_seed = seed;
}

void wrong(Exit code, const char* format, ...) {
  std::fprintf(stderr, "WRONG in scenario %s, seed %llu%s: ", scenario, (unsigned long long)scenario_seed,
               self && self != &outside && code == kWrong ? (", " + where(*self)).c_str() : "");
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::fflush(stderr);
  _exit(code);
}

int run_scenarios(int argc, char** argv, const std::vector<Scenario>& scenarios) {
  std::uint64_t first = 1, count = 1;
  std::vector<Scenario> chosen;
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--seeds") == 0 && i + 2 < argc) {
      first = std::strtoull(argv[++i], nullptr, 10);
      count = std::strtoull(argv[++i], nullptr, 10);
      continue;
    }
    const std::size_t before = chosen.size();
    for (const Scenario& s : scenarios)
      if (std::strcmp(argv[i], s.name) == 0 || std::strcmp(argv[i], "all") == 0) chosen.push_back(s);
    if (chosen.size() == before) wrong(kMisuse, "no scenario is called %s", argv[i]);
  }
  for (std::uint64_t seed = first; seed < first + count; seed++)
    for (const Scenario& s : chosen) {
      announce(s.name, seed);
      s.run(seed);
      std::printf("%-12s seed %llu\n", s.name, (unsigned long long)seed);
      std::fflush(stdout);
    }
  return chosen.empty() ? kMisuse : 0;
}

}  // namespace shim
