// Loading and launching CUDA kernels: the few functions of the CUDA driver that calls from Python must not pay for.
//
// libcuda.so.1 is opened at run time, so that the library loads on machines without a GPU. No CUDA header is needed: the types
// below are the driver's, whose binary interface does not change within a function's name (CUDA 11.8 and newer).
#include <dlfcn.h>
#include <time.h>

#include <cstring>

#include "a2a.h"
#include "compat.h"
#include "signal.h"

namespace {

using CuResult = int;  // CUresult; 0 is success
using Handle = void*;

enum AttributeId : int { kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };  // CUlaunchAttributeID

struct Attribute {  // CUlaunchAttribute
  AttributeId id;
  char pad[4];
  union {
    char size[64];
    unsigned cluster[3];
    int flag;
  };
};
static_assert(sizeof(Attribute) == 72, "as in cuda.h");

struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  Handle stream;
  Attribute* attributes;
  unsigned count;
};
static_assert(sizeof(Config) == 56, "as in cuda.h");

constexpr int kMaxDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kNoDriver = 100;             // CUDA_ERROR_NO_DEVICE, for want of a library to ask
constexpr int kInvalidValue = 1;           // CUDA_ERROR_INVALID_VALUE
constexpr std::size_t kMostParams = 4096;  // bytes of a kernel's parameters on every driver

struct Driver {
  CuResult (*module_load)(Handle* module, const void* image);
  CuResult (*module_unload)(Handle module);
  CuResult (*module_function)(Handle* function, Handle module, const char* name);
  CuResult (*module_global)(std::uint64_t* pointer, std::size_t* bytes, Handle module, const char* name);
  CuResult (*copy_to_host)(void* to, std::uint64_t from, std::size_t bytes);
  CuResult (*function_attribute)(Handle function, int attribute, int value);
  CuResult (*launch)(const Config* config, Handle function, void** params, void** extra);
  CuResult (*context_get)(Handle* context);
  CuResult (*context_push)(Handle context);
  CuResult (*context_pop)(Handle* context);
  CuResult (*error_string)(CuResult error, const char** text);
  CuResult (*event_create)(Handle* event, unsigned flags);
  CuResult (*event_destroy)(Handle event);
  CuResult (*event_record)(Handle event, Handle stream);
  CuResult (*stream_wait)(Handle stream, Handle event, unsigned flags);
  CuResult (*copy)(std::uint64_t to, std::uint64_t from, std::size_t bytes, Handle stream);
  CuResult (*stream_context)(Handle stream, Handle* context);  // or null
};

Driver g_driver;
bool g_open;  // written once, under Python's lock

template <typename F>
bool find(void* library, F& function, const char* name) {
  void* symbol = dlsym(library, name);
  std::memcpy(&function, &symbol, sizeof function);
  return symbol != nullptr;
}

}  // namespace

int a2a_cuda_open(void) {
  if (g_open) return 0;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return kNoDriver;
  Driver& d = g_driver;
  g_open = find(library, d.module_load, "cuModuleLoadData") && find(library, d.module_unload, "cuModuleUnload") &&
           find(library, d.module_function, "cuModuleGetFunction") &&
           find(library, d.module_global, "cuModuleGetGlobal_v2") && find(library, d.copy_to_host, "cuMemcpyDtoH_v2") &&
           find(library, d.function_attribute, "cuFuncSetAttribute") && find(library, d.launch, "cuLaunchKernelEx") &&
           find(library, d.context_get, "cuCtxGetCurrent") && find(library, d.context_push, "cuCtxPushCurrent_v2") &&
           find(library, d.context_pop, "cuCtxPopCurrent_v2") && find(library, d.error_string, "cuGetErrorString") &&
           find(library, d.event_create, "cuEventCreate") && find(library, d.event_destroy, "cuEventDestroy_v2") &&
           find(library, d.event_record, "cuEventRecord") && find(library, d.stream_wait, "cuStreamWaitEvent") &&
           find(library, d.copy, "cuMemcpyDtoDAsync_v2");
  find(library, d.stream_context, "cuStreamGetCtx");
  return g_open ? 0 : kNoDriver;
}

const char* a2a_cuda_error(int error) {
  const char* text = nullptr;
  if (g_open) g_driver.error_string(error, &text);
  return text ? text : "no CUDA driver (libcuda.so.1) that a2a can use";
}

int a2a_cuda_load(const void* cubin, void** module) { return g_open ? g_driver.module_load(module, cubin) : kNoDriver; }

int a2a_cuda_unload(void* module) { return g_open ? g_driver.module_unload(module) : kNoDriver; }

int a2a_cuda_function(void* module, const char* name, uint32_t shared_bytes, void** function) {
  if (!g_open) return kNoDriver;
  if (int error = g_driver.module_function(function, module, name)) return error;
  return g_driver.function_attribute(*function, kMaxDynamicSharedBytes, int(shared_bytes));
}

int a2a_cuda_constant(void* module, const char* name, uint64_t* value) {
  if (!g_open) return kNoDriver;
  std::uint64_t pointer = 0;
  std::size_t bytes = 0;
  if (int error = g_driver.module_global(&pointer, &bytes, module, name)) return error;
  return bytes == sizeof *value ? g_driver.copy_to_host(value, pointer, bytes) : kInvalidValue;
}

namespace {

alignas(16) thread_local std::uint64_t t_params[kMostParams / sizeof(std::uint64_t)];

int launch(const a2a_cuda_call& call, Handle stream) {  // with t_params
  void* pointers[] = {t_params};
  Attribute attributes[2];
  unsigned count = 0;
  if (call.cluster > 1) {
    Attribute& a = attributes[count++];
    std::memset(&a, 0, sizeof a);
    a.id = kClusterDimension;
    a.cluster[0] = call.cluster;
    a.cluster[1] = a.cluster[2] = 1;
  }
  if (call.programmatic) {
    Attribute& a = attributes[count++];
    std::memset(&a, 0, sizeof a);
    a.id = kProgrammaticStreamSerialization;
    a.flag = 1;
  }
  const Config config{{call.grid, 1, 1}, {call.block, 1, 1}, call.shared_bytes, stream, attributes, count};
  return g_driver.launch(&config, call.function, pointers, nullptr);
}

// Makes `context` the thread's while it lives: another device, or a thread that has none yet.
class Current {
 public:
  explicit Current(Handle context) {
    Handle current = nullptr;
    error = g_driver.context_get(&current);
    if (error || current == context) return;
    error = g_driver.context_push(context);
    pushed_ = !error;
  }
  ~Current() {
    Handle current;
    if (pushed_) g_driver.context_pop(&current);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  int error;

 private:
  bool pushed_ = false;
};

}  // namespace

int a2a_cuda_launch(const a2a_cuda_call* call, void* stream, uint64_t first, uint64_t second) {
  if (call->failure && *call->failure) return -a2a::kFailed;
  if (call->params_bytes > kMostParams || call->params_bytes < 2 * sizeof(std::uint64_t)) return kInvalidValue;
  std::memcpy(t_params, call->params, call->params_bytes);
  t_params[0] = first;
  t_params[1] = second;
  const Current current(call->context);
  return current.error ? current.error : launch(*call, stream);
}

int a2a_cuda_event(void** event) {
  constexpr unsigned kDisableTiming = 2;
  return g_open ? g_driver.event_create(event, kDisableTiming) : kNoDriver;
}

int a2a_cuda_event_free(void* event) { return g_open ? g_driver.event_destroy(event) : kNoDriver; }

int a2a_cuda_stream_context(void* stream, void** context) {
  *context = nullptr;
  if (!g_open) return kNoDriver;
  return g_driver.stream_context ? g_driver.stream_context(stream, context) : 0;
}

int a2a_cuda_run(const a2a_cuda_step* steps, uint32_t count, void* const* streams) {
  for (std::uint32_t i = 0; i < count; i++) {
    const a2a_cuda_step& step = steps[i];
    void* stream = streams[step.stream];
    int error = 0;
    if (step.kind == A2A_CUDA_LAUNCH) {
      const auto& call = *static_cast<const a2a_cuda_call*>(step.what);
      if (i == 0 && call.failure && *call.failure) return -a2a::kFailed;
      const std::uint32_t patch_bytes = step.patch_words * 4;
      if (call.params_bytes > kMostParams || step.patch_at + patch_bytes > call.params_bytes) return kInvalidValue;
      std::memcpy(t_params, call.params, call.params_bytes);
      std::memcpy(reinterpret_cast<char*>(t_params) + step.patch_at, step.patch, patch_bytes);
      const Current current(call.context);
      error = current.error ? current.error : launch(call, stream);
    } else if (step.kind == A2A_CUDA_RECORD) {
      error = g_driver.event_record(step.what, stream);
    } else if (step.kind == A2A_CUDA_COPY) {
      std::uint64_t from_bytes[2];
      std::memcpy(from_bytes, step.patch, sizeof from_bytes);
      error = g_driver.copy(reinterpret_cast<std::uint64_t>(step.what), from_bytes[0], from_bytes[1], stream);
    } else {
      error = g_driver.stream_wait(stream, step.what, 0);
    }
    if (error) return error;
  }
  return 0;
}

int a2a_cuda_await(const volatile uint64_t* word, uint64_t wanted, const volatile uint64_t* failure, double seconds) {
  timespec start;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (std::uint32_t spins = 1; __atomic_load_n(word, __ATOMIC_ACQUIRE) != wanted; spins++) {
    if (failure && *failure) return -1;
    if (spins % 1024) continue;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (double(now.tv_sec - start.tv_sec) + double(now.tv_nsec - start.tv_nsec) * 1e-9 > seconds) return -2;
  }
  return 0;
}
