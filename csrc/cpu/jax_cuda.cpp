// XLA's custom calls on GPUs: each is one launch of csrc/cuda/all_to_all_push.cu, on the stream that XLA says.
//
// A launch is prepared in Python when a program is traced, since sizes are known then: kernels are compiled and loaded, and
// parameters filled in, but for the addresses of operands and results. A compiled program knows its communicator and its
// launch by numbers; both are looked up here, so that a program which outlives them raises.
//
// Order    Calls of a communicator run in the order in which XLA makes them, on whichever streams: each waits for the event
//          that the call before has left. Ranks that compile the same program make them in the same order, as XLA's own
//          collectives take for granted; what differs in kind, dtype or sizes is found by the kernel.
// Capture  The kernels could be captured, but XLA may run the parts of a captured program at the same time, and two calls of a
//          communicator would meet in its staging. So the handler doesn't say that it is fit for XLA's command buffers.
// Buffers  XLA's own, which stay until the stream is past the kernel. Outputs are ordinary memory to the kernel.
// PROGRESS Nothing here waits: the host goes on while kernels wait for their peers, so XLA may run its devices in turn.
// FAILURE  A kernel leaves its failure in memory of this process; the next call finds it there and returns an error. What the
//          failed call returned is undefined.
#include <pthread.h>
#include <cstdlib>
#include <cstring>

#include "a2a.h"
#include "compat.h"
#include "jax_ffi.h"
#include "signal.h"

namespace a2a {
namespace jax {
namespace {

constexpr std::uint32_t kMostWords = 6;  // out, in and four lists: what the parameters of a launch begin with

struct Prepared {
  Prepared* next;
  a2a_jax_cuda_shape shape;
  std::int64_t number;
  a2a_cuda_call call;  // whose parameters follow
};

struct Link {  // a communicator that programs may name, for as long as it is open
  Link* next;
  std::int64_t id;  // < 0
  std::uint32_t world, rank;
  double timeout_s;
  void* event;   // behind its last call,
  void* stream;  // on this stream
  bool called;
  Prepared* prepared;
  std::int64_t launches;  // prepared so far
};
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // guards all, and the parameters of launches
Link* links = nullptr;
std::int64_t last_id = 0;

Link* find(std::int64_t id) { return *place_of(&links, id); }

std::uint8_t* params_of(Prepared* p) { return reinterpret_cast<std::uint8_t*>(p + 1); }

xla::Error* explain(const Link& link, const Call& call, std::uint64_t record) {
  const auto cause = Cause(record >> 48);
  const auto by = std::uint32_t(record >> 32 & 0xFFFF), peer = std::uint32_t(record >> 16 & 0xFFFF);
  const bool mine = by == peer;
  const char* what = "a failure was recorded";
  if (cause == kTimeout)
    what = "a rank did not come within the communicator's timeout";
  else if (cause == kClosed)
    what = "a rank has closed the communicator";
  else if (cause == kMismatch)
    what = "ranks made different calls";
  else if (cause == kSplits)
    what = mine ? "a rank's offsets or sizes lie outside its operand or output" : "sizes of ranks disagree";
  else if (cause == kRefused)
    what = "a rank refused its own call";
  return errorf(
      call.api, cause == kTimeout ? xla::kDeadlineExceeded : xla::kAborted,
      "%s: rank %u can't: %s (found by rank %u, about rank %u, the timeout is %.1f s). The communicator is broken "
      "since then; its check() raises this as one of a2a's errors",
      call.what, link.rank, what, by, peer, link.timeout_s);
}

// Null, with the error set: the call doesn't fit what was prepared.
Prepared* find_launch(const Link& link, const Call& call, xla::Error** failed) {
  Prepared* p = link.prepared;
  while (p && p->number != call.request) p = p->next;
  if (!p) {
    *failed =
        errorf(call.api, xla::kFailedPrecondition,
               "%s: nothing was prepared for this call in this process; trace the program here, with the communicator "
               "that it is to run with (a program from elsewhere, or of an earlier process, does not fit)",
               call.what);
    return nullptr;
  }
  const a2a_jax_cuda_shape& s = p->shape;
  const bool same = s.ragged == call.ragged && s.in_bytes == call.in_bytes && s.out_bytes == call.out_bytes &&
                    (!call.ragged || s.row_bytes == call.row_bytes);
  if (same && link.world == call.world) return p;
  *failed = errorf(
      call.api, xla::kInvalidArgument,
      "%s: it was traced with %llu bytes in and %llu out among %u ranks, and is called with %llu and %llu among %u; "
      "trace the program again",
      call.what, (unsigned long long)s.in_bytes, (unsigned long long)s.out_bytes, link.world,
      (unsigned long long)call.in_bytes, (unsigned long long)call.out_bytes, call.world);
  return nullptr;
}

xla::Error* wrong_context(const Call& call, const a2a_cuda_call& prepared, void* stream) {
  void* context = nullptr;
  const int result = a2a_cuda_stream_context(stream, &context);
  if (result)
    return errorf(call.api, xla::kInternal, "%s: XLA's stream has no context: %s (CUDA error %d)", call.what,
                  a2a_cuda_error(result), result);
  if (!context || context == prepared.context) return nullptr;
  return errorf(call.api, xla::kFailedPrecondition,
                "%s: XLA runs this program on another GPU than the communicator was made on; make it with "
                "torch.cuda.set_device of that GPU, or run the program under jax.default_device of the communicator's",
                call.what);
}

a2a_cuda_step step(std::uint32_t kind, void* what) {
  a2a_cuda_step s{};
  s.kind = kind;
  s.what = what;
  return s;
}

xla::Error* launch(Link& link, Prepared& p, const Call& call, void* stream) {
  const std::uint64_t words[kMostWords] = {
      reinterpret_cast<std::uint64_t>(call.out),        reinterpret_cast<std::uint64_t>(call.in),
      reinterpret_cast<std::uint64_t>(call.in_offset),  reinterpret_cast<std::uint64_t>(call.send),
      reinterpret_cast<std::uint64_t>(call.out_offset), reinterpret_cast<std::uint64_t>(call.recv)};
  std::memcpy(params_of(&p), words, call.ragged ? sizeof words : 2 * sizeof words[0]);
  a2a_cuda_step steps[4];
  std::uint32_t count = 0;
  if (link.called && link.stream != stream) steps[count++] = step(A2A_CUDA_WAIT, link.event);
  if (call.ragged && call.initial != call.out && call.out_bytes) {  // XLA was asked to give both one buffer
    a2a_cuda_step& copy = steps[count++] = step(A2A_CUDA_COPY, call.out);
    const std::uint64_t from[2] = {reinterpret_cast<std::uint64_t>(call.initial), call.out_bytes};
    std::memcpy(copy.patch, from, sizeof from);
  }
  steps[count++] = step(A2A_CUDA_LAUNCH, &p.call);
  steps[count++] = step(A2A_CUDA_RECORD, link.event);
  const int result = a2a_cuda_run(steps, count, &stream);
  if (result == -kFailed) return explain(link, call, *p.call.failure);
  if (result)
    return errorf(call.api, xla::kInternal, "%s: rank %u's kernel can't be launched: %s (CUDA error %d)", call.what,
                  link.rank, a2a_cuda_error(result), result);
  link.called = true;
  link.stream = stream;
  return nullptr;
}

xla::Error* make_call(xla::CallFrame* f, const Call& call) {  // the mutex is held, so that the communicator stays open
  Link* link = find(call.communicator);
  if (!link)
    return errorf(f->api, xla::kFailedPrecondition, "%s: its communicator is closed; trace the program with a new one",
                  call.what);
  xla::Error* failed = nullptr;
  Prepared* p = find_launch(*link, call, &failed);
  if (failed) return failed;
  if (const std::uint64_t record = *p->call.failure) return explain(*link, call, record);
  xla::StreamOf stream{sizeof stream, nullptr, f->execution, nullptr};
  if ((failed = f->api->stream_get(&stream))) return failed;
  if ((failed = wrong_context(call, p->call, stream.stream))) return failed;
  return launch(*link, *p, call, stream.stream);
}

}  // namespace
}  // namespace jax
}  // namespace a2a

using namespace a2a::jax;

int64_t a2a_jax_cuda_connect(uint32_t world, uint32_t rank, double timeout_s, void* event) {
  auto* link = static_cast<Link*>(std::calloc(1, sizeof(Link)));
  if (!link) return 0;
  pthread_mutex_lock(&mutex);
  link->next = links;
  link->id = --last_id;
  link->world = world;
  link->rank = rank;
  link->timeout_s = timeout_s;
  link->event = event;
  links = link;
  const std::int64_t id = link->id;
  pthread_mutex_unlock(&mutex);
  return id;
}

int64_t a2a_jax_cuda_prepare(int64_t communicator, const a2a_jax_cuda_shape* shape, const a2a_cuda_call* call) {
  if (call->params_bytes < kMostWords * sizeof(std::uint64_t) || !call->failure) return 0;
  auto* p = static_cast<Prepared*>(std::calloc(1, sizeof(Prepared) + call->params_bytes));
  if (!p) return 0;
  p->shape = *shape;
  p->call = *call;
  std::memcpy(params_of(p), call->params, call->params_bytes);
  p->call.params = params_of(p);
  pthread_mutex_lock(&mutex);
  Link* link = find(communicator);
  const std::int64_t number = link ? ++link->launches : 0;
  if (link) {
    p->number = number;
    p->next = link->prepared;
    link->prepared = p;
  }
  pthread_mutex_unlock(&mutex);
  if (!link) std::free(p);
  return number;
}

void a2a_jax_cuda_disconnect(int64_t communicator) {
  pthread_mutex_lock(&mutex);
  Link** place = place_of(&links, communicator);
  if (Link* gone = *place) {
    *place = gone->next;
    while (Prepared* p = gone->prepared) {
      gone->prepared = p->next;
      std::free(p);
    }
    std::free(gone);
  }
  pthread_mutex_unlock(&mutex);
}

void* a2a_jax_cuda_execute(void* call_frame) {
  auto* f = static_cast<a2a::xla::CallFrame*>(call_frame);
  if (answer_metadata(f, false)) return nullptr;
  if (a2a::xla::Error* failed = wrong_version(f)) return failed;
  Call call;
  if (a2a::xla::Error* failed = read_call(f, &call)) return failed;
  if (!call.communicator)
    return errorf(f->api, a2a::xla::kFailedPrecondition,
                  "%s: a2a serves several GPUs between processes only; start one process for each GPU and pass "
                  "a2a.communicator(group, device=\"cuda\") in place of the axis, or take jax.lax's",
                  call.what);
  if (call.communicator > 0)
    return errorf(f->api, a2a::xla::kInvalidArgument,
                  "%s: its communicator serves CPU tensors, and this program was compiled for a GPU; pass "
                  "a2a.communicator(group, device=\"cuda\"), or run it on a CPU (jax.default_device)",
                  call.what);
  pthread_mutex_lock(&mutex);
  a2a::xla::Error* failed = make_call(f, call);
  pthread_mutex_unlock(&mutex);
  return failed;
}
