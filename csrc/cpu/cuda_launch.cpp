// Loading and launching CUDA kernels: the few functions of the CUDA driver that calls from Python must not pay for.
//
// libcuda.so.1 is opened at run time, so that the library loads on machines without a GPU. No CUDA header is needed: the types
// below are the driver's, whose binary interface does not change within a function's name (CUDA 11.8 and newer).
#include <dlfcn.h>

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
           find(library, d.context_pop, "cuCtxPopCurrent_v2") && find(library, d.error_string, "cuGetErrorString");
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

int a2a_cuda_launch(const a2a_cuda_call* call, void* stream, uint64_t first, uint64_t second) {
  if (call->failure && *call->failure) return -a2a::kFailed;
  if (call->params_bytes > kMostParams || call->params_bytes < 2 * sizeof(std::uint64_t)) return kInvalidValue;
  alignas(16) std::uint64_t params[kMostParams / sizeof(std::uint64_t)];
  std::memcpy(params, call->params, call->params_bytes);
  params[0] = first;
  params[1] = second;
  void* pointers[] = {params};
  Attribute attributes[2];
  unsigned count = 0;
  if (call->cluster > 1) {
    Attribute& a = attributes[count++];
    std::memset(&a, 0, sizeof a);
    a.id = kClusterDimension;
    a.cluster[0] = call->cluster;
    a.cluster[1] = a.cluster[2] = 1;
  }
  if (call->programmatic) {
    Attribute& a = attributes[count++];
    std::memset(&a, 0, sizeof a);
    a.id = kProgrammaticStreamSerialization;
    a.flag = 1;
  }
  const Config config{{call->grid, 1, 1}, {call->block, 1, 1}, call->shared_bytes, stream, attributes, count};
  Handle current = nullptr;
  if (int error = g_driver.context_get(&current)) return error;
  if (current == call->context) return g_driver.launch(&config, call->function, pointers, nullptr);
  if (int error = g_driver.context_push(call->context)) return error;  // another device, or a thread that has none yet
  const int error = g_driver.launch(&config, call->function, pointers, nullptr);
  g_driver.context_pop(&current);
  return error;
}
