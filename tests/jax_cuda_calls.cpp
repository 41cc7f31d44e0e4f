// Calls of csrc/cpu/jax_cuda.cpp as XLA makes them, on fake_cuda.c: what is launched, and what is refused with which words.
// Linked with liba2a.so; prints what is wrong and exits with 1.
#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "a2a.h"
#include "xla_ffi.h"

#if __has_include("xla/ffi/api/c_api.h")  // where jaxlib is: the twin of its header
#include "xla/ffi/api/c_api.h"
#define SAME(theirs, member, ours, field) \
  static_assert(offsetof(theirs, member) == offsetof(a2a::xla::ours, field), #theirs "." #member)
SAME(XLA_FFI_Api, XLA_FFI_Error_Create, Api, error_create);
SAME(XLA_FFI_Api, XLA_FFI_Stream_Get, Api, stream_get);
SAME(XLA_FFI_Api, XLA_FFI_State_Set, Api, state_set);
SAME(XLA_FFI_Api, XLA_FFI_ThreadPool_Schedule, Api, schedule);
SAME(XLA_FFI_Api, XLA_FFI_RunId_Get, Api, run_id_get);
SAME(XLA_FFI_Stream_Get_Args, ctx, StreamOf, execution);
SAME(XLA_FFI_Stream_Get_Args, stream, StreamOf, stream);
SAME(XLA_FFI_CallFrame, args, CallFrame, args);
SAME(XLA_FFI_CallFrame, rets, CallFrame, results);
SAME(XLA_FFI_CallFrame, attrs, CallFrame, attributes);
SAME(XLA_FFI_Buffer, dims, Buffer, dims);
SAME(XLA_FFI_Metadata, state_type_id, Metadata, state);
#endif

namespace a2a {
namespace xla {
struct Error {
  std::string text;
};
}  // namespace xla
}  // namespace a2a

namespace {

using namespace a2a::xla;

int wrong = 0;
void* stream = reinterpret_cast<void*>(0x51);
const char* (*driver_log)();
void (*driver_forget)();
int* launch_result;

Error* create(ErrorCreate* args) { return new Error{args->message}; }
Error* get_stream(StreamOf* args) {
  args->stream = stream;
  return nullptr;
}

void* at(std::uint64_t address) { return reinterpret_cast<void*>(address); }

struct Operand {
  int dtype;
  std::uint64_t address;
  std::vector<std::int64_t> dims;
};

// A call frame as XLA lays it out.
struct Frame {
  Api api{};
  std::int64_t world = 2, element = 4, communicator = 0, request = 0, digest = 5;
  double timeout = 1;
  int minor = kMinor;
  std::vector<Operand> operands, results;

  std::string call() {
    api.size = sizeof api;
    api.version = {sizeof(Version), nullptr, kMajor, minor};
    api.error_create = create;
    api.stream_get = get_stream;
    std::vector<Buffer> made;
    made.reserve(operands.size() + results.size());
    auto buffers = [&](std::vector<Operand>& of, std::vector<Buffer*>& pointers) {
      for (Operand& o : of) {
        made.push_back({sizeof(Buffer), nullptr, o.dtype, at(o.address), std::int64_t(o.dims.size()), o.dims.data()});
        pointers.push_back(&made.back());
      }
    };
    std::vector<Buffer*> in, out;
    buffers(operands, in);
    buffers(results, out);
    const char* names[] = {"communicator", "digest", "element_bytes", "request", "timeout_s", "what", "world"};
    const char* text = "a2a test";
    Span what{text, std::strlen(text)};
    Scalar scalars[] = {{kS64, &communicator}, {kS64, &digest}, {kS64, &element}, {kS64, &request},
                        {kF64, &timeout},      {0, nullptr},    {kS64, &world}};
    Span spans[7];
    Span* span_pointers[7];
    int types[7];
    void* values[7];
    for (int i = 0; i < 7; i++) {
      spans[i] = {names[i], std::strlen(names[i])};
      span_pointers[i] = &spans[i];
      types[i] = i == 5 ? kString : kScalar;
      values[i] = i == 5 ? static_cast<void*>(&what) : &scalars[i];
    }
    CallFrame frame{};
    frame.size = offsetof(CallFrame, future);
    frame.api = &api;
    frame.stage = kExecute;
    frame.args = {sizeof(Buffers), nullptr, std::int64_t(in.size()), nullptr, in.data()};
    frame.results = {sizeof(Buffers), nullptr, std::int64_t(out.size()), nullptr, out.data()};
    frame.attributes = {sizeof(Attributes), nullptr, 7, types, span_pointers, values};
    driver_forget();
    auto* error = static_cast<Error*>(a2a_jax_cuda_execute(&frame));
    if (!error) return driver_log();
    std::string said = "error: " + error->text + "\n" + driver_log();
    delete error;
    return said;
  }
};

void expect(const char* name, const std::string& got, const std::string& part, bool whole = false) {
  if (whole ? got == part : got.find(part) != std::string::npos) return;
  std::printf("%s\n  got      %s\n  expected %s%s\n", name, got.c_str(), whole ? "" : "...", part.c_str());
  wrong = 1;
}

Frame even(std::int64_t communicator, std::int64_t request) {
  Frame f;
  f.communicator = communicator;
  f.request = request;
  f.operands = {{11, 0x1000, {2, 8}}, {kS32, 0, {2}}};  // the last one lies on the GPU: nobody may read it
  f.results = {{11, 0x2000, {2, 8}}};
  return f;
}

Frame ragged(std::int64_t communicator, std::int64_t request) {
  Frame f;
  f.communicator = communicator;
  f.request = request;
  f.operands = {{11, 0x1000, {5, 3}}, {11, 0x2000, {7, 3}}, {kS32, 0x10, {2}}, {kS32, 0x20, {2}},
                {kS32, 0x30, {2}},    {kS32, 0x40, {2}},    {kS32, 0, {2}}};
  f.results = {{11, 0x2000, {7, 3}}};
  return f;
}

}  // namespace

int main() {
  if (a2a_cuda_open()) return std::printf("the fake driver wasn't found\n"), 2;
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  static char* log = static_cast<char*>(dlsym(driver, "fake_cuda_log"));
  driver_log = [] { return static_cast<const char*>(log); };
  void* forget = dlsym(driver, "fake_cuda_forget");
  std::memcpy(&driver_forget, &forget, sizeof forget);
  launch_result = static_cast<int*>(dlsym(driver, "fake_cuda_launch_result"));

  // XLA asks first; the handler is not fit for command buffers
  Metadata metadata{};
  metadata.size = sizeof metadata;
  metadata.traits = 9;
  MetadataExtension extension{{sizeof(MetadataExtension), kMetadataExtension, nullptr}, &metadata};
  CallFrame question{};
  question.extensions = &extension.base;
  if (a2a_jax_cuda_execute(&question) || metadata.version.minor != kMinor || metadata.traits || metadata.state.id)
    expect("metadata", "another answer", "version 0.3, no traits, no state");

  volatile std::uint64_t failure = 0;
  std::uint64_t params[16] = {};
  for (int i = 0; i < 16; i++) params[i] = 0xa0 + std::uint64_t(i);
  a2a_cuda_call call{at(0xf1), at(0xc1), &failure, params, sizeof params, 3, 128, 0, 0, 0};
  const std::int64_t comm = a2a_jax_cuda_connect(2, 1, 2.5, at(0xe));
  const a2a_jax_cuda_shape shape{64, 64, 0, 0}, rows{60, 84, 12, 1};
  const std::int64_t one = a2a_jax_cuda_prepare(comm, &shape, &call);
  call.function = at(0xf2);
  const std::int64_t two = a2a_jax_cuda_prepare(comm, &rows, &call);
  std::memset(params, 0, sizeof params);  // it was copied
  if (comm >= 0 || one <= 0 || two <= one) expect("numbers", "others", "comm < 0 < one < two");

  expect("an even call", even(comm, one).call(),
         "launch 0xf1 on 0x51 grid 3 block 128 2000 1000 a2 a3 a4 a5 a6\nrecord 0xe on 0x51\n", true);
  expect("a ragged call", ragged(comm, two).call(),
         "launch 0xf2 on 0x51 grid 3 block 128 2000 1000 10 20 30 40 a6\nrecord 0xe on 0x51\n", true);
  Frame copied = ragged(comm, two);
  copied.operands[1].address = 0x3000;
  expect("an output of its own", copied.call(), "copy 3000 to 2000 bytes 84 on 0x51\nlaunch 0xf2 on 0x51");
  stream = at(0x52);
  expect("another stream", even(comm, one).call(), "wait 0xe on 0x52 flags 0\nlaunch 0xf1 on 0x52 grid 3");
  expect("the same stream again", even(comm, one).call(),
         "launch 0xf1 on 0x52 grid 3 block 128 2000 1000 a2 a3 a4 a5 a6\n"
         "record 0xe on 0x52\n",
         true);

  Frame f = even(comm, one);
  f.operands[0].dims = f.results[0].dims = {2, 9};
  expect("other sizes", f.call(),
         "error: a2a test: it was traced with 64 bytes in and 64 out among 2 ranks, and is called "
         "with 72 and 72 among 2; trace the program again\n",
         true);
  f = even(comm, one);
  f.world = 4;
  expect("another world", f.call(), "called with 64 and 64 among 4; trace");
  f = even(comm, two);
  expect("another kind", f.call(), "trace the program again");
  f = ragged(comm, two);
  f.operands[0].dims = {15, 1};  // as many bytes
  f.operands[1].dims = f.results[0].dims = {21, 1};
  expect("other rows", f.call(), "trace the program again");
  expect("an unknown launch", even(comm, 77).call(), "nothing was prepared for this call in this process");
  f = even(comm, one);
  f.results[0].dims = {3, 8};
  expect("sizes that don't fit", f.call(), "64 bytes can't be shared by 2 ranks");
  f = even(comm, one);
  f.operands.push_back(f.operands[1]);
  expect("too many operands", f.call(), "3 operands, expected 2 or 7");
  f = ragged(comm, two);
  f.operands[3].dtype = kS64;
  expect("lists of another dtype", f.call(), "offsets and sizes are 2 of int32");
  expect("devices of one process", even(0, one).call(),
         "start one process for each GPU and pass a2a.communicator(group, "
         "device=\"cuda\") in place of the axis");
  expect("a communicator of CPU tensors", even(3, one).call(), "its communicator serves CPU tensors");
  f = even(comm, one);
  f.minor = 2;
  expect("an older jaxlib", f.call(), "this jaxlib speaks version 0.2 of XLA's FFI, a2a needs 0.3");

  stream = at(0xe0);
  expect("another GPU", even(comm, one).call(),
         "XLA runs this program on another GPU than the communicator was made on");
  stream = at(0x52);
  *launch_result = 700;
  expect(
      "a launch that fails", even(comm, one).call(),
      "error: a2a test: rank 1's kernel can't be launched: an illegal memory access was encountered (CUDA error 700)");
  *launch_result = 0;
  failure = 1ull << 48 | 1ull << 32 | 0ull << 16;
  expect(
      "a failure on record", even(comm, one).call(),
      "error: a2a test: rank 1 can't: a rank did not come within the communicator's timeout (found by rank 1, about "
      "rank 0, "
      "the timeout is 2.5 s). The communicator is broken since then; its check() raises this as one of a2a's errors\n",
      true);
  failure = 5ull << 48 | 1ull << 32 | 1ull << 16;
  expect("lists that lie outside", ragged(comm, two).call(),
         "a rank's offsets or sizes lie outside its operand or output");
  failure = 0;
  a2a_jax_cuda_disconnect(comm);
  expect("a closed communicator", even(comm, one).call(),
         "error: a2a test: its communicator is closed; trace the program "
         "with a new one\n",
         true);
  if (a2a_jax_cuda_prepare(comm, &shape, &call)) expect("preparing for a closed one", "a number", "0");
  return wrong;
}
