/* A CUDA driver without a GPU: the functions that csrc/cpu/cuda_launch.cpp opens, which write down what they are asked for.
 * Streams and contexts are numbers; stream 0xs belongs to context 0xc1, stream 0xe0 to another. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  void* attributes;
  unsigned count;
} Config;

char fake_cuda_log[1 << 16];
int fake_cuda_launch_result;
static size_t at;

static void say(const char* format, ...) {
  va_list values;
  va_start(values, format);
  at += (size_t)vsnprintf(fake_cuda_log + at, sizeof fake_cuda_log - at, format, values);
  va_end(values);
}

void fake_cuda_forget(void) { fake_cuda_log[at = 0] = 0; }

int cuModuleLoadData(void** module, const void* image) { return (void)module, (void)image, 1; }
int cuModuleUnload(void* module) { return (void)module, 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  return (void)function, (void)module, (void)name, 1;
}
int cuModuleGetGlobal_v2(uint64_t* pointer, size_t* bytes, void* module, const char* name) {
  return (void)pointer, (void)bytes, (void)module, (void)name, 1;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) { return (void)to, (void)from, (void)bytes, 1; }
int cuFuncSetAttribute(void* function, int attribute, int value) {
  return (void)function, (void)attribute, (void)value, 0;
}

int cuLaunchKernelEx(const Config* c, void* function, void** params, void** extra) {
  const uint64_t* w = params[0];
  (void)extra;
  say("launch %p on %p grid %u block %u", function, c->stream, c->grid[0], c->block[0]);
  for (int i = 0; i < 7; i++) say(" %llx", (unsigned long long)w[i]);
  say("\n");
  return fake_cuda_launch_result;
}

int cuCtxGetCurrent(void** context) { return *context = (void*)0xc1, 0; }
int cuCtxPushCurrent_v2(void* context) { return say("push %p\n", context), 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = NULL, say("pop\n"), 0; }
int cuGetErrorString(int error, const char** text) {
  return *text = error == 700 ? "an illegal memory access was encountered" : "some error", 0;
}
int cuEventCreate(void** event, unsigned flags) { return (void)flags, *event = (void*)0xe, 0; }
int cuEventDestroy_v2(void* event) { return (void)event, 0; }
int cuEventRecord(void* event, void* stream) { return say("record %p on %p\n", event, stream), 0; }
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return say("wait %p on %p flags %u\n", event, stream, flags), 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  return say("copy %llx to %llx bytes %zu on %p\n", (unsigned long long)from, (unsigned long long)to, bytes, stream), 0;
}
int cuStreamGetCtx(void* stream, void** context) {
  return *context = stream == (void*)0xe0 ? (void*)0xc2 : (void*)0xc1, 0;
}
