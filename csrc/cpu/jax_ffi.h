// A call of one rank, as XLA's custom calls bring it: what the handlers for devices, for processes and for GPUs share.
#pragma once
#include "a2a.h"
#include "xla_ffi.h"

namespace a2a {
namespace jax {

struct Site {           // of a custom call in an executable
  std::int64_t number;  // on its communicator
  std::int64_t run;     // that has calls in flight,
  std::uint32_t calls;  // and how many
};

struct Call {
  const xla::Api* api;
  xla::Future* future;
  const std::uint8_t* in;  // on a GPU, memory of that: as are the other operands
  std::uint8_t* out;
  std::uint64_t in_bytes, out_bytes;
  std::uint32_t world, rank;
  std::int64_t group;  // of the devices that differ along the axis alone
  bool ragged;
  std::uint64_t piece;                                       // bytes for each rank, if not ragged
  std::uint64_t row_bytes;                                   // from here on: if ragged
  const std::uint8_t* initial;                               // what out holds at first
  const std::int32_t *in_offset, *send, *out_offset, *recv;  // [world], in rows
  std::int64_t in_rows, out_rows;
  std::int64_t communicator;     // 0: devices of this process; < 0: a communicator of GPUs
  std::int64_t digest, request;  // of what all ranks must agree on; what says it in words (a2a_request)
  double timeout_s;
  char what[128];  // for errors
};

xla::Error* error(const xla::Api* api, xla::Code code, const char* message);
xla::Error* errorf(const xla::Api* api, xla::Code code, const char* format, ...) __attribute__((format(printf, 3, 4)));
xla::Error* make_future(const xla::Api* api, xla::Future** future);
void resolve(const xla::Api* api, xla::Future* future, xla::Code code, const char* message);  // message null: success

// XLA asks what a handler is before it uses it, and knows from that whether it can call it: true, it has been told.
bool answer_metadata(xla::CallFrame* f, bool has_state);
xla::Error* wrong_version(const xla::CallFrame* f);  // null: this jaxlib is one that a2a knows
// What a call says, and whether its operands fit together; reads none of them. Whose call it is, `place` knows.
xla::Error* read_call(const xla::CallFrame* f, Call* call);

// Of a ragged call, as its receiver and as its sender sees it. False, with a message: it lies outside, or sizes differ.
bool piece_fits(const Call& to, std::uint32_t from, std::int64_t rows, std::int64_t at, char* message,
                std::size_t bytes);
bool own_piece_fits(const Call& from, std::uint32_t to, char* message, std::size_t bytes);

// The place of the link with this id in a list of them, or of the null at its end.
template <typename Link>
Link** place_of(Link** list, std::int64_t id) {
  while (*list && (*list)->id != id) list = &(*list)->next;
  return list;
}

// jax_devices.cpp: ranks are devices. The site is told from others by its address.
xla::Error* meet(xla::CallFrame* frame, Call& call, const void* site);
// jax_ranks.cpp: ranks are processes. A site is counted when XLA makes it.
std::int64_t count_site(std::int64_t communicator);
xla::Error* submit(xla::CallFrame* frame, const Call& call, Site* site);

}  // namespace jax
}  // namespace a2a
