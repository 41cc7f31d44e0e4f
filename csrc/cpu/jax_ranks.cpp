// XLA's custom calls between processes: each is an all-to-all on a communicator, on its progress thread.
//   all_to_all         one all_to_all_pairwise
//   ragged_all_to_all  two: first where each piece begins at its receiver, 8 bytes a pair; then the pieces
// Order    XLA is free to begin independent calls of a program in any order, and ranks do differ. So a call is named by its site:
//          the how-manieth that XLA made on this communicator, where ranks that compile the same programs count alike. Calls
//          wait in `Waiting`, and each takes one turn of the progress thread, in which all ranks say which calls they have
//          and run the first of rank 0's that everybody has; if there is none, they ask again when there is more.
//          Two runs of one program at a time are refused, since ranks could then exchange what belongs to different runs.
// Buffers  XLA keeps a call's operands and results until its future is resolved, which is the last thing done here.
// FAILURE  the future's error says what the communicator's record says. A rank whose own lists are wrong refuses, so its peers
//          are told; lists that don't fit each other are found by the first exchange.
#include <pthread.h>
#include <time.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "a2a.h"
#include "compat.h"
#include "jax_ffi.h"
#include "queue.h"

namespace a2a {
namespace jax {
namespace {

struct Job {
  Job* next;
  Call call;
  Request request;
  Site* site;
  std::uint64_t name;  // equal on all ranks, never 0
  xla::Code code;
  bool failed;
  char message[2 * kCauseBytes];
};

struct Waiting {  // calls of this rank that have not had their turn, oldest first
  pthread_mutex_t mutex;
  pthread_cond_t more;
  Job* first;
  std::uint64_t came;        // calls so far
  std::uint32_t references;  // of the link and of turns
};

struct Turn {
  Waiting* waiting;
  Job* job;  // that was run
};

struct Link {  // a communicator that programs may name, for as long as it is open
  Link* next;
  std::int64_t id;
  Context* context;
  std::int64_t sites;
  Waiting* waiting;
};
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // guards both
Link* links = nullptr;
std::int64_t last_id = 0;

Link* find(std::int64_t id) { return *place_of(&links, id); }

void explain(Context& c, Job& job, int rc) {
  job.failed = true;
  job.code = xla::kAborted;
  const char* what = job.call.what;
  if (rc == kPeerRefused) {
    std::snprintf(job.message, sizeof job.message, "%s: rank %u refused its own call, so nothing was exchanged: %s",
                  what, c.last_peer, c.refusal);
    return;
  }
  const std::uint64_t record = a2a_failure(reinterpret_cast<a2a_context*>(&c));
  const auto cause = Cause(record >> 48);
  const auto by = std::uint32_t(record >> 32 & 0xFFFF), peer = std::uint32_t(record >> 16 & 0xFFFF);
  const char* asked = c.text(by, std::uint32_t(record & 0xFFFF));
  char told[kCauseBytes + kTextBytes];
  if (cause == kTimeout)
    std::snprintf(told, sizeof told, "rank %u waited %.1f s for rank %u in %s", by, double(c.timeout_ns) * 1e-9, peer,
                  asked);
  else if (cause == kDied || cause == kUnreadable)
    std::snprintf(told, sizeof told, "rank %u died; rank %u was waiting for it in %s", peer, by, asked);
  else if (cause == kClosed || rc == kNotOpen)
    std::snprintf(told, sizeof told, "the communicator is closed on rank %u", rc == kNotOpen ? c.rank : peer);
  else
    std::snprintf(told, sizeof told, "%s", rc == kForked ? "a forked child owns no communicator" : c.cause_text(by));
  if (cause == kTimeout) job.code = xla::kDeadlineExceeded;
  std::snprintf(job.message, sizeof job.message,
                "%s: %s. The communicator is broken since then; its check() raises this as one of a2a's errors", what,
                told);
}

void refuse_own(Context& c, Job& job) {
  job.failed = true;
  job.code = xla::kInvalidArgument;
  refuse(c, job.request, job.message, false);
}

void run_even(Context& c, Job& job, Pair* pairs) {
  const Call& call = job.call;
  for (std::uint32_t p = 0; p < c.world; p++)
    pairs[p] = {call.in + p * call.piece, call.out + p * call.piece, call.piece, call.piece};
  if (int rc = all_to_all_pairwise(c, job.request, pairs, false)) explain(c, job, rc);
}

struct Announcement {
  std::int32_t rows, at;  // that come, and where they begin at their receiver
};

void run_ragged(Context& c, Job& job, Pair* pairs) {
  const Call& call = job.call;
  for (std::uint32_t p = 0; p < c.world; p++)
    if (!own_piece_fits(call, p, job.message, sizeof job.message)) return refuse_own(c, job);
  auto* mine = static_cast<Announcement*>(__builtin_alloca(2 * c.world * sizeof(Announcement)));
  Announcement* theirs = mine + c.world;
  for (std::uint32_t p = 0; p < c.world; p++) {
    mine[p] = {call.send[p], call.out_offset[p]};
    pairs[p] = {reinterpret_cast<const std::uint8_t*>(mine + p), reinterpret_cast<std::uint8_t*>(theirs + p),
                sizeof(Announcement), sizeof(Announcement)};
  }
  if (int rc = all_to_all_pairwise(c, job.request, pairs, false)) return explain(c, job, rc);
  for (std::uint32_t p = 0; p < c.world; p++)
    if (!piece_fits(call, p, theirs[p].rows, theirs[p].at, job.message, sizeof job.message)) return refuse_own(c, job);
  for (std::uint32_t p = 0; p < c.world; p++)
    pairs[p] = {call.in + std::uint64_t(call.in_offset[p]) * call.row_bytes,
                call.out + std::uint64_t(theirs[p].at) * call.row_bytes, std::uint64_t(call.send[p]) * call.row_bytes,
                std::uint64_t(theirs[p].rows) * call.row_bytes};
  if (int rc = all_to_all_pairwise(c, job.request, pairs, false)) explain(c, job, rc);
}

// ---- whose turn it is

constexpr std::uint32_t kNames = 64;  // that a rank says at once
constexpr std::uint64_t kTurnDigest = 0x61326120'6A617821ull;
constexpr long kAgainNs = 1'000'000;  // without news

Waiting* waiting_create() {
  auto* w = static_cast<Waiting*>(std::calloc(1, sizeof(Waiting)));
  pthread_condattr_t clock;
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_cond_init(&w->more, &clock);
  pthread_mutex_init(&w->mutex, nullptr);
  w->references = 1;
  return w;
}

void leave(Waiting* w) {
  pthread_mutex_lock(&w->mutex);
  const bool last = --w->references == 0;
  pthread_mutex_unlock(&w->mutex);
  if (last) std::free(w);
}

void add(Waiting* w, Job* job) {
  pthread_mutex_lock(&w->mutex);
  Job** end = &w->first;
  while (*end) end = &(*end)->next;
  *end = job;
  w->came++;
  w->references++;  // of its turn
  pthread_cond_signal(&w->more);
  pthread_mutex_unlock(&w->mutex);
}

Job* take(Waiting* w, std::uint64_t name) {  // the oldest of that name; 0: the oldest of all
  pthread_mutex_lock(&w->mutex);
  Job** p = &w->first;
  while (name && *p && (*p)->name != name) p = &(*p)->next;
  Job* job = *p;
  if (job) *p = job->next;
  pthread_mutex_unlock(&w->mutex);
  return job;
}

bool has(const std::uint64_t* names, std::uint64_t name) {
  for (std::uint32_t i = 0; i < kNames; i++)
    if (names[i] == name) return true;
  return false;
}

std::uint64_t common(const std::uint64_t* names, std::uint32_t world) {  // [world][kNames], or 0
  for (std::uint32_t i = 0; i < kNames && names[i]; i++) {
    bool all = true;
    for (std::uint32_t p = 1; p < world && all; p++) all = has(names + p * kNames, names[i]);
    if (all) return names[i];
  }
  return 0;
}

void wait_for_more(Waiting* w, std::uint64_t came) {
  const std::uint64_t at = now_ns() + kAgainNs;
  const timespec until{time_t(at / 1'000'000'000u), long(at % 1'000'000'000u)};
  pthread_mutex_lock(&w->mutex);
  if (w->came == came) pthread_cond_timedwait(&w->more, &w->mutex, &until);
  pthread_mutex_unlock(&w->mutex);
}

// The job that all ranks have now; null, with a Result: there will be none.
Job* agree(Context& c, Waiting* w, Pair* pairs, int* result) {
  std::uint64_t mine[kNames], began = 0;
  auto* all = static_cast<std::uint64_t*>(__builtin_alloca(c.world * sizeof mine));
  for (;;) {
    std::memset(mine, 0, sizeof mine);
    pthread_mutex_lock(&w->mutex);
    const std::uint64_t came = w->came;
    const Request turn{kTurnDigest, 0, w->first->request.text};
    std::uint32_t n = 0;
    for (Job* job = w->first; job && n < kNames; job = job->next) mine[n++] = job->name;
    pthread_mutex_unlock(&w->mutex);
    for (std::uint32_t p = 0; p < c.world; p++)
      pairs[p] = {reinterpret_cast<const std::uint8_t*>(mine), reinterpret_cast<std::uint8_t*>(all + p * kNames),
                  sizeof mine, sizeof mine};
    if ((*result = all_to_all_pairwise(c, turn, pairs, false)) != kOk) return nullptr;
    if (const std::uint64_t name = common(all, c.world)) return take(w, name);
    if (!began) began = now_ns();
    if (now_ns() - began > c.timeout_ns) {
      const std::uint32_t peer = c.rank ? 0 : 1;
      char message[kCauseBytes];
      std::snprintf(
          message, sizeof message,
          "ranks wait for different calls: rank %u for %s, rank %u for %s. All must compile the same programs on a "
          "communicator, in the same order",
          c.rank, c.text(c.rank, turn.text), peer, c.text(peer, c.entry(c.rank, peer, c.epoch).text));
      fail(c, kMismatch, peer, turn.text, message);
      *result = kFailed;
      return nullptr;
    }
    wait_for_more(w, came);
  }
}

void run(Context& c, void* argument) {
  auto& turn = *static_cast<Turn*>(argument);
  auto* pairs = static_cast<Pair*>(__builtin_alloca(c.world * sizeof(Pair)));
  int result = kOk;
  turn.job = agree(c, turn.waiting, pairs, &result);
  if (!turn.job) {
    turn.job = take(turn.waiting, 0);
    explain(c, *turn.job, result);
  } else if (turn.job->call.ragged) {
    run_ragged(c, *turn.job, pairs);
  } else {
    run_even(c, *turn.job, pairs);
  }
}

void done(void* argument) {
  auto* turn = static_cast<Turn*>(argument);
  Job* job = turn->job;
  leave(turn->waiting);
  std::free(turn);
  pthread_mutex_lock(&mutex);
  job->site->calls--;
  pthread_mutex_unlock(&mutex);
  resolve(job->call.api, job->call.future, job->code, job->failed ? job->message : nullptr);
  std::free(job);
}

}  // namespace

std::int64_t count_site(std::int64_t communicator) {
  pthread_mutex_lock(&mutex);
  Link* link = find(communicator);
  const std::int64_t number = link ? ++link->sites : 0;
  pthread_mutex_unlock(&mutex);
  return number;
}

xla::Error* submit(xla::CallFrame* f, const Call& call, Site* site) {
  xla::RunId id{sizeof id, nullptr, f->execution, 0};
  if (xla::Error* failed = f->api->run_id_get(&id)) return failed;
  pthread_mutex_lock(&mutex);  // so that the communicator stays open
  Link* link = find(call.communicator);
  xla::Error* failed = nullptr;
  xla::Future* future = nullptr;
  if (!link)
    failed = errorf(f->api, xla::kFailedPrecondition,
                    "%s: its communicator is closed; trace the program with a new one", call.what);
  else if (site->calls && id.id != site->run)
    failed =
        errorf(f->api, xla::kFailedPrecondition,
               "%s: an earlier run of this program is not done; wait for it (jax.block_until_ready) before the next",
               call.what);
  else
    failed = make_future(f->api, &future);
  if (failed) {
    pthread_mutex_unlock(&mutex);
    return failed;
  }
  site->run = id.id;
  site->calls++;
  auto* job = static_cast<Job*>(std::calloc(1, sizeof(Job)));
  job->call = call;
  job->call.future = f->future = future;
  job->call.rank = link->context->rank;
  job->site = site;
  // The factor is odd: no two sites of a kind have one name.
  job->name = (std::uint64_t(call.digest) ^ std::uint64_t(site->number) * 0x9E3779B97F4A7C15ull) >> 1 | 1;
  job->request = {job->name, 0, std::uint32_t(call.request) % kTexts};
  auto* turn = static_cast<Turn*>(std::calloc(1, sizeof(Turn)));
  turn->waiting = link->waiting;
  add(link->waiting, job);
  const int rc = submit_job(*link->context, run, done, turn);
  if (rc != kOk) {  // no turn will come
    turn->job = take(link->waiting, job->name);
    explain(*link->context, *turn->job, rc);
  }
  pthread_mutex_unlock(&mutex);
  if (rc != kOk) done(turn);
  return nullptr;
}

}  // namespace jax
}  // namespace a2a

using namespace a2a::jax;

int64_t a2a_jax_connect(a2a_context* context) {
  auto* link = static_cast<Link*>(std::malloc(sizeof(Link)));
  pthread_mutex_lock(&mutex);
  *link = {links, ++last_id, reinterpret_cast<a2a::Context*>(context), 0, waiting_create()};
  links = link;
  const std::int64_t id = link->id;
  pthread_mutex_unlock(&mutex);
  return id;
}

void a2a_jax_disconnect(int64_t id) {
  pthread_mutex_lock(&mutex);
  Link** place = place_of(&links, id);
  if (Link* gone = *place) {
    *place = gone->next;
    leave(gone->waiting);
    std::free(gone);
  }
  pthread_mutex_unlock(&mutex);
}
