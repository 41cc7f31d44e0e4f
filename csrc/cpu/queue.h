// The progress thread of a context: asynchronous calls, first in first out.
#pragma once
#include "a2a.h"
#include "signal.h"

namespace a2a {

Queue* queue_create();
void queue_stop(Context& c);  // finishes or fails what is queued or runs, joins the thread
bool queue_left(Context& c);  // after that: whether every other thread has left its call. Waits for a second
// Run `run` in its turn, with the lock held, then `done`, with no lock held; both on the progress thread. kOk, or why not.
int submit_job(Context& c, void (*run)(Context&, void*), void (*done)(void*), void* argument);
void queue_free(Queue* q, bool owner);  // owner: false in a forked child, whose thread is not there

// What one peer exchanges with this rank in an all-to-all.
struct Pair {
  const std::uint8_t* in;
  std::uint8_t* out;
  std::uint64_t send_bytes, recv_bytes;
};

// all_to_all_pairwise.cpp. The caller holds the lock.
int all_to_all_pairwise(Context& c, const Request& request, const Pair* pairs, bool inline_call);
struct Norm;
// reduce_one_shot.cpp, reduce_two_shot.cpp; `run_reduction` is either. With a Norm, `out` is its residual_out.
int reduce_one_shot(Context& c, const Request& request, const a2a_reduction& call, void* out, const void* in,
                    bool inline_call, const Norm* norm = nullptr);
int reduce_two_shot(Context& c, const Request& request, const a2a_reduction& call, void* out, const void* in,
                    bool inline_call, const Norm* norm = nullptr);
std::size_t two_shot_row_bytes(const Context& c);  // the longest that it takes
int run_reduction(Context& c, const Request& request, const a2a_reduction& call, void* out, const void* in,
                  bool inline_call, const Norm* norm = nullptr);
int refuse(Context& c, const Request& request, const char* why, bool inline_call);

}  // namespace a2a
