// XLA's custom calls between devices of one process: each rank leaves its buffers, and the last one copies for all.
//
// Devices meet by {call site, run, group}. A call site is an instance that XLA makes for each custom call of an executable, so
// that one function called twice in a program is two sites; a run is one execution of the executable on all its devices.
// A loop comes to its site again and again: a meeting leaves the table when its last rank arrives, and no rank can come to
// the next one before it has left this one.
// VISIBLE  everything here is one process: a rank's buffers are handed over under the mutex, and results by XLA's futures.
// REUSE    XLA keeps a call's buffers until its future is resolved, and all are resolved after the last copy.
// PROGRESS no handler waits. XLA may run all devices on one thread, in turn: a rank leaves its buffers and a future, and the
//          last one to arrive copies for all.
// FAILURE  a meeting that isn't complete at its deadline is dissolved by the timer's thread: each future gets an error that
//          names the missing ranks, and so does a rank that comes later.
#include <pthread.h>
#include <time.h>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "compat.h"
#include "jax_ffi.h"
#include "signal.h"
#include "simd.h"

namespace a2a {
namespace jax {

using namespace xla;

namespace {

struct Meeting {
  Meeting* next;
  const void* site;
  std::int64_t run, group;
  std::uint32_t world, arrived;
  std::uint64_t deadline_ns;
  double timeout_s;
  Call* calls;  // [world]; whose future is null has not arrived
};
struct Missed {  // a meeting that was dissolved, for those who come later
  const void* site;
  std::int64_t run, group;
};
constexpr std::uint32_t kMissed = 64;

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // guards all below
Meeting* meetings = nullptr;
Missed missed[kMissed];
std::uint32_t num_missed = 0;
pthread_cond_t earlier;  // a deadline came before what the timer sleeps for
bool timer_runs = false;
std::uint64_t timer_until_ns = 0;

void say_missing(const Meeting& m, char* message, std::size_t bytes) {
  const char* what = "";
  char names[256] = "";
  std::size_t at = 0;
  for (std::uint32_t r = 0; r < m.world; r++) {
    if (m.calls[r].future)
      what = m.calls[r].what;
    else if (at < sizeof names - 16)
      at += std::size_t(std::snprintf(names + at, sizeof names - at, "%s%u", at ? ", " : "", r));
  }
  std::snprintf(
      message, bytes,
      "%s: %u of %u ranks waited %.1f s for rank %s. All devices along the axis must make this call: did one take "
      "another branch, or fail? The limit is timeout_s, or A2A_TIMEOUT_S",
      what, m.arrived, m.world, m.timeout_s, names);
}

void dissolve(Meeting* m) {
  char message[1024];
  say_missing(*m, message, sizeof message);
  for (std::uint32_t r = 0; r < m->world; r++)
    if (m->calls[r].future) resolve(m->calls[r].api, m->calls[r].future, kDeadlineExceeded, message);
  std::free(m->calls);
  std::free(m);
}

void* timer(void*) {
  pthread_mutex_lock(&mutex);
  for (;;) {
    const std::uint64_t now = now_ns();
    Meeting* late = nullptr;
    timer_until_ns = now + 3'600'000'000'000ull;
    for (Meeting** p = &meetings; *p; p = &(*p)->next) {
      if ((*p)->deadline_ns <= now) {
        late = *p;
        *p = late->next;
        missed[num_missed++ % kMissed] = {late->site, late->run, late->group};
        break;
      }
      if ((*p)->deadline_ns < timer_until_ns) timer_until_ns = (*p)->deadline_ns;
    }
    if (late) {  // XLA may go on with the program in here
      pthread_mutex_unlock(&mutex);
      dissolve(late);
      pthread_mutex_lock(&mutex);
      continue;
    }
    const timespec until{time_t(timer_until_ns / 1'000'000'000u), long(timer_until_ns % 1'000'000'000u)};
    pthread_cond_timedwait(&earlier, &mutex, &until);
  }
  return nullptr;
}

bool start_timer() {  // the mutex is held
  if (timer_runs) return true;
  pthread_condattr_t clock;
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_cond_init(&earlier, &clock);
  pthread_t thread;
  timer_runs = pthread_create(&thread, nullptr, timer, nullptr) == 0;
  if (timer_runs) pthread_detach(thread);
  return timer_runs;
}

void copy(std::uint8_t* out, const std::uint8_t* in, std::uint64_t bytes) {
  if (bytes >= (2u << 20))
    simd().copy_stream(out, in, bytes);
  else if (bytes)
    std::memcpy(out, in, bytes);
}

// False, with a message: the ranks' lists don't fit together.
bool exchange(const Meeting& m, char* message, std::size_t bytes) {
  for (std::uint32_t r = 0; r < m.world; r++)
    for (std::uint32_t p = 0; p < m.world; p++) {
      const Call &from = m.calls[p], &to = m.calls[r];
      if (from.ragged != to.ragged || from.piece != to.piece || from.row_bytes != to.row_bytes) {
        std::snprintf(message, bytes, "%s: ranks %u and %u bring pieces of different sizes", to.what, r, p);
        return false;
      }
      if (to.ragged && !piece_fits(to, p, from.send[r], from.out_offset[r], message, bytes)) return false;
      if (to.ragged && !own_piece_fits(from, r, message, bytes)) return false;
    }
  for (std::uint32_t r = 0; r < m.world; r++)
    for (std::uint32_t p = 0; p < m.world; p++) {
      const Call &from = m.calls[p], &to = m.calls[r];
      if (!to.ragged)
        copy(to.out + p * to.piece, from.in + r * to.piece, to.piece);
      else
        copy(to.out + from.out_offset[r] * std::int64_t(to.row_bytes),
             from.in + from.in_offset[r] * std::int64_t(to.row_bytes), std::uint64_t(from.send[r]) * to.row_bytes);
    }
  return true;
}

struct Wakeup {
  const Api* api;
  Future* future;
};
void wake_up(void* data) {
  const Wakeup w = *static_cast<Wakeup*>(data);
  std::free(data);
  resolve(w.api, w.future, kInternal, nullptr);
}

// Whoever resolves a future goes on with that device's program: one of XLA's threads for each, rather than this one for all.
void resume(Execution* execution, const Call& call) {
  auto* w = static_cast<Wakeup*>(std::malloc(sizeof(Wakeup)));
  *w = {call.api, call.future};
  Schedule args{sizeof args, nullptr, execution, wake_up, w};
  if (Error* failed = call.api->schedule(&args)) {  // there are no threads
    struct {
      std::size_t size;
      Extension* extensions;
      Error* error;
    } destroy{sizeof destroy, nullptr, failed};
    call.api->error_destroy(&destroy);
    wake_up(w);
  }
}

// All have arrived: `last` is the rank whose handler runs this.
Error* complete(CallFrame* f, Meeting* m, std::uint32_t last) {
  char message[1024];
  const bool fine = exchange(*m, message, sizeof message);
  for (std::uint32_t r = 0; r < m->world; r++) {
    const Call& call = m->calls[r];
    if (r == last) continue;
    if (fine)
      resume(f->execution, call);
    else
      resolve(call.api, call.future, kInvalidArgument, message);
  }
  std::free(m->calls);
  std::free(m);
  return fine ? nullptr : error(f->api, kInvalidArgument, message);
}

Meeting* find_meeting(const void* site, std::int64_t run, const Call& call) {  // the mutex is held
  for (Meeting* m = meetings; m; m = m->next)
    if (m->site == site && m->run == run && m->group == call.group) return m;
  auto* m = static_cast<Meeting*>(std::calloc(1, sizeof(Meeting)));
  m->site = site;
  m->run = run;
  m->group = call.group;
  m->world = call.world;
  m->timeout_s = call.timeout_s;
  m->deadline_ns = now_ns() + std::uint64_t(call.timeout_s * 1e9);
  m->calls = static_cast<Call*>(std::calloc(call.world, sizeof(Call)));
  m->next = meetings;
  meetings = m;
  if (m->deadline_ns < timer_until_ns) pthread_cond_signal(&earlier);
  return m;
}

}  // namespace

Error* meet(CallFrame* f, Call& call, const void* site) {
  RunId run{sizeof run, nullptr, f->execution, 0};
  if (Error* failed = f->api->run_id_get(&run)) return failed;
  pthread_mutex_lock(&mutex);
  for (const Missed& gone : missed)
    if (gone.site == site && gone.run == run.id && gone.group == call.group) {
      pthread_mutex_unlock(&mutex);
      return errorf(f->api, kDeadlineExceeded, "%s: rank %u came after the other ranks had given up (timeout_s=%g)",
                    call.what, call.rank, call.timeout_s);
    }
  if (!start_timer()) {
    pthread_mutex_unlock(&mutex);
    return errorf(f->api, kInternal, "%s: no thread can be started (%s)", call.what, std::strerror(errno));
  }
  Meeting* m = find_meeting(site, run.id, call);
  if (m->calls[call.rank].future) {
    pthread_mutex_unlock(&mutex);
    return errorf(f->api, kInternal, "%s: rank %u came twice before the others came once", call.what, call.rank);
  }
  const bool all = m->arrived + 1 == m->world;
  Error* failed = all ? nullptr : make_future(f->api, &call.future);
  if (!failed) {
    m->calls[call.rank] = call;
    m->arrived++;
    f->future = call.future;  // null for the last one, whose result is there when it returns
  }
  if (all)
    for (Meeting** p = &meetings; *p; p = &(*p)->next)
      if (*p == m) {
        *p = m->next;
        break;
      }
  pthread_mutex_unlock(&mutex);
  return all ? complete(f, m, call.rank) : failed;
}

}  // namespace jax
}  // namespace a2a
