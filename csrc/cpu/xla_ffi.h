// What jax_ffi.cpp needs of XLA's FFI C interface, version 0.3: how XLA calls a handler, and what a handler may ask of XLA.
//
// Declared here rather than included, so that the library is built without jaxlib and one binary serves every jaxlib that
// speaks this version. The layout is XLA's contract ("xla/ffi/api/c_api.h"): fields are only ever added at the end of a
// minor version, and each struct begins with the size that its maker knows. Functions that are not used here are void*.
#pragma once
#include <cstddef>
#include <cstdint>

namespace a2a {
namespace xla {

constexpr int kMajor = 0, kMinor = 3;

struct Error;      // made by Api::error_create, owned by XLA once returned or handed to future_set_error
struct Future;     // of one call; owned by XLA
struct Execution;  // good only while the handler runs
struct CallFrame;

enum Code : int { kInvalidArgument = 3, kDeadlineExceeded = 4, kFailedPrecondition = 9, kAborted = 10, kInternal = 13 };
enum Stage : int { kInstantiate = 0, kExecute = 3 };
enum DataType : int { kS32 = 4, kS64 = 5, kF64 = 12 };
enum AttributeType : int { kScalar = 3, kString = 4 };
constexpr int kMetadataExtension = 1;

struct Extension {
  std::size_t size;
  int type;
  Extension* next;
};
struct Version {
  std::size_t size;
  Extension* extensions;
  int major, minor;
};
struct TypeId {
  std::int64_t id;
};
struct TypeInfo {
  std::size_t size;
  Extension* extensions;
  void (*destroy)(void* object);
};
struct Metadata {
  std::size_t size;
  Version version;
  std::uint32_t traits;
  TypeId state;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Buffer {
  std::size_t size;
  Extension* extensions;
  int dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};
struct Span {
  const char* data;
  std::size_t bytes;
};
struct Scalar {
  int dtype;
  void* value;
};
struct Buffers {  // arguments, or results
  std::size_t size;
  Extension* extensions;
  std::int64_t count;
  int* types;
  Buffer** buffers;
};
struct Attributes {
  std::size_t size;
  Extension* extensions;
  std::int64_t count;
  int* types;
  Span** names;
  void** values;  // of a scalar: Scalar*; of a string: Span*
};

struct ErrorCreate {
  std::size_t size;
  Extension* extensions;
  const char* message;  // copied
  Code code;
};
struct FutureCreate {
  std::size_t size;
  Extension* extensions;
  Future* future;
};
struct FutureSetAvailable {
  std::size_t size;
  Extension* extensions;
  Future* future;
};
struct FutureSetError {
  std::size_t size;
  Extension* extensions;
  Future* future;
  Error* error;
};
struct State {  // to set, or that was set
  std::size_t size;
  Extension* extensions;
  Execution* execution;
  int stage;
  TypeId* type;
  void* state;
};
struct Schedule {
  std::size_t size;
  Extension* extensions;
  Execution* execution;
  void (*task)(void* data);
  void* data;
};
struct StreamOf {
  std::size_t size;
  Extension* extensions;
  Execution* execution;
  void* stream;  // a CUstream
};
struct RunId {
  std::size_t size;
  Extension* extensions;
  Execution* execution;
  std::int64_t id;
};

struct Api {
  std::size_t size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*error_create)(ErrorCreate*);
  void* error_get_message;
  void (*error_destroy)(void* args);
  void* handler_register;
  Error* (*stream_get)(StreamOf*);
  void *type_register, *context_get;
  Error* (*state_set)(State*);
  Error* (*state_get)(State*);
  void *memory_allocate, *memory_free;
  Error* (*schedule)(Schedule*);
  void* num_threads;
  Error* (*future_create)(FutureCreate*);
  Error* (*future_set_available)(FutureSetAvailable*);
  Error* (*future_set_error)(FutureSetError*);
  Error* (*run_id_get)(RunId*);
};

struct CallFrame {  // its size counts no further than the attributes
  std::size_t size;
  Extension* extensions;
  const Api* api;
  Execution* execution;
  int stage;
  Buffers args, results;
  Attributes attributes;
  Future* future;  // set: the result is there when it is resolved
};

}  // namespace xla
}  // namespace a2a
