// All-to-all as XLA calls it: handlers for custom calls of programs that JAX compiles (a2a/integrations/jax.py).
//   all_to_all         out[p] of rank r = in[r] of rank p          pieces of equal size along dimension 0
//   ragged_all_to_all  rows [input_offsets[p], +send_sizes[p]) of rank r's in become the rows of rank p's out from
//                      output_offsets[p] on; all else of out stays    (the definition of jax.lax.ragged_all_to_all)
// Ranks are devices of this process (jax_devices.cpp), or processes with a communicator each (jax_ranks.cpp).
//
// Here is what both have in common: what a call says, whether it fits, and the handlers.
#include "jax_ffi.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "a2a.h"

namespace a2a {
namespace jax {

using namespace xla;

// ---- what a call says

Error* error(const Api* api, Code code, const char* message) {
  ErrorCreate args{sizeof args, nullptr, message, code};
  return api->error_create(&args);
}

Error* errorf(const Api* api, Code code, const char* format, ...) {
  char message[1024];
  va_list values;
  va_start(values, format);
  std::vsnprintf(message, sizeof message, format, values);
  va_end(values);
  return error(api, code, message);
}

void resolve(const Api* api, Future* future, Code code, const char* message) {
  if (!message) {
    FutureSetAvailable args{sizeof args, nullptr, future};
    api->future_set_available(&args);
  } else {
    FutureSetError args{sizeof args, nullptr, future, error(api, code, message)};
    api->future_set_error(&args);
  }
}

Error* make_future(const Api* api, Future** future) {
  FutureCreate args{sizeof args, nullptr, nullptr};
  Error* failed = api->future_create(&args);
  *future = args.future;
  return failed;
}

namespace {

TypeId site_type{0};  // of a Site; XLA gives it a number when it is registered
void destroy_site(void* site) { std::free(site); }
TypeInfo site_info{sizeof(TypeInfo), nullptr, destroy_site};

const void* attribute(const CallFrame& f, const char* name, int type) {
  for (std::int64_t i = 0; i < f.attributes.count; i++) {
    const Span& have = *f.attributes.names[i];
    if (have.bytes == std::strlen(name) && !std::memcmp(have.data, name, have.bytes) && f.attributes.types[i] == type)
      return f.attributes.values[i];
  }
  return nullptr;
}

template <class T>
bool scalar(const CallFrame& f, const char* name, int dtype, T* value) {
  const auto* s = static_cast<const Scalar*>(attribute(f, name, kScalar));
  if (!s || s->dtype != dtype) return false;
  std::memcpy(value, s->value, sizeof *value);
  return true;
}

bool text(const CallFrame& f, const char* name, char* out, std::size_t bytes) {
  const auto* s = static_cast<const Span*>(attribute(f, name, kString));
  if (!s) return false;
  const std::size_t n = s->bytes < bytes - 1 ? s->bytes : bytes - 1;
  std::memcpy(out, s->data, n);
  out[n] = 0;
  return true;
}

}  // namespace

bool answer_metadata(CallFrame* f, bool has_state) {
  if (!f->extensions || f->extensions->type != kMetadataExtension) return false;
  Metadata* m = reinterpret_cast<MetadataExtension*>(f->extensions)->metadata;
  m->version = {sizeof(Version), nullptr, kMajor, kMinor};
  m->traits = 0;
  if (m->size >= sizeof(Metadata)) m->state = has_state ? site_type : TypeId{0};
  return true;
}

Error* wrong_version(const CallFrame* f) {
  const Version& v = f->api->version;
  if (v.major == kMajor && v.minor >= kMinor && f->api->size >= sizeof(Api) && f->size >= offsetof(CallFrame, future))
    return nullptr;
  return errorf(
      f->api, kFailedPrecondition,
      "a2a: this jaxlib speaks version %d.%d of XLA's FFI, a2a needs %d.%d or later of %d; install jaxlib 0.10.2 or "
      "a newer a2a",
      v.major, v.minor, kMajor, kMinor, kMajor);
}

namespace {

std::uint64_t bytes_of(const Buffer& b, std::uint64_t element) {
  for (std::int64_t i = 0; i < b.rank; i++) element *= std::uint64_t(b.dims[i]);
  return element;
}

// ---- the call of one rank, in this process's memory

Error* read_place(const CallFrame* f, Call* call) {
  const Buffer& place = *f->args.buffers[f->args.count - 1];
  if (place.dtype != kS32 || bytes_of(place, 1) != 2)
    return errorf(f->api, kInvalidArgument, "%s: the last operand is {group, rank} in int32", call->what);
  call->group = static_cast<const std::int32_t*>(place.data)[0];
  call->rank = std::uint32_t(static_cast<const std::int32_t*>(place.data)[1]);
  if (call->rank >= call->world)
    return errorf(f->api, kInvalidArgument, "%s: rank %u of %u", call->what, call->rank, call->world);
  if (call->ragged && call->initial != call->out && call->out_bytes)
    std::memcpy(call->out, call->initial, call->out_bytes);
  return nullptr;
}

}  // namespace

Error* read_call(const CallFrame* f, Call* call) {
  *call = Call{};
  call->api = f->api;
  std::int64_t world = 0, element = 0;
  if (!scalar(*f, "world", kS64, &world) || !scalar(*f, "element_bytes", kS64, &element) ||
      !scalar(*f, "timeout_s", kF64, &call->timeout_s) || !text(*f, "what", call->what, sizeof call->what) ||
      !scalar(*f, "communicator", kS64, &call->communicator) || !scalar(*f, "digest", kS64, &call->digest) ||
      !scalar(*f, "request", kS64, &call->request))
    return error(f->api, kInvalidArgument, "a2a: a custom call without a2a's attributes; use a2a.integrations.jax");
  call->world = std::uint32_t(world);
  call->ragged = f->args.count == 7;
  if ((f->args.count != 2 && !call->ragged) || f->results.count != 1)
    return errorf(f->api, kInvalidArgument, "%s: %lld operands, expected 2 or 7", call->what, (long long)f->args.count);
  if (!call->world) return errorf(f->api, kInvalidArgument, "%s: no ranks", call->what);
  const Buffer &in = *f->args.buffers[0], &out = *f->results.buffers[0];
  call->in = static_cast<const std::uint8_t*>(in.data);
  call->out = static_cast<std::uint8_t*>(out.data);
  call->in_bytes = bytes_of(in, std::uint64_t(element));
  call->out_bytes = bytes_of(out, std::uint64_t(element));
  if (!call->ragged) {
    if (call->in_bytes != call->out_bytes || call->in_bytes % call->world)
      return errorf(f->api, kInvalidArgument, "%s: %llu bytes can't be shared by %u ranks", call->what,
                    (unsigned long long)call->in_bytes, call->world);
    call->piece = call->in_bytes / call->world;
    return nullptr;
  }
  if (in.rank < 1 || in.rank != out.rank)
    return errorf(f->api, kInvalidArgument, "%s: operand and output have %lld and %lld dimensions", call->what,
                  (long long)in.rank, (long long)out.rank);
  call->in_rows = in.dims[0];
  call->out_rows = out.dims[0];
  call->row_bytes = std::uint64_t(element);
  for (std::int64_t i = 1; i < in.rank; i++) call->row_bytes *= std::uint64_t(in.dims[i]);
  call->initial = static_cast<const std::uint8_t*>(f->args.buffers[1]->data);
  const std::int32_t** const lists[] = {&call->in_offset, &call->send, &call->out_offset, &call->recv};
  for (int i = 0; i < 4; i++) {
    const Buffer& list = *f->args.buffers[2 + i];
    if (list.dtype != kS32 || bytes_of(list, 1) != call->world)
      return errorf(f->api, kInvalidArgument, "%s: offsets and sizes are %u of int32", call->what, call->world);
    *lists[i] = static_cast<const std::int32_t*>(list.data);
  }
  return nullptr;
}

bool piece_fits(const Call& to, std::uint32_t from, std::int64_t rows, std::int64_t at, char* message,
                std::size_t bytes) {
  if (rows == to.recv[from] && rows >= 0 && at >= 0 && at <= to.out_rows && rows <= to.out_rows - at) return true;
  std::snprintf(
      message, bytes,
      "%s: rank %u sends %lld rows to rank %u, from row %lld of its output on; rank %u expects %lld rows and its "
      "output has %lld",
      to.what, from, (long long)rows, to.rank, (long long)at, to.rank, (long long)to.recv[from],
      (long long)to.out_rows);
  return false;
}

bool own_piece_fits(const Call& from, std::uint32_t to, char* message, std::size_t bytes) {
  const std::int64_t at = from.in_offset[to], rows = from.send[to];
  if (rows >= 0 && at >= 0 && at <= from.in_rows && rows <= from.in_rows - at) return true;
  std::snprintf(message, bytes, "%s: rank %u sends rank %u %lld rows from row %lld on, of the %lld that it has",
                from.what, from.rank, to, (long long)rows, (long long)at, (long long)from.in_rows);
  return false;
}

}  // namespace jax
}  // namespace a2a

using namespace a2a::jax;

void* a2a_jax_site_type(void) { return &site_type; }
void* a2a_jax_site_info(void) { return &site_info; }

void* a2a_jax_instantiate(void* call_frame) {
  auto* f = static_cast<CallFrame*>(call_frame);
  if (answer_metadata(f, true)) return nullptr;
  if (Error* failed = wrong_version(f)) return failed;
  auto* site = static_cast<Site*>(std::calloc(1, sizeof(Site)));
  std::int64_t communicator = 0;
  if (scalar(*f, "communicator", kS64, &communicator) && communicator) site->number = count_site(communicator);
  State args{sizeof args, nullptr, f->execution, kInstantiate, &site_type, site};
  return f->api->state_set(&args);
}

void* a2a_jax_execute(void* call_frame) {
  auto* f = static_cast<CallFrame*>(call_frame);
  if (answer_metadata(f, false)) return nullptr;
  if (Error* failed = wrong_version(f)) return failed;
  Call call;
  if (Error* failed = read_call(f, &call)) return failed;
  if (call.communicator < 0)
    return errorf(f->api, kInvalidArgument,
                  "%s: its communicator serves GPUs, and this program was compiled for a CPU; run it on a GPU "
                  "(jax.default_device), or pass a2a.communicator(group)",
                  call.what);
  if (Error* failed = read_place(f, &call)) return failed;
  State args{sizeof args, nullptr, f->execution, kInstantiate, &site_type, nullptr};
  if (Error* failed = f->api->state_get(&args)) return failed;
  if (call.communicator) return submit(f, call, static_cast<Site*>(args.state));
  return meet(f, call, args.state);
}
