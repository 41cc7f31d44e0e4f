// Collectives that were made before, made again at the price of a function call of CPython.
//
// ctypes takes longer to call C than the ranks take to exchange a cache line, and so does every attribute of a tensor that
// Python looks up. Here are instead functions that CPython calls by itself (METH_FASTCALL), on tensors that they ask DLPack's
// exchange table about: dtype, shape, strides, device and address at once. They know the call again, and make it or submit it.
//
// A call is known by what its request to the library depends on: the collective, the reduction, the dtype, and the bytes of a
// row (all-to-all) or the elements of the input (the others). All else may be new, also the splits of an all-to-all, which are
// checked in one pass. What is wrong or unusual is "unknown": Python checks it again, and says what is wrong.
//
// This is no extension module. It needs neither Python's headers nor torch's: a2a/kernels/prepared.py hands over what is used
// of Python's C API, all of it stable, and of DLPack's, so one binary serves every Python and every torch.
//
// All of it runs with the GIL, but for the collectives themselves: the table of calls needs no other lock.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "a2a.h"
#include "signal.h"

namespace {

constexpr std::size_t kSlots = 512, kMost = 256;  // of calls; they start anew when there are more
static_assert(kMost >= a2a::kTexts, "as many as there are requests");
constexpr std::int32_t kMostDims = 64;  // torch's own limit
constexpr std::int32_t kCpu = 1;        // DLPack's number for memory of the CPU
constexpr std::uint8_t kComplex = 5;    // and for complex numbers
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
  std::int64_t elements(std::int32_t from_dim = 0) const {
    std::int64_t product = 1;
    for (std::int32_t i = from_dim; i < ndim; i++) product *= shape[i];
    return product;
  }
  std::int64_t row_bytes() const { return elements(1) * bits * lanes / 8; }
  std::int64_t bytes() const { return elements() * bits * lanes / 8; }
};

struct Key {
  std::int64_t number;  // bytes of a row, or elements of the input; see above
  const void* op;       // a member of torch's ReduceOp, which live for ever; null: nothing is reduced
  std::uint32_t dtype, kind;

  bool operator==(const Key& other) const {
    return number == other.number && op == other.op && dtype == other.dtype && kind == other.kind;
  }
};

struct Call {
  Key key;
  bool used;
  union {
    a2a_even even;  // its bytes_per_peer is of the call
    a2a_reduction reduction;
  };
};

struct Prepared {
  std::size_t count;  // of calls
  Call calls[kSlots];
};

struct Definition {  // PyMethodDef
  const char* name;
  void* (*function)(void* self, void* const* arguments, std::ptrdiff_t count);
  int flags;
  const char* doc;
};

a2a_python python;

void* unknown() { return python.integer(-1); }

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

// What a tensor is, if it is one for a prepared call.
bool describe(void* tensor, DlTensor& told) {
  if (python.describe(tensor, &told) == 0 && told.device_type == kCpu && told.ndim <= kMostDims &&
      told.bits * told.lanes % 8 == 0 && contiguous(told) && denies(tensor, python.is_neg) &&
      (told.code != kComplex || denies(tensor, python.is_conj)))
    return true;
  python.clear_error();
  return false;
}

bool overlap(const DlTensor& a, const DlTensor& b) {
  return a.begin() < b.begin() + b.bytes() && b.begin() < a.begin() + a.bytes();
}

// Of an all-to-all: a side without elements says nothing about rows. -1: the sides differ, or have no rows.
std::int64_t row_bytes(const DlTensor& out, const DlTensor& in) {
  if (out.ndim == 0 || in.ndim == 0) return -1;
  if (in.elements() == 0) return out.elements() == 0 ? 0 : out.row_bytes();
  return out.elements() == 0 || out.row_bytes() == in.row_bytes() ? in.row_bytes() : -1;
}

Key key_of(std::uint32_t kind, const void* op, const DlTensor& out, const DlTensor& in) {
  const std::int64_t number = kind == A2A_ALL_TO_ALL ? row_bytes(out, in) : in.elements();
  return {number, kind == A2A_ALL_REDUCE || kind == A2A_REDUCE_SCATTER ? op : nullptr, in.dtype(), kind};
}

// Where such a call is, or would be put.
Call& find(Prepared& prepared, const Key& key) {
  const std::uint64_t op = reinterpret_cast<std::uintptr_t>(key.op);
  std::uint64_t hash = (std::uint64_t(key.number) ^ std::uint64_t(key.dtype) << 32) * 0x9E3779B97F4A7C15ull;
  hash = (hash ^ op ^ key.kind) * 0x9E3779B97F4A7C15ull;
  static_assert(kSlots == 512, "9 bits of the hash");
  for (std::size_t i = hash >> 55;; i = (i + 1) % kSlots) {
    Call& call = prepared.calls[i];
    if (!call.used || call.key == key) return call;
  }
}

Prepared& of(void* capsule) { return *static_cast<Prepared*>(python.pointer_of(capsule, kCapsule)); }

void clear(Prepared& prepared) {
  if (prepared.count) std::memset(prepared.calls, 0, sizeof prepared.calls);
  prepared.count = 0;
}

// Another thread may clear the table meanwhile, and close the context, which waits for its callers: `collective` has copied
// what it needs of the table.
template <class Collective>
void* run(a2a_context* context, const Collective& collective) {  // an int, or a ticket
  std::atomic<std::uint32_t>& callers = reinterpret_cast<a2a::Context*>(context)->callers;
  callers.store(callers.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  void* thread = python.release_gil();
  const auto result = collective();
  python.take_gil(thread);
  callers.store(callers.load(std::memory_order_relaxed) - 1, std::memory_order_release);
  return python.integer(long(result));
}

void* type_of(void* object) {
  void* type = python.type_of(object);
  python.forget(type);  // the object keeps it
  return type;
}

// Split sizes as an object of Python's; arrays are turned into lists.
struct Splits {
  void* object;
  void* made = nullptr;

  explicit Splits(void* given) : object(given) {
    void* type = type_of(given);
    if (given == python.none || type == python.list || type == python.tuple) return;
    if (void* method = python.attribute(given, "tolist")) {
      made = python.call(method, nullptr, 0, nullptr);
      python.forget(method);
    }
    if (made)
      object = made;
    else
      python.clear_error();
  }
  ~Splits() {
    if (made) python.forget(made);
  }
  Splits(const Splits&) = delete;

  // What goes to or comes from each of P ranks, in bytes. False: no splits of this tensor.
  bool of(const DlTensor& tensor, std::uint32_t P, std::uint64_t* bytes) const {
    const std::int64_t row = tensor.row_bytes();
    void* type = type_of(object);
    if (object != python.none && type != python.list && type != python.tuple) return false;
    const std::ptrdiff_t n = type == python.list    ? python.list_size(object)
                             : type == python.tuple ? python.tuple_size(object)
                                                    : 0;
    std::int64_t left = tensor.shape[0];
    if (n == 0) {
      for (std::uint32_t p = 0; p < P; p++) bytes[p] = std::uint64_t(left / P * row);
      return left % P == 0;
    }
    if (n != std::ptrdiff_t(P)) return false;
    const auto at = type == python.list ? python.list_at : python.tuple_at;
    for (std::uint32_t p = 0; p < P; p++) {
      void* number = at(object, std::ptrdiff_t(p));
      if (type_of(number) != python.int_type) return false;  // a bool, say
      const std::int64_t rows = python.to_int64(number);
      if (rows < 0 || rows > left) {
        python.clear_error();  // of a number that is too large for 64 bits
        return false;
      }
      left -= rows;
      bytes[p] = std::uint64_t(rows * row);
    }
    return left == 0;
  }
};

bool all_equal(const std::uint64_t* sizes, std::uint32_t n) {
  for (std::uint32_t i = 1; i < n; i++)
    if (sizes[i] != sizes[0]) return false;
  return true;
}

// all_to_all(output, input, output_splits, input_splits); later: on the progress thread
template <bool later>
void* all_to_all(void* capsule, void* const* arguments, std::ptrdiff_t count) {
  if (count != 4) return unknown();
  const Splits output_splits(arguments[2]), input_splits(arguments[3]);  // first, since arrays may run anything
  DlTensor out, in;
  if (!describe(arguments[0], out) || !describe(arguments[1], in) || out.dtype() != in.dtype()) return unknown();
  const Call& call = find(of(capsule), key_of(A2A_ALL_TO_ALL, nullptr, out, in));
  if (!call.used || overlap(out, in)) return unknown();  // pieces arrive while others are still to be sent
  a2a_even even = call.even;
  const auto& c = *reinterpret_cast<const a2a::Context*>(even.context);
  const std::uint32_t P = c.world;
  auto* received = static_cast<std::uint64_t*>(__builtin_alloca(P * 8));
  auto* sent = static_cast<std::uint64_t*>(__builtin_alloca(P * 8));
  if (!output_splits.of(out, P, received) || !input_splits.of(in, P, sent) || sent[c.rank] != received[c.rank])
    return unknown();
  if (!later && sent[0] == received[0] && all_equal(sent, P) && all_equal(received, P)) {
    even.bytes_per_peer = sent[0];
    return run(even.context, [&] { return a2a_all_to_all_again(&even, out.begin(), in.begin()); });
  }
  auto** to = static_cast<void**>(__builtin_alloca(P * sizeof(void*)));
  auto** from = static_cast<const void**>(__builtin_alloca(P * sizeof(void*)));
  std::uint8_t *next_out = out.begin(), *next_in = in.begin();
  for (std::uint32_t p = 0; p < P; p++) {
    to[p] = next_out;
    from[p] = next_in;
    next_out += received[p];
    next_in += sent[p];
  }
  const auto request = std::uint32_t(even.request);
  if (later) return run(even.context, [&] { return a2a_submit(even.context, request, to, received, from, sent); });
  return run(even.context, [&] { return a2a_all_to_all(even.context, request, to, received, from, sent); });
}

// all_reduce(tensor, op), reduce_scatter(output, input, op), all_gather(output, input); later: as above
template <std::uint32_t kind, bool later>
void* reduction(void* capsule, void* const* arguments, std::ptrdiff_t count) {
  constexpr bool in_place = kind == A2A_ALL_REDUCE, gathers = kind == A2A_ALL_GATHER;
  if (count != 3 - in_place - gathers) return unknown();
  DlTensor out, in;
  if (!describe(arguments[0], out) || (!in_place && !describe(arguments[1], in))) return unknown();
  if (in_place) in = out;
  if (out.dtype() != in.dtype()) return unknown();
  const Call& call = find(of(capsule), key_of(kind, arguments[count - 1], out, in));
  if (!call.used) return unknown();
  const a2a_reduction made = call.reduction;
  if (!in_place) {
    const auto& c = *reinterpret_cast<const a2a::Context*>(made.context);
    const DlTensor &whole = gathers ? out : in, &share = gathers ? in : out;
    if (whole.elements() != share.elements() * c.world) return unknown();
    // A share may lie where it belongs. Elsewhere it would be stored over what is still to be sent.
    if (overlap(out, in) && share.begin() != whole.begin() + c.rank * share.bytes()) return unknown();
  }
  if (later) return run(made.context, [&] { return a2a_submit_reduction(&made, out.begin(), in.begin()); });
  return run(made.context, [&] { return a2a_reduce(&made, out.begin(), in.begin()); });
}

void free_capsule(void* capsule) { std::free(&of(capsule)); }

// Of the library's own life, which is longer than that of any object of Python's. By `later` and kind.
template <bool later>
constexpr Definition kReduce = {"all_reduce", reduction<A2A_ALL_REDUCE, later>, kFastCall, nullptr};
template <bool later>
constexpr Definition kScatter = {"reduce_scatter", reduction<A2A_REDUCE_SCATTER, later>, kFastCall, nullptr};
template <bool later>
constexpr Definition kGather = {"all_gather", reduction<A2A_ALL_GATHER, later>, kFastCall, nullptr};
template <bool later>
constexpr Definition kExchange = {"all_to_all", all_to_all<later>, kFastCall, nullptr};
const Definition* const kDefinitions[2][4] = {{&kReduce<false>, &kScatter<false>, &kGather<false>, &kExchange<false>},
                                              {&kReduce<true>, &kScatter<true>, &kGather<true>, &kExchange<true>}};

}  // namespace

void a2a_python_bind(const a2a_python* functions) { python = *functions; }

void* a2a_prepared_create(void) {
  void* memory = std::calloc(1, sizeof(Prepared));
  return memory ? python.new_capsule(memory, kCapsule, free_capsule) : python.no_memory();
}

void* a2a_prepared_function(void* capsule, uint32_t kind, int later) {
  return python.new_function(kDefinitions[later][kind], capsule, nullptr);
}

void a2a_prepared_clear(void* capsule) { clear(of(capsule)); }

size_t a2a_prepared_count(void* capsule) { return of(capsule).count; }

void a2a_prepared_add(void* capsule, uint32_t kind, void* op, void* output, void* input, const void* made) {
  Prepared& prepared = of(capsule);
  DlTensor out, in;
  if (!describe(output, out) || !describe(input, in)) return;
  const Key key = key_of(kind, op, out, in);
  if (key.number < 0) return;
  if (prepared.count >= kMost) clear(prepared);
  Call& call = find(prepared, key);
  prepared.count += !call.used;
  call.used = true;
  call.key = key;
  if (kind == A2A_ALL_TO_ALL)
    call.even = *static_cast<const a2a_even*>(made);
  else
    call.reduction = *static_cast<const a2a_reduction*>(made);
}
