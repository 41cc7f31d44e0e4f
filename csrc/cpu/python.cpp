// Even all-to-alls that were made before, made again at the price of a function call of CPython.
//
// ctypes takes longer to call C than the ranks take to exchange a cache line, and so does every attribute of a tensor that
// Python looks up. Here is instead a function that CPython calls by itself (METH_FASTCALL), on two tensors that it asks
// DLPack's exchange table about: dtype, shape, strides, device and address at once. It knows them again, and exchanges.
//
// This is no extension module. It needs neither Python's headers nor torch's: a2a/kernels/prepared.py hands over what is used
// of Python's C API, all of it stable, and of DLPack's, so one binary serves every Python and every torch.
//
// All of it runs with the GIL, but for the exchange itself: the table of calls needs no other lock.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "a2a.h"

namespace {

constexpr std::size_t kBuckets = 256, kMost = 1024;  // of calls; they start anew when there are more
constexpr std::int32_t kMostDims = 64;               // torch's own limit
constexpr std::int32_t kCpu = 1;                     // DLPack's number for memory of the CPU
constexpr std::uint8_t kComplex = 5;                 // and for complex numbers
constexpr char kCapsule[] = "a2a";
constexpr int kFastCall = 0x80;  // METH_FASTCALL

struct DlTensor {  // DLTensor of DLPack 1
  std::uint8_t* data;
  std::int32_t device_type, device_id, ndim;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;

  std::uint32_t dtype() const { return std::uint32_t(code) << 24 | std::uint32_t(bits) << 16 | lanes; }
  std::uint8_t* begin() const { return data + byte_offset; }
};

struct Call {
  Call* next;
  a2a_even even;
  std::int64_t num_bytes;
  std::uint32_t dtype;
  std::int32_t input_dims, output_dims;
  std::int64_t sizes[1];  // of the input, then of the output
};

struct Prepared {
  std::size_t count;
  Call* buckets[kBuckets];
};

struct Definition {  // PyMethodDef
  const char* name;
  void* (*function)(void* self, void* const* arguments, std::ptrdiff_t count);
  int flags;
  const char* doc;
};

a2a_python python;

// In row-major order without gaps; where a tensor has no element or a dimension no second one, strides mean nothing.
bool contiguous(const DlTensor& t) {
  std::int64_t expected = 1;
  bool dense = true;
  for (std::int32_t i = t.ndim - 1; i >= 0; i--) {
    if (t.shape[i] == 0) return true;
    if (t.strides && t.shape[i] != 1 && t.strides[i] != expected) dense = false;
    expected *= t.shape[i];
  }
  return dense;
}

// Whether torch says False. Bits of a tensor that say what its memory stands for are no part of DLPack.
bool denies(void* tensor, void* method) {
  void* answer = python.call(method, &tensor, 1, nullptr);
  if (answer) python.forget(answer);
  return answer == python.no;
}

bool plain(void* tensor, const DlTensor& told) {
  return told.device_type == kCpu && told.ndim <= kMostDims && contiguous(told) && denies(tensor, python.is_neg) &&
         (told.code != kComplex || denies(tensor, python.is_conj));
}

// What this is about, if it is anything for a prepared call.
bool describe(void* output, void* input, DlTensor& out, DlTensor& in) {
  if (python.describe(output, &out) == 0 && python.describe(input, &in) == 0 && out.dtype() == in.dtype() &&
      plain(output, out) && plain(input, in))
    return true;
  python.clear_error();
  return false;
}

Call** find(Prepared& prepared, const DlTensor& out, const DlTensor& in) {
  std::uint64_t hash = in.dtype();
  for (std::int32_t i = 0; i < in.ndim; i++) hash = (hash ^ std::uint64_t(in.shape[i])) * 0x9E3779B97F4A7C15ull;
  for (std::int32_t i = 0; i < out.ndim; i++) hash = (hash ^ std::uint64_t(out.shape[i])) * 0x9E3779B97F4A7C15ull;
  Call** at = &prepared.buckets[hash >> 56];
  static_assert(kBuckets == 256, "8 bits of the hash");
  for (; *at; at = &(*at)->next) {
    const Call& c = **at;
    if (c.dtype == in.dtype() && c.input_dims == in.ndim && c.output_dims == out.ndim &&
        std::memcmp(c.sizes, in.shape, std::size_t(in.ndim) * 8) == 0 &&
        std::memcmp(c.sizes + in.ndim, out.shape, std::size_t(out.ndim) * 8) == 0)
      break;
  }
  return at;
}

Prepared* of(void* capsule) { return static_cast<Prepared*>(python.pointer_of(capsule, kCapsule)); }

void clear(Prepared& prepared) {
  for (Call*& bucket : prepared.buckets) {
    while (Call* call = bucket) {
      bucket = call->next;
      std::free(call);
    }
  }
  prepared.count = 0;
}

// again(output, input): a Result, or -1, for what was not made before.
void* again(void* capsule, void* const* tensors, std::ptrdiff_t count) {
  DlTensor out, in;
  if (count != 2 || !describe(tensors[0], tensors[1], out, in)) return python.integer(-1);
  const Call* call = *find(*of(capsule), out, in);
  if (!call) return python.integer(-1);
  const std::int64_t apart = out.begin() - in.begin();
  if (-call->num_bytes < apart && apart < call->num_bytes) return python.integer(-1);
  const a2a_even even = call->even;  // another thread may clear the table meanwhile
  void* thread = python.release_gil();
  const int result = a2a_all_to_all_again(&even, out.begin(), in.begin());
  python.take_gil(thread);
  return python.integer(result);
}

void free_capsule(void* capsule) {
  Prepared* prepared = of(capsule);
  clear(*prepared);
  std::free(prepared);
}

// Of the library's own life, which is longer than that of any object of Python's.
const Definition kAgain = {"again", again, kFastCall, nullptr};

}  // namespace

void a2a_python_bind(const a2a_python* functions) { python = *functions; }

void* a2a_prepared_create(void) {
  void* memory = std::calloc(1, sizeof(Prepared));
  return memory ? python.new_capsule(memory, kCapsule, free_capsule) : python.no_memory();
}

void* a2a_prepared_function(void* capsule) { return python.new_function(&kAgain, capsule, nullptr); }

void a2a_prepared_clear(void* capsule) { clear(*of(capsule)); }

size_t a2a_prepared_count(void* capsule) { return of(capsule)->count; }

void a2a_prepared_add(void* capsule, void* output, void* input, const a2a_even* even, size_t num_bytes) {
  Prepared& prepared = *of(capsule);
  DlTensor out, in;
  if (!describe(output, input, out, in)) return;
  if (prepared.count >= kMost) clear(prepared);
  Call** at = find(prepared, out, in);
  if (!*at) {
    const std::size_t dims = std::size_t(in.ndim + out.ndim);
    Call* call = static_cast<Call*>(std::calloc(1, sizeof(Call) + dims * 8));
    if (!call) return;
    call->dtype = in.dtype();
    call->input_dims = in.ndim;
    call->output_dims = out.ndim;
    std::memcpy(call->sizes, in.shape, std::size_t(in.ndim) * 8);
    std::memcpy(call->sizes + in.ndim, out.shape, std::size_t(out.ndim) * 8);
    *at = call;
    prepared.count++;
  }
  (*at)->even = *even;
  (*at)->num_bytes = std::int64_t(num_bytes);
}
