// Blocks of a mapped segment that go out as tensors and come back when the last reference dies.
//
// A tensor is made from a DLPack capsule whose deleter is C code here: it runs on whichever thread drops the last reference,
// needs no interpreter, and only marks the block free on this rank. The mapping outlives the communicator as long as a
// tensor needs it. In a forked child the deleter does nothing: children own nothing.
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstdlib>
#include <cstring>
#include <new>

#include "../common/layout.h"
#include "a2a.h"

namespace {

// The fixed part of the DLPack ABI (dlpack.h, version 0.x "DLManagedTensor").
struct DLDevice {
  int32_t type, id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

struct Block {
  std::size_t at, bytes;
};

}  // namespace

struct a2a_pool {
  pthread_mutex_t mutex;
  std::uint8_t *map, *mine;
  std::size_t map_bytes, mine_bytes;
  Block* blocks;  // by address
  std::size_t count, room;
  bool closed;
  int pid;
  a2a_pool* parent;  // whose block `mine` is, given back with the last of ours
};

namespace {

struct Capsule {
  DLManagedTensor managed;
  int64_t shape[1];
  a2a_pool* pool;
};

void insert(a2a_pool* p, std::size_t index, Block b) {
  if (p->count == p->room) {
    p->room = p->room ? 2 * p->room : 16;
    p->blocks = static_cast<Block*>(std::realloc(p->blocks, p->room * sizeof(Block)));
  }
  std::memmove(p->blocks + index + 1, p->blocks + index, (p->count - index) * sizeof(Block));
  p->blocks[index] = b;
  p->count++;
}

void unmap_if_last(a2a_pool* p) {  // unlocks
  const bool last = p->closed && p->count == 0;
  pthread_mutex_unlock(&p->mutex);
  if (!last) return;
  if (p->map) munmap(p->map, p->map_bytes);
  if (p->parent) a2a_pool_give(p->parent, p->mine);
  std::free(p->blocks);
  std::free(p);
}

void deleter(DLManagedTensor* t) {
  auto* capsule = static_cast<Capsule*>(t->context);
  if (capsule->pool->pid == getpid()) a2a_pool_give(capsule->pool, t->tensor.data);
  std::free(capsule);
}

}  // namespace

a2a_pool* a2a_pool_create(void* map, size_t map_bytes, void* mine, size_t mine_bytes) {
  auto* p = static_cast<a2a_pool*>(std::calloc(1, sizeof(a2a_pool)));
  pthread_mutex_init(&p->mutex, nullptr);
  p->map = static_cast<std::uint8_t*>(map);
  p->map_bytes = map_bytes;
  p->mine = static_cast<std::uint8_t*>(mine);
  p->mine_bytes = mine_bytes;
  p->pid = getpid();
  return p;
}

// A pool of private memory, in huge pages where the system grants them on request. Only address space until it is written.
a2a_pool* a2a_pool_private(size_t bytes) {
  const std::size_t huge = 2 << 20;
  bytes = a2a::align_up(bytes, huge);
  auto* map = static_cast<std::uint8_t*>(
      mmap(nullptr, bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (map == MAP_FAILED) return nullptr;
  auto* mine = reinterpret_cast<std::uint8_t*>(a2a::align_up(reinterpret_cast<std::uintptr_t>(map), huge));
  madvise(mine, bytes, MADV_HUGEPAGE);
  return a2a_pool_create(map, bytes + huge, mine, bytes);
}

// A pool inside one block of another.
a2a_pool* a2a_pool_child(a2a_pool* parent, void* block, size_t bytes) {
  a2a_pool* p = a2a_pool_create(nullptr, 0, block, bytes);
  p->parent = parent;
  return p;
}

// First fit at the lowest address, so that the pages in use stay few and warm. Null when no gap is large enough.
void* a2a_pool_take(a2a_pool* p, size_t bytes) {
  bytes = a2a::align_up(bytes ? bytes : 1, a2a::kPage);
  pthread_mutex_lock(&p->mutex);
  std::size_t at = 0, i = 0;
  while (i < p->count && p->blocks[i].at - at < bytes) {
    at = p->blocks[i].at + p->blocks[i].bytes;
    i++;
  }
  const bool fits = i < p->count || p->mine_bytes - at >= bytes;
  if (fits) insert(p, i, {at, bytes});
  pthread_mutex_unlock(&p->mutex);
  return fits ? p->mine + at : nullptr;
}

// Take [offset, offset + bytes), which the ranks have agreed on. Null if it overlaps a block that still lives here.
void* a2a_pool_take_at(a2a_pool* p, size_t offset, size_t bytes) {
  pthread_mutex_lock(&p->mutex);
  std::size_t i = 0;
  while (i < p->count && p->blocks[i].at < offset) i++;
  const bool fits = offset + bytes <= p->mine_bytes &&
                    (i == 0 || p->blocks[i - 1].at + p->blocks[i - 1].bytes <= offset) &&
                    (i == p->count || offset + bytes <= p->blocks[i].at);
  if (fits) insert(p, i, {offset, bytes});
  pthread_mutex_unlock(&p->mutex);
  return fits ? p->mine + offset : nullptr;
}

void a2a_pool_shrink(a2a_pool* p, void* data, size_t bytes) {
  const std::size_t at = std::size_t(static_cast<std::uint8_t*>(data) - p->mine);
  pthread_mutex_lock(&p->mutex);
  for (std::size_t i = 0; i < p->count; i++)
    if (p->blocks[i].at == at) p->blocks[i].bytes = a2a::align_up(bytes ? bytes : 1, a2a::kPage);
  pthread_mutex_unlock(&p->mutex);
}

void a2a_pool_give(a2a_pool* p, void* data) {
  const std::size_t at = std::size_t(static_cast<std::uint8_t*>(data) - p->mine);
  pthread_mutex_lock(&p->mutex);
  for (std::size_t i = 0; i < p->count; i++)
    if (p->blocks[i].at == at) {
      std::memmove(p->blocks + i, p->blocks + i + 1, (p->count - i - 1) * sizeof(Block));
      p->count--;
      break;
    }
  unmap_if_last(p);
}

int a2a_pool_holds(a2a_pool* p, size_t offset) {
  int held = 0;
  pthread_mutex_lock(&p->mutex);
  for (std::size_t i = 0; i < p->count; i++) held |= p->blocks[i].at == offset;
  pthread_mutex_unlock(&p->mutex);
  return held;
}

void* a2a_pool_dlpack(a2a_pool* p, void* data, size_t bytes) {
  auto* capsule = static_cast<Capsule*>(std::calloc(1, sizeof(Capsule)));
  capsule->pool = p;
  capsule->shape[0] = int64_t(bytes);
  capsule->managed.tensor = {data, {1, 0}, 1, {1, 8, 1}, capsule->shape, nullptr, 0};  // kDLCPU, uint8
  capsule->managed.context = capsule;
  capsule->managed.deleter = deleter;
  return &capsule->managed;
}

void a2a_pool_close(a2a_pool* p) {
  pthread_mutex_lock(&p->mutex);
  p->closed = true;
  unmap_if_last(p);
}
