// One progress thread per context. A synchronous call runs inline when the queue is empty and otherwise waits until it is:
// ranks agree on the order of their collectives, so the order of submission is the order of execution everywhere.
// The thread starts with the first asynchronous call and sleeps on a condition variable when there is nothing to do.
#include "queue.h"

#include <pthread.h>
#include <time.h>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "a2a.h"
#include "compat.h"

struct a2a_ticket {
  a2a_ticket* next;
  a2a::Context* context;
  a2a::Request request;
  std::uint32_t peer;  // whose refusal, after kPeerRefused
  int result;          // guarded by the queue's mutex
  int references;      // the queue and the caller; guarded too
  char* refusal;       // not null: this rank refused the call
  char* told;          // not null: what the peer that refused it said, kept from later refusals
  a2a::Pair* pairs;
  a2a_reduction reduction;  // if its context is not null
  void* out;
  const void* in;
  void (*job)(a2a::Context&, void*);  // or something else altogether, on `argument`; then `done`
  void (*done)(void*);
  void* argument;
};

namespace a2a {

struct Queue {
  pthread_mutex_t mutex;  // guards all below
  pthread_cond_t changed;
  pthread_mutex_t op;  // held while an op runs, and between the two halves of a dispatch
  a2a_ticket *first = nullptr, *last = nullptr;
  bool running = false, started = false, stop = false;
  pthread_t thread;
};

namespace {

void drop(a2a_ticket* t) {  // the mutex is held
  if (--t->references == 0) {
    std::free(t->refusal);
    std::free(t->told);
    std::free(t->pairs);
    std::free(t);
  }
}

int run(Context& c, const a2a_ticket& t) {
  if (t.job) return t.job(c, t.argument), kOk;
  if (t.refusal) return refuse(c, t.request, t.refusal, false);
  if (t.reduction.context) return run_reduction(c, t.request, t.reduction, t.out, t.in, false);
  return all_to_all_pairwise(c, t.request, t.pairs, false);
}

void* progress(void* argument) {
  Context& c = *static_cast<Context*>(argument);
  Queue& q = *c.queue;
  pthread_mutex_lock(&q.mutex);
  for (;;) {
    while (!q.first && !q.stop) pthread_cond_wait(&q.changed, &q.mutex);
    if (!q.first) break;
    a2a_ticket* t = q.first;
    q.running = true;
    pthread_mutex_unlock(&q.mutex);
    pthread_mutex_lock(&q.op);
    const int rc = run(c, *t);
    const std::uint32_t peer = c.last_peer;
    char* told = rc == kPeerRefused ? strdup(c.refusal) : nullptr;
    pthread_mutex_unlock(&q.op);
    pthread_mutex_lock(&q.mutex);
    t->result = rc;
    t->peer = peer;
    t->told = told;
    q.first = t->next;
    if (!q.first) q.last = nullptr;
    q.running = false;
    void (*const done)(void*) = t->done;
    void* const its = t->argument;
    drop(t);
    pthread_cond_broadcast(&q.changed);
    if (done) {
      pthread_mutex_unlock(&q.mutex);
      done(its);
      pthread_mutex_lock(&q.mutex);
    }
  }
  pthread_mutex_unlock(&q.mutex);
  return nullptr;
}

timespec after(double seconds) {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  if (seconds > 1e8) seconds = 1e8;
  const std::uint64_t ns = std::uint64_t(t.tv_nsec) + std::uint64_t(seconds * 1e9);
  t.tv_sec += time_t(ns / 1'000'000'000ull);
  t.tv_nsec = long(ns % 1'000'000'000ull);
  return t;
}

a2a_ticket* submit(Context& c, a2a_ticket* t) {
  Queue& q = *c.queue;
  t->context = &c;
  t->result = kPending;
  t->references = 2;
  t->next = nullptr;
  pthread_mutex_lock(&q.mutex);
  if (q.stop || in_child(c)) {
    t->result = q.stop ? kNotOpen : kForked;
    t->references = 1;
    pthread_mutex_unlock(&q.mutex);
    return t;
  }
  if (!q.started) q.started = pthread_create(&q.thread, nullptr, progress, &c) == 0;
  if (q.last)
    q.last->next = t;
  else
    q.first = t;
  q.last = t;
  pthread_cond_broadcast(&q.changed);
  pthread_mutex_unlock(&q.mutex);
  return t;
}

}  // namespace

int submit_job(Context& c, void (*job)(Context&, void*), void (*done)(void*), void* argument) {
  auto* t = static_cast<a2a_ticket*>(std::calloc(1, sizeof(a2a_ticket)));
  t->job = job;
  t->done = done;
  t->argument = argument;
  submit(c, t);
  // Its own reference goes at once: what the job did, it says itself.
  Queue& q = *c.queue;
  pthread_mutex_lock(&q.mutex);
  const int rc = t->result == kNotOpen || t->result == kForked ? t->result : int(kOk);
  drop(t);
  pthread_mutex_unlock(&q.mutex);
  return rc;
}

Queue* queue_create() {
  Queue* q = new (std::malloc(sizeof(Queue))) Queue();
  pthread_condattr_t clock;
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_cond_init(&q->changed, &clock);
  pthread_mutex_init(&q->mutex, nullptr);
  pthread_mutex_init(&q->op, nullptr);
  return q;
}

void queue_stop(Context& c) {
  Queue& q = *c.queue;
  pthread_mutex_lock(&q.mutex);
  q.stop = true;
  const bool started = q.started, busy = pthread_mutex_trylock(&q.op) != 0;
  if (!busy) pthread_mutex_unlock(&q.op);
  // Nobody will wait for what is still queued, and what runs on another thread must end: peers learn it now, not after their
  // deadline.
  if (q.first || busy) {
    pthread_mutex_unlock(&q.mutex);
    fail(c, kClosed, c.rank, 0, nullptr);
    wake(c.bell(c.rank));
    pthread_mutex_lock(&q.mutex);
  }
  pthread_cond_broadcast(&q.changed);
  pthread_mutex_unlock(&q.mutex);
  if (started) pthread_join(q.thread, nullptr);
  q.started = false;
}

bool queue_left(Context& c) {
  for (const std::uint64_t end = now_ns() + 1'000'000'000; now_ns() < end;) {
    const bool idle = pthread_mutex_trylock(&c.queue->op) == 0;
    if (idle) pthread_mutex_unlock(&c.queue->op);
    if (idle && c.callers.load(std::memory_order_acquire) == 0) return true;
    const timespec millisecond{0, 1'000'000};
    nanosleep(&millisecond, nullptr);
  }
  return false;  // the thread that closes may be in a call itself: in a signal handler
}

void queue_free(Queue* q, bool owner) {
  if (!owner) return;
  std::free(q);
}

void lock(Context& c, bool wait_for_queue) {
  Queue& q = *c.queue;
  if (wait_for_queue && __atomic_load_n(&q.started, __ATOMIC_RELAXED)) {
    pthread_mutex_lock(&q.mutex);
    while (q.first) pthread_cond_wait(&q.changed, &q.mutex);
    pthread_mutex_unlock(&q.mutex);
  }
  pthread_mutex_lock(&q.op);
}

void unlock(Context& c) { pthread_mutex_unlock(&c.queue->op); }

}  // namespace a2a

using namespace a2a;

a2a_ticket* a2a_submit(a2a_context* h, uint32_t request, void* const* out, const uint64_t* recv_bytes,
                       const void* const* in, const uint64_t* send_bytes) {
  Context& c = *reinterpret_cast<Context*>(h);
  auto* t = static_cast<a2a_ticket*>(std::calloc(1, sizeof(a2a_ticket)));
  t->request = c.requests[request % kTexts];
  t->pairs = static_cast<Pair*>(std::malloc(c.world * sizeof(Pair)));
  for (std::uint32_t p = 0; p < c.world; p++)
    t->pairs[p] = {static_cast<const std::uint8_t*>(in[p]), static_cast<std::uint8_t*>(out[p]), send_bytes[p],
                   recv_bytes[p]};
  return submit(c, t);
}

a2a_ticket* a2a_submit_reduction(const a2a_reduction* call, void* out, const void* in) {
  Context& c = *reinterpret_cast<Context*>(call->context);
  auto* t = static_cast<a2a_ticket*>(std::calloc(1, sizeof(a2a_ticket)));
  t->request = c.requests[call->request % kTexts];
  t->reduction = *call;
  t->out = out;
  t->in = in;
  return submit(c, t);
}

a2a_ticket* a2a_submit_refusal(a2a_context* h, uint32_t request, const char* why) {
  auto* t = static_cast<a2a_ticket*>(std::calloc(1, sizeof(a2a_ticket)));
  Context& c = *reinterpret_cast<Context*>(h);
  t->request = c.requests[request % kTexts];
  t->refusal = strdup(why);
  return submit(c, t);
}

int a2a_test(a2a_ticket* t) {
  Queue& q = *t->context->queue;
  pthread_mutex_lock(&q.mutex);
  const int rc = t->result;
  pthread_mutex_unlock(&q.mutex);
  return rc;
}

int a2a_wait(a2a_ticket* t, double timeout_s) {
  Queue& q = *t->context->queue;
  const timespec until = after(timeout_s);
  pthread_mutex_lock(&q.mutex);
  while (t->result == kPending)
    if (pthread_cond_timedwait(&q.changed, &q.mutex, &until) == ETIMEDOUT) break;
  const int rc = t->result;
  pthread_mutex_unlock(&q.mutex);
  return rc;
}

uint32_t a2a_ticket_peer(a2a_ticket* t) { return t->peer; }
const char* a2a_ticket_refusal(a2a_ticket* t) { return t->told ? t->told : ""; }

void a2a_release(a2a_ticket* t) {
  Queue& q = *t->context->queue;
  pthread_mutex_lock(&q.mutex);
  drop(t);
  pthread_mutex_unlock(&q.mutex);
}
