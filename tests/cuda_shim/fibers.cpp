#include "fibers.h"

#include <sys/mman.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

// Callee-saved registers go on the stack that is left. ucontext, which other processors use, costs a system call each time.
#ifdef __x86_64__
extern "C" void shim_switch(void** from, void* to);
asm(R"(
.text
.globl shim_switch
.type shim_switch, @function
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size shim_switch, .-shim_switch
)");
#endif

namespace shim {

Fiber* self = nullptr;
Fiber outside;

namespace {

constexpr std::size_t kStack = 64 << 10;
constexpr std::uint64_t kLeapNs = 1'000'000'000;

std::uint64_t rng = 1;
std::uint32_t ranks = 1;
std::vector<Block*> active;  // that have a fiber ready to run
const std::vector<Block*>* all_blocks = nullptr;
Block outside_block;
std::uint64_t now_ns = 1'000'000, step = 0, next_end = ~0ull;
std::vector<std::pair<std::uint64_t, Fiber*>> naps;  // until which step

Block* focus = nullptr;  // the block that runs for a while
std::uint32_t slice = 0, favour_for = 0, favoured = 0, idle = 0, leaps = 0;
bool favours = false;

std::uint64_t next_random() {
  rng ^= rng << 13;
  rng ^= rng >> 7;
  return rng ^= rng << 17;
}

void switch_to(Fiber* next) {
  if (next == self) return;
  Fiber* from = self;
  self = next;
  begin_task(next->task);
#ifdef __x86_64__
  shim_switch(&from->sp, next->sp);
#else
  swapcontext(&from->context, &next->context);
#endif
}

void make_unready(Fiber* f) {
  Block& b = *f->block;
  b.ready[f->place] = b.ready.back();
  b.ready[f->place]->place = f->place;
  b.ready.pop_back();
  if (!b.ready.empty()) return;
  active[b.place] = active.back();
  active[b.place]->place = b.place;
  active.pop_back();
}

[[noreturn]] void hang(const char* why) {
  std::string text = why;
  for (const Block* b : *all_blocks) {
    std::map<std::string, std::pair<std::uint32_t, const Fiber*>> kinds;
    if (b->launch)
      for (const Fiber* f : b->fibers) {
        auto& kind = kinds[f->waits ? f->waits : "spinning"];
        if (!kind.first++) kind.second = f;
      }
    for (const auto& [kind, who] : kinds)
      text += "\n  " + where(*who.second) + (who.first > 1 ? " and " + std::to_string(who.first - 1) + " others" : "") +
              ": " + kind;
  }
  wrong(kHang, "%s", text.c_str());
}

// Nothing has changed for long enough that everybody who is ready has looked several times: time leaps, and deadlines pass.
void leap() {
  std::size_t most = 1;
  for (const Block* b : active) most = std::max(most, b->ready.size());
  if (idle < 2000 + 40 * active.size() * most) return;
  now_ns += kLeapNs;
  idle = 0;
  if (++leaps > 100) hang("HANG: somebody waits in vain, and past every deadline");
}

// Between two of its steps a fiber may stand still while all others get far.
void nap() {
  const std::uint64_t end = step + (1u << next_random() % 16);
  naps.emplace_back(end, self);
  next_end = std::min(next_end, end);
  wait_for("its turn");
}

void wake_nappers() {
  step++;
  if (naps.empty() || (step < next_end && !active.empty() && idle < 1000)) return;
  const bool all = active.empty() || idle >= 1000;
  next_end = ~0ull;
  for (std::size_t i = 0; i < naps.size();) {
    if (all || naps[i].first <= step) {
      make_ready(naps[i].second);
      naps[i] = naps.back();
      naps.pop_back();
    } else {
      next_end = std::min(next_end, naps[i++].first);
    }
  }
}

// Mostly one block runs for a while, so that others fall behind by any amount; now and then a rank is favoured or passed over.
Fiber* pick() {
  wake_nappers();
  if (active.empty()) hang("HANG: nobody can run");
  if (changed()) {
    idle = 0;
    leaps = 0;
  } else {
    idle++;
    leap();
  }
  const bool fair = idle > 1000;
  if (slice == 0 || fair || !focus || focus->ready.empty()) {
    if (favour_for == 0) {
      favour_for = next_random() % 8 ? 200 : 20000;
      favoured = std::uint32_t(next_random() % ranks);
      favours = next_random() % 2;
    }
    for (int attempt = 0; attempt < 6; attempt++) {
      focus = active[next_random() % active.size()];
      if (fair || (focus->rank == favoured) == favours) break;
    }
    slice = 1u << next_random() % (focus->ready.size() > 8 ? 12 : 5);
    favour_for -= std::min(favour_for, slice);
  }
  slice--;
  return focus->ready[next_random() % focus->ready.size()];
}

void give_way() { switch_to(pick()); }

}  // namespace

void begin_schedule(std::uint64_t seed, std::uint32_t all_ranks) {
  rng = mix(seed, 77) | 1;
  ranks = all_ranks;
  slice = favour_for = idle = leaps = 0;
  note_change();
  focus = nullptr;
  outside.block = &outside_block;
  self = &outside;
  if (active.empty()) make_ready(&outside);
}

void look_at(const std::vector<Block*>* blocks) { all_blocks = blocks; }

void prepare_stack(Fiber& f, void (*body)()) {
  if (!f.stack) {
    void* p = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) wrong(kMisuse, "no memory for a fiber's stack");
    f.stack = static_cast<std::uint8_t*>(p);
  }
#ifdef __x86_64__
  void** top = reinterpret_cast<void**>(f.stack + kStack - 16);
  *--top = nullptr;  // where a caller's return address would be
  *--top = reinterpret_cast<void*>(body);
  f.sp = top - 6;
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack;
  f.context.uc_stack.ss_size = kStack;
  makecontext(&f.context, body, 0);
#endif
}

void make_ready(Fiber* f) {
  Block& b = *f->block;
  f->waits = nullptr;
  f->place = std::uint32_t(b.ready.size());
  b.ready.push_back(f);
  if (b.ready.size() > 1) return;
  b.place = std::uint32_t(active.size());
  active.push_back(&b);
}

void wait_for(const char* what) {
  self->waits = what;
  make_unready(self);
  focus = nullptr;
  give_way();
}

void end_fiber() {
  note_change();
  wait_for("nothing: it is through");
  std::abort();
}

std::string where(const Fiber& f) {
  char text[160];
  if (&f == &outside) return "the test";
  const std::uint32_t rank = f.block->rank;
  if (!f.block->launch)
    std::snprintf(text, sizeof text, f.body ? "rank %u's host" : "rank %u's thread of a launch that is over", rank);
  else
    std::snprintf(text, sizeof text, "rank %u block %u thread %u (launch %llu)", rank, f.block->index.x, f.number,
                  (unsigned long long)f.block->launch->number);
  return text;
}

// ---- what kernels and hosts call

std::uint64_t timer_ns() { return now_ns; }

std::uint32_t draw(std::uint32_t below) { return std::uint32_t((next_random() >> 16) % below); }

void pause(std::uint32_t one_in) {
  if (!self || self == &outside) return;
  deliver_some(self->task);
  if (draw(one_in) == 0) give_way(256);
}

void give_way(std::uint32_t one_in) {
  if (self != &outside && idle < 500 && draw(one_in) == 0)
    nap();
  else
    give_way();
}

void be_late(std::uint32_t steps) {
  for (; steps; steps--) {
    note_change();
    give_way();
  }
}

}  // namespace shim
