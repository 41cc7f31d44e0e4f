// A driver of two GPUs, with the structures and numbers of nvml.h: what a2a.topology.nvml is held against.
// The first has a link to the second, one to a switch and one that tells nothing; the second is in a fabric and in MIG mode.
#include <string.h>
typedef struct {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char busId[32];
} Pci;
typedef struct {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
} Fabric;
typedef struct {
  unsigned id, scope;
  long long at, took;
  int type;
  int result;
  union {
    double d;
    unsigned u;
    unsigned long long l;
  } value;
} Field;
static int gpus[2];
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char* nvmlErrorString(int error) { return error == 3 ? "Not Supported" : "Other"; }
int nvmlSystemGetDriverVersion(char* to, unsigned n) {
  strncpy(to, "580.95.05", n);
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int* to) {
  *to = 13020;
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned* to) {
  *to = 3;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** to) {
  if (i == 2) return 4;
  *to = gpus + i;
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, void** to) {
  if (!strncmp(uuid, "MIG-", 4)) return 6;
  *to = gpus + (uuid[4] == 'b');
  return strncmp(uuid, "GPU-", 4) ? 6 : 0;
}
int nvmlDeviceGetUUID(void* gpu, char* to, unsigned n) {
  strncpy(to, gpu == gpus ? "GPU-A0" : "GPU-B1", n);
  return 0;
}
int nvmlDeviceGetName(void* gpu, char* to, unsigned n) {
  strncpy(to, "NVIDIA H200", n);
  return 0;
}
int nvmlDeviceGetPciInfo_v3(void* gpu, Pci* to) {
  strcpy(to->busId, gpu == gpus ? "00000000:0A:00.0" : "00000000:0B:00.0");
  return 0;
}
int nvmlDeviceIsMigDeviceHandle(void* gpu, unsigned* to) {
  *to = 0;
  return 0;
}
int nvmlDeviceGetMigMode(void* gpu, unsigned* now, unsigned* then) {
  *now = gpu != gpus;
  *then = 0;
  return 0;
}
int nvmlDeviceGetNvLinkState(void* gpu, unsigned link, unsigned* to) {
  if (link > 3) return 2;
  *to = link != 1;
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void* gpu, unsigned link, unsigned* to) {
  if (link == 3) return 3;
  *to = link ? 2 : 0;
  return 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* gpu, unsigned link, Pci* to) {
  strcpy(to->busId, "00000000:0B:00.0");
  return 0;
}
int nvmlDeviceGetFieldValues(void* gpu, int n, Field* field) {
  if (field->id != 164) return 2;
  field->result = field->scope == 3 ? 3 : 0;
  field->value.u = field->scope ? 53125 : 26562;
  return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void* gpu, Fabric* to) {
  if (to->version != (sizeof(Fabric) | 2 << 24)) return 25;
  memset(to->cluster, gpu == gpus ? 0 : 0xab, 16);
  to->clique = 7;
  to->state = 3;
  to->status = 0;
  return 0;
}
int nvmlDeviceGetP2PStatus(void* a, void* b, unsigned kind, unsigned* to) {
  *to = kind == 2 ? 0 : 5;
  return 0;
}
